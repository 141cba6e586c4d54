# SPDX-License-Identifier: Apache-2.0
"""Steps that the module takes by hand: one optimizer, and the two of a GAN."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from brute_force import Expected, expected, gradient_of, micro_batch
from fits import FEATURES, check_norms, data, fit, fit_here, loader
from lightning.pytorch.loggers import CSVLogger
from tiers import slow
from torch import Tensor, nn
from torch.utils.data import DistributedSampler

from noisescale import NoiseScaleMonitor, predict
from noisescale.collectors.rows.step_norms import StepNorms
from noisescale.lightning.monitor.one_loss import OneLoss

BATCH_SIZE = 8
LOGGED = {"log_every_n_steps": 1}
"""Steps are recorded in their order, whatever network they are of."""


class Still(L.LightningModule):
    """Learning rate 0: an oracle knows the weights of every step."""

    names: tuple[str, ...]
    """Of the networks, each with an optimizer."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        torch.manual_seed(0)

    def turns(self) -> Iterator[tuple[str, Any]]:
        made = self.optimizers()
        yield from zip(self.names, made if isinstance(made, list) else [made], strict=True)

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(getattr(self, name).parameters(), lr=0.0) for name in self.names]


class Gan(Still):
    """As in Lightning's own example: the discriminator runs twice in its step."""

    names = ("discriminator", "generator")

    def __init__(
        self,
        toggles: bool = True,
        detaches: bool = True,
        set_to_none: bool = True,
        batches_a_step: int = 1,
    ) -> None:
        super().__init__()
        self.generator = nn.Linear(4, FEATURES)
        self.discriminator = nn.Sequential(nn.Linear(FEATURES, 6), nn.Tanh(), nn.Linear(6, 1))
        self.toggles, self.detaches, self.set_to_none = toggles, detaches, set_to_none
        self.batches_a_step = batches_a_step

    def loss(self, name: str, x: Tensor) -> Tensor:
        fake = self.generator(x[:, :4])
        if name == "generator":
            return (self.discriminator(fake) - 1).square().mean()
        of_fake = self.discriminator(fake.detach() if self.detaches else fake)
        return of_fake.square().mean() + (self.discriminator(x) - 1).square().mean()

    def training_step(self, batch: Any, batch_idx: int) -> None:
        for name, optimizer in self.turns():
            if self.toggles:
                self.toggle_optimizer(optimizer)
            loss = self.loss(name, batch[0]) / self.batches_a_step
            if batch_idx % self.batches_a_step == 0:
                optimizer.zero_grad(set_to_none=self.set_to_none)
            self.manual_backward(loss)
            if (batch_idx + 1) % self.batches_a_step == 0:
                optimizer.step()
            if self.toggles:
                self.untoggle_optimizer(optimizer)


class ByHand(Still):
    """A loss and an optimizer for each network, and a step of all every other batch."""

    def __init__(self, *names: str, clips: bool = False, of_one_batch: int = 1) -> None:
        super().__init__()
        self.names = names or ("net",)
        for name in self.names:
            setattr(self, name, nn.Linear(FEATURES, 1))
        self.clips, self.of_one_batch = clips, of_one_batch

    def loss(self, name: str, x: Tensor) -> Tensor:
        return (getattr(self, name)(x) - 1).square().mean()

    def training_step(self, batch: Any, batch_idx: int) -> None:
        for name in self.names:
            for _ in range(self.of_one_batch):
                self.manual_backward(self.loss(name, batch[0]) / 2)
        if batch_idx % 2:
            for _, optimizer in self.turns():
                if self.clips:
                    self.clip_gradients(optimizer, 1e-3, gradient_clip_algorithm="norm")
                optimizer.step()
                optimizer.zero_grad()


def expected_steps(
    module: Any, examples: int, *, ranks: int = 1, batches_a_step: int = 1
) -> list[Expected]:
    """What micro-batches show of each network at every step."""
    module = module.double()
    x = data(examples).tensors[0].double()
    dealt = [list(range(examples))]
    if ranks > 1:
        dealt = [list(DistributedSampler(data(examples), ranks, rank)) for rank in range(ranks)]
    steps, a_step = [], BATCH_SIZE * batches_a_step
    for start in range(0, len(dealt[0]), a_step):
        for name in module.names:
            parts = []
            for first in range(start, start + a_step, BATCH_SIZE):
                for indices in dealt:
                    batch = x[indices[first : first + BATCH_SIZE]]
                    network = getattr(module, name)
                    gradient = gradient_of(network, lambda _, n=name, b=batch: module.loss(n, b))
                    parts.append(micro_batch(gradient, len(batch)))
            steps.append(expected(parts))
    return steps


@pytest.mark.slow
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
        results=lambda *_: list(recorded),
        **LOGGED,
    )

    for steps in results:
        check_norms(steps, expected_steps(Gan(), 100, ranks=2))


@pytest.mark.parametrize(
    ("toggles", "detaches", "set_to_none"),
    [(False, False, True), (True, True, False), slow(True, False, True), slow(False, True, True)],
)
def test_one_process_compares_halves_of_each_network_of_a_gan(
    toggles: bool, detaches: bool, set_to_none: bool, recorded: list[StepNorms]
) -> None:
    """Zeros in place do not say that a step begins again, but the pass that reaches it does."""
    gan = Gan(toggles, detaches, set_to_none)
    monitor = NoiseScaleMonitor(every_n_steps=1)

    fit_here(monitor, model=gan, train_loader=loader(BATCH_SIZE), **LOGGED)

    assert [logged.meter.skipped_steps for logged in monitor.meters] == [0, 0]
    for step, want in zip(recorded, expected_steps(Gan(), 100), strict=True):
        assert step.big_sq_norm == pytest.approx(want.big_sq_norm, rel=1e-5)
        assert step.small_sq_norm > step.big_sq_norm


def test_micro_batches_of_both_networks_of_a_gan_are_compared(recorded: list[StepNorms]) -> None:
    monitor, gan = NoiseScaleMonitor(every_n_steps=1), Gan(batches_a_step=2)

    fit_here(monitor, model=gan, train_loader=loader(BATCH_SIZE, 96), **LOGGED)

    check_norms(recorded, expected_steps(Gan(), 96, batches_a_step=2))


@pytest.mark.slow
@pytest.mark.parametrize(
    "module", [lambda: Gan(False, False, set_to_none=False), ByHand], ids=["zeroed", "by hand"]
)
def test_averaging_more_than_once_a_step_is_told_with_the_remedy(module: Any) -> None:
    """Nobody can tell gradients from zeros in place without reading the device."""
    strategy = "ddp_fork_find_unused_parameters_true"
    with pytest.raises(Exception, match=r"more than once in one step.*model\.no_sync\(\)"):
        fit(NoiseScaleMonitor(), model=module(), strategy=strategy)


def test_the_second_optimizers_metrics_have_a_name_of_their_own() -> None:
    groups = {"g": "generator", "d": "discriminator"}
    monitor = NoiseScaleMonitor(groups=groups, every_n_steps=1)

    fitting = fit_here(monitor, model=Gan(), train_loader=loader(BATCH_SIZE, 56), **LOGGED)

    metrics = {k.removeprefix("noise_scale/"): v for k, v in fitting.callback_metrics.items()}
    found = [metrics["noise_trace"].item(), metrics["optimizer_1/noise_trace"].item()]
    assert found == pytest.approx([one.meter.noise_scale.noise_trace for one in monitor.meters])
    assert found[0] != found[1]
    histories = [one.history for one in monitor.meters]
    assert [h["step"].tolist() for h in histories] == [[1, 2, 3, 4, 5, 6, 7]] * 2
    assert list(monitor.group_noise_scales) == ["d"]
    assert "optimizer_1/group/g" in metrics


@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize("names", [("net",), ("actor", "critic")])
def test_accumulation_by_hand_compares_micro_batches(
    names: tuple[str, ...], clips: bool, recorded: list[StepNorms]
) -> None:
    """Also where a loss is another network's, and gradients are clipped by hand."""
    module = ByHand(*names, clips=clips)

    fit_here(NoiseScaleMonitor(), model=module, train_loader=loader(BATCH_SIZE, 64), **LOGGED)

    check_norms(recorded, expected_steps(ByHand(*names), 64, batches_a_step=2))
    assert {step.examples for step in recorded} == {16}


class OfOneLoss(Still):
    """Two optimizers on one network, as Muon on its matrices and AdamW on the rest."""

    names = ("net",)

    def __init__(self, batches_a_step: int = 1, *, second_every: int = 1) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(FEATURES, 4), nn.Tanh(), nn.Linear(4, 1))
        self.batches_a_step, self.second_every = batches_a_step, second_every

    def loss(self, name: str, x: Tensor) -> Tensor:
        return (self.net(x) - 1).square().mean()

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.manual_backward(self.loss("net", batch[0]) / self.batches_a_step)
        step, rest = divmod(batch_idx + 1, self.batches_a_step)
        for which, optimizer in enumerate(self.optimizers()):
            if not rest and not (which and step % self.second_every):
                optimizer.step()
                optimizer.zero_grad()

    def configure_optimizers(self) -> Any:
        first, _, last = self.net
        return torch.optim.SGD(last.parameters(), 0.0), torch.optim.AdamW(first.parameters(), 0.0)


def test_optimizers_of_one_loss_have_one_noise_scale(recorded: list[StepNorms]) -> None:
    """The first step shows that they do, and is not measured."""
    monitor = NoiseScaleMonitor(every_n_steps=1)

    fit_here(monitor, model=OfOneLoss(2), train_loader=loader(BATCH_SIZE, 96), **LOGGED)

    check_norms(recorded[-5:], expected_steps(OfOneLoss(), 96, batches_a_step=2)[1:])
    history = monitor.history
    assert len(monitor.meters) == 1
    assert history["step"].tolist() == [2, 3, 4, 5, 6]
    assert history["examples"].tolist() == [32, 48, 64, 80, 96]
    kinds = history.optimizer
    assert (kinds.kind.name, kinds.beside.name) == ("ADAM", "SGD")


@pytest.mark.parametrize(("module", "optimizers"), [(OfOneLoss(2), 1), (ByHand("a", "b"), 2)])
def test_optimizers_of_one_loss_have_one_decision(
    module: Still, optimizers: int, tmp_path: Path
) -> None:
    monitor, files = NoiseScaleMonitor(every_n_steps=1), CSVLogger(tmp_path)

    fit_here(monitor, model=module, train_loader=loader(BATCH_SIZE, 800), logger=files, **LOGGED)

    found = predict(tmp_path)
    assert [*found.decisions] == [*range(optimizers)]
    assert ("allows least" in found.decision.headline) is (optimizers > 1)


class Critic(Gan):
    """Its critic steps twice for each step of the generator, which it reaches, too."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        for name, optimizer in [*self.turns()][: 1 + batch_idx % 2]:
            for _, each in self.turns():
                each.zero_grad()
            self.manual_backward(self.loss(name, batch[0]))
            optimizer.step()


def test_a_critic_with_more_steps_is_measured_apart() -> None:
    monitor = NoiseScaleMonitor(every_n_steps=1)

    fit_here(monitor, model=Critic(False, False), train_loader=loader(BATCH_SIZE, 64))

    assert [logged.meter.measured_steps for logged in monitor.meters] == [8, 4]


@pytest.mark.parametrize("elsewhere", [True, False])
def test_ranks_find_together_what_optimizers_step_on(elsewhere: bool) -> None:
    """A rank that saw no other loss does not measure another gradient than those that did."""
    layers = [nn.Linear(2, 2), nn.Linear(2, 2)]
    optimizers = [torch.optim.SGD(layer.parameters(), 0.1) for layer in layers]
    asked: list[bool] = []

    def on_any_rank(here: bool) -> bool:
        asked.append(here)
        return here or elsewhere

    looking = OneLoss(optimizers, on_any_rank)
    looking.look_at_pass(layers[1](layers[0](torch.ones(1, 2))).sum(), 1)
    first = looking.look_at_step(0)

    assert asked == [False]
    assert first == ("losses of their own" if elsewhere else None)
    assert elsewhere or looking.look_at_step(1) == "one loss"


def test_optimizers_of_which_one_rests_are_not_looked_at_for_long() -> None:
    """Each look walks through the graph."""
    monitor = NoiseScaleMonitor(every_n_steps=1)

    fit_here(monitor, model=OfOneLoss(second_every=20), train_loader=loader(2, 60))

    assert monitor._fit.one_loss is None
    assert len(monitor.meters) == 2


def test_a_resumed_fit_knows_that_they_are_of_one_loss(tmp_path: Path) -> None:
    monitor, module = NoiseScaleMonitor(every_n_steps=1), OfOneLoss()
    data_of_fit = loader(BATCH_SIZE, 32)
    fitting = fit_here(monitor, model=module, train_loader=data_of_fit)
    fitting.save_checkpoint(tmp_path / "4.ckpt")

    resumed = NoiseScaleMonitor(every_n_steps=1)
    trained = {"model": OfOneLoss(), "train_loader": data_of_fit, "max_epochs": 2}
    fit_here(resumed, **trained, ckpt_path=tmp_path / "4.ckpt")

    meters = [one.meters[0].meter for one in (monitor, resumed)]
    assert [(meter.steps, meter.measured_steps) for meter in meters] == [(4, 3), (8, 7)]


def test_optimizers_of_one_loss_that_step_apart_are_not_measured() -> None:
    monitor = NoiseScaleMonitor(every_n_steps=1)

    with pytest.warns(UserWarning, match=r"must step together.* Step all of them after the same"):
        fit_here(monitor, model=OfOneLoss(second_every=2), train_loader=loader(BATCH_SIZE, 64))

    assert monitor.noise_scale.steps == 0


def test_averaging_every_batch_does_not_mix_micro_batches(recorded: list[StepNorms]) -> None:
    """What DDP averages again is what it has averaged before: the sum stays right."""
    results = fit(
        NoiseScaleMonitor(small_batch="micro_batch"),
        model=ByHand(),
        train_loader=loader(BATCH_SIZE, 32),
        results=lambda *_: list(recorded),
    )

    for steps in results:
        check_norms(steps, expected_steps(ByHand(), 32, ranks=2, batches_a_step=2))


def test_passes_that_are_not_told_apart_are_told_and_not_measured() -> None:
    module = ByHand("actor", "critic", of_one_batch=2)
    monitor = NoiseScaleMonitor()

    with pytest.warns(UserWarning, match="used the same"):
        fit_here(monitor, model=module, train_loader=loader(BATCH_SIZE, 64))

    assert monitor.noise_scale.steps == 0
