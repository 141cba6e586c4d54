# SPDX-License-Identifier: Apache-2.0
"""Steps that the module takes by hand: one optimizer, and the two of a GAN."""

import re
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from brute_force import Expected, expected, micro_batch
from fits import FEATURES, data, fit, loader
from torch import Tensor, nn
from torch.utils.data import DistributedSampler

from noisescale import NoiseScaleMonitor
from noisescale.collectors.rows.step_norms import StepNorms

BATCH_SIZE = 8


class Gan(L.LightningModule):
    """Still (learning rate 0), so that the oracle knows the weights of every step."""

    def __init__(self, toggles: bool = True, detaches: bool = True, set_to_none: bool = True):
        super().__init__()
        self.automatic_optimization = False
        torch.manual_seed(0)
        self.generator = nn.Linear(4, FEATURES)
        self.discriminator = nn.Sequential(nn.Linear(FEATURES, 6), nn.Tanh(), nn.Linear(6, 1))
        self.toggles, self.detaches, self.set_to_none = toggles, detaches, set_to_none

    def losses(self, x: Tensor) -> dict[str, Any]:
        def of_discriminator() -> Tensor:
            fake = self.generator(x[:, :4])
            fake = fake.detach() if self.detaches else fake
            return (
                self.discriminator(fake).square().mean()
                + (self.discriminator(x) - 1).square().mean()
            )

        def of_generator() -> Tensor:
            return (self.discriminator(self.generator(x[:, :4])) - 1).square().mean()

        return {"generator": of_generator, "discriminator": of_discriminator}

    def training_step(self, batch: Any, batch_idx: int) -> None:
        losses = self.losses(batch[0])
        turns = dict(zip(("generator", "discriminator"), self.optimizers(), strict=True))
        for name in ("discriminator", "generator"):
            optimizer = turns[name]
            if self.toggles:
                self.toggle_optimizer(optimizer)
            loss = losses[name]()
            optimizer.zero_grad(set_to_none=self.set_to_none)
            self.manual_backward(loss)
            optimizer.step()
            if self.toggles:
                self.untoggle_optimizer(optimizer)

    def configure_optimizers(self) -> Any:
        return [
            torch.optim.SGD(self.generator.parameters(), lr=0.0),
            torch.optim.SGD(self.discriminator.parameters(), lr=0.0),
        ]


def expected_steps(name: str, ranks: int) -> list[Expected]:
    """What ranks show of the gradients of one network, at every step."""
    gan = Gan().double()
    x = data().tensors[0].double()
    dealt = [list(DistributedSampler(data(), ranks, rank)) for rank in range(ranks)]
    steps = []
    for start in range(0, len(dealt[0]), BATCH_SIZE):
        parts = []
        for indices in dealt:
            batch = x[indices[start : start + BATCH_SIZE]]
            gan.zero_grad()
            gan.losses(batch)[name]().backward()
            parameters = getattr(gan, name).parameters()
            gradient = torch.cat([p.grad.flatten() for p in parameters])
            parts.append(micro_batch(gradient, len(batch)))
        steps.append(expected(parts))
    return steps


@pytest.mark.parametrize("toggles", [True, False])
@pytest.mark.parametrize("detaches", [True, False])
def test_each_network_of_a_gan_is_measured_on_its_own_gradient(
    toggles: bool, detaches: bool, recorded: list[StepNorms]
) -> None:
    """Also where the other's backward pass leaves gradients that are thrown away."""
    results = fit(
        NoiseScaleMonitor(),
        model=Gan(toggles, detaches),
        train_loader=loader(BATCH_SIZE),
        strategy="ddp_fork_find_unused_parameters_true",
        log_every_n_steps=1,
        results=lambda *_: list(recorded),
    )

    for steps in results:
        assert len(steps) == 14
        for first, name in enumerate(("discriminator", "generator")):
            for got, want in zip(steps[first::2], expected_steps(name, 2), strict=True):
                assert got.small_sq_norm == pytest.approx(want.small_sq_norm, rel=2e-6)
                assert got.big_sq_norm == pytest.approx(want.big_sq_norm, rel=2e-6)


@pytest.mark.parametrize("toggles", [True, False])
@pytest.mark.parametrize("detaches", [True, False])
def test_one_process_compares_halves_of_each_network_of_a_gan(
    toggles: bool, detaches: bool, recorded: list[StepNorms]
) -> None:
    """Also where each network sees passes of the other's loss, which reach it or do not."""
    monitor = NoiseScaleMonitor(every_n_steps=1)
    gan = Gan(toggles, detaches)

    fit(
        monitor,
        model=gan,
        train_loader=loader(BATCH_SIZE),
        strategy="auto",
        ranks=1,
        log_every_n_steps=1,
    )

    assert [logged.meter.skipped_steps for logged in monitor._meters] == [0, 0]
    for first, name in enumerate(("discriminator", "generator")):
        for step, (x, _) in zip(recorded[first::2], loader(BATCH_SIZE), strict=True):
            gan.zero_grad()
            gan.losses(x)[name]().backward()
            whole = sum(p.grad.square().sum().item() for p in getattr(gan, name).parameters())
            assert step.big_sq_norm == pytest.approx(whole, rel=1e-5)
            assert step.small_sq_norm > step.big_sq_norm


def test_gradients_that_are_zeroed_in_place_count_as_a_mix() -> None:
    """Without reading the device nobody can tell zeros from gradients: told, not measured."""

    def skipped(fitting: Any, module: Any) -> list[float]:
        (monitor,) = [c for c in fitting.callbacks if isinstance(c, NoiseScaleMonitor)]
        return [m.meter.skipped_steps for m in monitor._meters]

    with pytest.raises(Exception, match="averaged over ranks more than once in one step"):
        fit(
            NoiseScaleMonitor(),
            model=Gan(toggles=False, detaches=False, set_to_none=False),
            strategy="ddp_fork_find_unused_parameters_true",
            results=skipped,
        )


def test_the_second_optimizers_metrics_have_a_name_of_their_own() -> None:
    def metrics(fitting: Any, module: Any) -> dict[str, Any]:
        (monitor,) = [c for c in fitting.callbacks if isinstance(c, NoiseScaleMonitor)]
        return {
            "metrics": {k: v.item() for k, v in fitting.callback_metrics.items()},
            "noise_traces": [scale.noise_trace for scale in monitor.noise_scales],
            "steps": [h["step"].tolist() for h in monitor.histories],
            "groups": list(monitor.group_noise_scales),
        }

    result, _ = fit(
        NoiseScaleMonitor(groups={"g": "generator", "d": "discriminator"}),
        model=Gan(),
        train_loader=loader(BATCH_SIZE),
        strategy="ddp_fork_find_unused_parameters_true",
        log_every_n_steps=1,
        results=metrics,
    )

    first, second = result["noise_traces"]
    assert result["metrics"]["noise_scale/noise_trace"] == pytest.approx(first)
    assert result["metrics"]["noise_scale/optimizer_1/noise_trace"] == pytest.approx(second)
    assert result["steps"] == [[1, 2, 3, 4, 5, 6, 7]] * 2
    assert result["groups"] == ["g"]
    assert "noise_scale/optimizer_1/group/d" in result["metrics"]


class ByHand(L.LightningModule):
    """Accumulates two batches a step, and divides the losses by two."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        torch.manual_seed(0)
        self.net = nn.Linear(FEATURES, 1)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        self.manual_backward(self.net(batch[0]).square().mean() / 2)
        if batch_idx % 2:
            optimizer.step()
            optimizer.zero_grad()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def test_accumulation_by_hand_in_one_process_compares_micro_batches(
    recorded: list[StepNorms],
) -> None:
    (steps,) = fit(
        NoiseScaleMonitor(),
        ranks=1,
        strategy="auto",
        model=ByHand(),
        train_loader=loader(BATCH_SIZE, 64),
        results=lambda *_: list(recorded),
    )

    x, net = data(64).tensors[0].double(), ByHand().double().net
    assert len(steps) == 4
    for index, got in enumerate(steps):
        gradients = []
        for micro in (2 * index, 2 * index + 1):
            net.zero_grad()
            net(x[8 * micro : 8 * micro + 8]).square().mean().backward()
            gradients.append(torch.cat([p.grad.flatten() for p in net.parameters()]))
        parts = torch.stack(gradients)
        assert got.small_sq_norm == pytest.approx(parts.square().sum().item() / 2, rel=2e-6)
        assert got.big_sq_norm == pytest.approx(parts.mean(0).square().sum().item(), rel=2e-6)
        assert (got.small_batch, got.big_batch) == (8, 16)


def test_accumulation_by_hand_that_averages_every_batch_is_told() -> None:
    message = "Wrap all but the last backward of a step in `model.no_sync()`"
    with pytest.raises(Exception, match=re.escape(message)):
        fit(NoiseScaleMonitor(), model=ByHand())


def test_averaging_every_batch_does_not_mix_micro_batches(recorded: list[StepNorms]) -> None:
    """What DDP averages again is what it has averaged before: the sum stays right."""
    results = fit(
        NoiseScaleMonitor(small_batch="micro_batch"),
        model=ByHand(),
        train_loader=loader(BATCH_SIZE, 32),
        results=lambda *_: list(recorded),
    )

    x, net = data(32).tensors[0].double(), ByHand().double().net
    gradients = []
    for rank in range(2):
        indices = list(DistributedSampler(data(32), 2, rank))
        for micro in range(2):
            net.zero_grad()
            net(x[indices[8 * micro : 8 * micro + 8]]).square().mean().backward()
            gradients.append(torch.cat([p.grad.flatten() for p in net.parameters()]))
    parts = torch.stack(gradients)
    for (got,) in results:
        assert got.small_sq_norm == pytest.approx(parts.square().sum().item() / 4, rel=2e-6)
        assert got.big_sq_norm == pytest.approx(parts.mean(0).square().sum().item(), rel=2e-6)
        assert (got.small_batch, got.big_batch) == (8, 32)


class TwoLosses(L.LightningModule):
    """Two networks with a loss and an optimizer each, and a step of both every other batch."""

    def __init__(self, clips: bool = False, of_one_batch: int = 1) -> None:
        super().__init__()
        self.automatic_optimization = False
        torch.manual_seed(0)
        self.actor, self.critic = nn.Linear(FEATURES, 1), nn.Linear(FEATURES, 1)
        self.clips, self.of_one_batch = clips, of_one_batch

    def loss(self, name: str, x: Tensor) -> Tensor:
        return (getattr(self, name)(x) - 1).square().mean()

    def training_step(self, batch: Any, batch_idx: int) -> None:
        for name in ("actor", "critic"):
            for _ in range(self.of_one_batch):
                self.manual_backward(self.loss(name, batch[0]) / 2)
        if batch_idx % 2:
            for optimizer in self.optimizers():
                if self.clips:
                    self.clip_gradients(optimizer, 1e-3, gradient_clip_algorithm="norm")
                optimizer.step()
                optimizer.zero_grad()

    def configure_optimizers(self) -> Any:
        return [
            torch.optim.SGD(getattr(self, name).parameters(), lr=0.0)
            for name in ("actor", "critic")
        ]


@pytest.mark.parametrize("clips", [False, True])
def test_a_loss_that_is_anothers_and_clipping_by_hand_do_not_count(
    clips: bool, recorded: list[StepNorms]
) -> None:
    (steps,) = fit(
        NoiseScaleMonitor(),
        ranks=1,
        strategy="auto",
        model=TwoLosses(clips),
        train_loader=loader(BATCH_SIZE, 64),
        log_every_n_steps=1,
        results=lambda *_: list(recorded),
    )

    x, module = data(64).tensors[0].double(), TwoLosses().double()
    assert len(steps) == 8
    for index, got in enumerate(steps):
        name, gradients = ("actor", "critic")[index % 2], []
        for micro in (2 * (index // 2), 2 * (index // 2) + 1):
            module.zero_grad()
            module.loss(name, x[8 * micro : 8 * micro + 8]).backward()
            parameters = getattr(module, name).parameters()
            gradients.append(torch.cat([p.grad.flatten() for p in parameters]))
        parts = torch.stack(gradients)
        assert got.small_sq_norm == pytest.approx(parts.square().sum().item() / 2, rel=2e-6)
        assert got.big_sq_norm == pytest.approx(parts.mean(0).square().sum().item(), rel=2e-6)
        assert (got.small_batch, got.big_batch, got.examples) == (8, 16, 16)


def test_several_passes_of_one_batch_are_told_and_not_measured() -> None:
    module = TwoLosses(of_one_batch=2)
    with pytest.warns(UserWarning, match="Several backward passes of one step used the same"):
        fit(
            monitor := NoiseScaleMonitor(),
            ranks=1,
            strategy="auto",
            model=module,
            train_loader=loader(BATCH_SIZE, 64),
            results=lambda *_: None,
        )

    assert monitor.noise_scale.steps == 0


class TemplateGan(L.LightningModule):
    """As in Lightning's own example: the discriminator runs twice in its pass, of one batch."""

    def __init__(self, batches_a_step: int) -> None:
        super().__init__()
        self.automatic_optimization = False
        torch.manual_seed(0)
        self.generator = nn.Sequential(nn.Linear(4, 16), nn.LeakyReLU(), nn.Linear(16, FEATURES))
        self.discriminator = nn.Sequential(nn.Linear(FEATURES, 16), nn.Tanh(), nn.Linear(16, 1))
        self.batches_a_step = batches_a_step

    def training_step(self, batch: Any, batch_idx: int) -> None:
        real = batch[0]
        noise = torch.randn(len(real), 4)

        def of_generator() -> Tensor:
            return nn.functional.softplus(-self.discriminator(self.generator(noise))).mean()

        def of_discriminator() -> Tensor:
            fake = self.discriminator(self.generator(noise).detach())
            both = nn.functional.softplus(fake) + nn.functional.softplus(-self.discriminator(real))
            return both.mean() / 2

        losses = of_generator, of_discriminator
        for optimizer, loss in zip(self.optimizers(), losses, strict=True):
            self.toggle_optimizer(optimizer)
            self.manual_backward(loss() / self.batches_a_step)
            if (batch_idx + 1) % self.batches_a_step == 0:
                optimizer.step()
                optimizer.zero_grad()
            self.untoggle_optimizer(optimizer)

    def configure_optimizers(self) -> Any:
        networks = self.generator, self.discriminator
        return [torch.optim.Adam(net.parameters(), lr=2e-4) for net in networks]


def skipped(fitting: Any, module: Any) -> list[float]:
    metrics = fitting.callback_metrics
    prefixes = ("noise_scale/", "noise_scale/optimizer_1/")
    return [metrics[prefix + "skipped_steps"].item() for prefix in prefixes]


def fit_template(monitor: NoiseScaleMonitor, batches_a_step: int) -> list[float]:
    (found,) = fit(
        monitor,
        ranks=1,
        strategy="auto",
        model=TemplateGan(batches_a_step),
        train_loader=loader(BATCH_SIZE, 96),
        results=skipped,
        log_every_n_steps=1,
    )
    return found  # type: ignore[no-any-return]


@pytest.mark.parametrize("batches_a_step", [1, 2])
def test_both_networks_of_a_gan_on_one_device_are_measured_at_each_step(
    batches_a_step: int,
) -> None:
    assert fit_template(NoiseScaleMonitor(every_n_steps=1), batches_a_step) == [0, 0]


def test_a_discriminator_is_no_matter_of_single_examples() -> None:
    """A warning has the reason and remedies that exist."""
    with pytest.warns(UserWarning, match="`model` must have parameters with a formula") as told:
        fit_template(NoiseScaleMonitor(small_batch="example"), 1)

    (message,) = (str(one.message) for one in told if "a formula" in str(one.message))
    assert "of optimizer 1: " in message
    assert "got none: discriminator.0.weight" in message
    assert message.endswith(
        ' (in modules called more than once). Choose small_batch="micro_batch" if two or more are'
        ' accumulated, or "rank" on several devices.'
    )
