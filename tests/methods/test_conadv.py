# SPDX-License-Identifier: Apache-2.0
import copy
import math
from typing import Any

import pytest
import torch
from fits import FEATURES, data, fit, loss_of, network
from lightning.pytorch import LightningModule
from ranks import on_ranks
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from noisescale import (
    ConcurrentAdversary,
    NoiseScaleMeter,
    NoiseScaleMonitor,
    RepeatedAugmentationSampler,
)
from noisescale.methods.conadv import interleave

RADIUS = 0.25


def net_with_state() -> nn.Sequential:
    """With running statistics and random numbers."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(FEATURES, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 3)
    )


def batches(count: int = 6, size: int = 8) -> list[tuple[Tensor, Tensor]]:
    return [(x, y) for x, y in DataLoader(data(count * size), batch_size=size)]


def fgsm(model: nn.Module, x: Tensor, y: Tensor, radius: float) -> Tensor:
    """As it is written in textbooks, in a copy of the random numbers."""
    state = torch.get_rng_state()
    x = x.clone().requires_grad_(True)
    loss = cross_entropy(model(x), y)
    loss.backward()
    torch.set_rng_state(state)
    assert x.grad is not None
    return x.detach() + radius * x.grad.sign()


def loss_of_output(output: Tensor, batch: Any) -> Tensor:
    return cross_entropy(output, batch[1])


@pytest.mark.parametrize("bounds", [None, (-1.0, 1.0)])
def test_without_staleness_it_is_fgsm_to_the_bit(bounds: Any) -> None:
    trained = net_with_state()
    adversary = ConcurrentAdversary(trained, RADIUS, RADIUS, staleness=0, bounds=bounds)
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.1)
    seen = 0

    for (x, y), adversarial in adversary.batches_from(batches(), loss_of_output):
        reference = copy.deepcopy(trained)  # the random numbers are those of the adversary, too
        expected = fgsm(reference, x, y, RADIUS)
        if bounds is not None:
            expected = expected.clamp(*bounds)
        seen += torch.equal(adversarial, expected) and not torch.equal(adversarial, x)
        optimizer.zero_grad()
        (loss_of(trained, (x, y)) + loss_of(trained, (adversarial, y))).backward()
        optimizer.step()

    assert seen == 6


@pytest.mark.parametrize("staleness", [1, 2, 3])
def test_the_copies_are_those_of_the_weights_that_many_steps_ago(staleness: int) -> None:
    trained = network()
    adversary = ConcurrentAdversary(trained, RADIUS, RADIUS, staleness)
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.5)
    before: list[dict[str, Tensor]] = []
    right, fresh = [], []

    for (x, y), adversarial in adversary.batches_from(batches(), loss_of_output):
        before.append({name: value.clone() for name, value in trained.state_dict().items()})
        reference = network()
        reference.load_state_dict(before[max(len(before) - 1 - staleness, 0)])
        right.append(torch.equal(adversarial, fgsm(reference, x, y, RADIUS)))
        fresh.append(torch.equal(adversarial, fgsm(trained, x, y, RADIUS)))
        optimizer.zero_grad()
        loss_of(trained, (adversarial, y)).backward()
        optimizer.step()

    assert right == [True] * 6
    assert fresh[0]
    assert not all(fresh)


def test_a_perturbation_stays_within_the_radius() -> None:
    x, y = batches(1)[0]

    far = ConcurrentAdversary(network(), 0.1, 0.3).perturb(x, lambda out: cross_entropy(out, y))
    near = ConcurrentAdversary(network(), 0.3, 0.1).perturb(x, lambda out: cross_entropy(out, y))

    assert torch.equal(far, near)
    torch.testing.assert_close((far - x).abs(), torch.full_like(x, 0.1))


def test_the_l2_step_has_the_length_of_the_radius_along_the_gradient() -> None:
    x, y = batches(1)[0]
    net = network()
    leaf = x.clone().requires_grad_()
    cross_entropy(net(leaf), y).backward()
    assert leaf.grad is not None

    adversary = ConcurrentAdversary(net, 0.2, 0.5, norm="l2")
    step = adversary.perturb(x, lambda out: cross_entropy(out, y)) - x

    expected = 0.2 * leaf.grad / leaf.grad.norm(dim=1, keepdim=True)
    torch.testing.assert_close(step, expected, atol=1e-6, rtol=1e-4)


def test_an_example_without_a_gradient_is_not_moved_by_the_l2_step() -> None:
    adversary = ConcurrentAdversary(network(), 0.2, 0.5, norm="l2")

    moved = adversary.perturb(torch.ones(2, FEATURES), lambda out: out[:1].sum())

    assert not torch.equal(moved[0], torch.ones(FEATURES))
    assert torch.equal(moved[1], torch.ones(FEATURES))


def test_training_sees_nothing_of_it() -> None:
    def trained(with_adversary: bool) -> dict[str, Tensor]:
        net = net_with_state()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        adversary = ConcurrentAdversary(net, RADIUS, RADIUS)
        torch.manual_seed(3)
        for x, y in batches():
            loss_of(net, (x, y)).backward()
            if with_adversary:
                adversary.prepare(x, lambda out, y=y: cross_entropy(out, y))
                adversary.take()
            optimizer.step()
            optimizer.zero_grad()
        return net.state_dict() | {"random": torch.rand(3)}

    plain, beside = trained(False), trained(True)

    assert all(torch.equal(plain[name], beside[name]) for name in plain)


def test_weights_stay_equal_on_two_ranks_whose_copies_differ() -> None:
    def trained() -> tuple[list[Tensor], Tensor]:
        ddp = DistributedDataParallel(net_with_state())
        adversary = ConcurrentAdversary(ddp, RADIUS, RADIUS)
        examples = data(48)
        loader = DataLoader(examples, batch_size=4, sampler=DistributedSampler(examples))
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        for (x, y), adversarial in adversary.batches_from(loader, loss_of_output):
            optimizer.zero_grad()
            loss_of(ddp, (interleave(x, adversarial), interleave(y, y))).backward()
            optimizer.step()
        return [p.detach() for p in ddp.parameters()], adversarial - x

    (first, moved), (second, moved_too) = on_ranks(2, trained)

    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert not torch.equal(moved, moved_too)


def test_batches_that_all_ranks_share_are_refused() -> None:
    def go_through() -> str:
        adversary = ConcurrentAdversary(network(), RADIUS, RADIUS)
        with pytest.raises(ValueError, match="batches") as raised:
            list(adversary.batches_from(DataLoader(data(16), batch_size=4), loss_of_output))
        return str(raised.value)

    assert on_ranks(2, go_through)[1] == (
        "`batches` must have examples of their own on each rank, got a DataLoader with a"
        " SequentialSampler. Pass `sampler=DistributedSampler(dataset)` to the DataLoader."
    )


def true_noise_scale(net: nn.Module, x: Tensor, y: Tensor, adversarial: Tensor) -> float:
    """tr(Σ)/|G|² of a finite set drawn with replacement, an example being both of its copies."""
    weights = {name: p.detach() for name, p in net.named_parameters()}

    def loss(weights: dict[str, Tensor], x: Tensor, adversarial: Tensor, y: Tensor) -> Tensor:
        out = torch.func.functional_call(net, weights, (torch.stack([x, adversarial]),))
        return cross_entropy(out, y.expand(2))

    each = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0, 0))
    found = each(weights, x, adversarial, y).values()
    gradients = torch.cat([g.flatten(1) for g in found], 1).double()
    return float(gradients.var(0, unbiased=False).sum() / gradients.mean(0).square().sum())


@pytest.mark.parametrize("way", ["two passes", "interleaved"])
def test_the_noise_scale_counts_an_example_with_its_copy_once(way: str) -> None:
    net = network()
    x, y = (torch.stack(column) for column in zip(*data(200), strict=True))
    adversary = ConcurrentAdversary(net, RADIUS, RADIUS)
    adversarial = adversary.perturb(x, lambda out: cross_entropy(out, y.long()))
    truth = true_noise_scale(net, x, y, adversarial)
    meter = NoiseScaleMeter(net, every_n_steps=1, window=2**14)
    generator = torch.Generator().manual_seed(1)

    for _ in range(400):
        some = torch.randint(200, (16,), generator=generator)
        clean, labels, moved = x[some], y[some], adversarial[some]
        if way == "two passes":
            loss = (loss_of(net, (clean, labels)) + loss_of(net, (moved, labels))) / 2
        else:  # with the examples in front, where halves are told apart
            output = net(interleave(clean, moved)).unflatten(0, (-1, 2))
            loss = cross_entropy(output.flatten(0, 1), interleave(labels, labels))
        meter.backward(loss, local_batch_size=16)
        meter.step()
        net.zero_grad()

    measured = meter.noise_scale
    assert measured.low < truth < measured.high, (truth, str(measured))
    assert measured.high / measured.low < 2


class Robust(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = network()
        self.seen: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        (x, y), adversarial = batch
        self.seen.append(float((adversarial - x).abs().max()))
        return (loss_of(self.net, (x, y)) + loss_of(self.net, (adversarial, y))) / 2

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def robust(trainer: Any, module: Any) -> tuple[list[Tensor], float, float]:
    (monitor,) = (c for c in trainer.callbacks if isinstance(c, NoiseScaleMonitor))
    assert module.seen == pytest.approx([RADIUS] * len(module.seen))
    assert math.isfinite(monitor.noise_scale.low)
    examples = monitor.history["examples"][-1]
    return [p.detach() for p in module.parameters()], monitor.history["batch_size"][-1], examples


def test_a_trainer_goes_through_its_batches_on_two_ranks_and_counts_distinct_examples() -> None:
    module, monitor = Robust(), NoiseScaleMonitor(every_n_steps=1)
    sampler = RepeatedAugmentationSampler(data(96), repeats=1)  # asks for its rank when it is there
    loader = DataLoader(data(96), batch_size=8, sampler=sampler)
    adversary = ConcurrentAdversary(module.net, RADIUS, RADIUS)

    first, second = fit(
        monitor,
        model=module,
        train_loader=adversary.batches_from(loader, loss_of_output),
        results=robust,
        max_epochs=2,
    )

    assert all(torch.equal(a, b) for a, b in zip(first[0], second[0], strict=True))
    assert first[1:] == (16.0, 2 * 96.0)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: ConcurrentAdversary(network(), 0, 1),
            "`radius` must be positive and finite, got 0. Pass 8/255 for images in [0, 1], say.",
        ),
        (
            lambda: ConcurrentAdversary(network(), 1, math.inf),
            "`step_size` must be positive and finite, got inf. Pass `radius` for FGSM's step.",
        ),
        (
            lambda: ConcurrentAdversary(network(), 1, 1, -1),
            "`staleness` must be a whole number of steps, 0 or more, got -1. Leave it at 1.",
        ),
        (
            lambda: ConcurrentAdversary(network(), 1, 1, norm="l1"),  # type: ignore[arg-type]  # is refused
            '`norm` must be one of "linf", "l2", got \'l1\'. Leave it at "linf".',
        ),
        (
            lambda: ConcurrentAdversary(network(), 1, 1, bounds=(1, 0)),
            "`bounds` must be the least and the largest value of an input, got (1, 0). Pass (0, 1)"
            " for images in that range.",
        ),
        (
            lambda: ConcurrentAdversary(network(), 1, 1).take(),
            "No batch is prepared. Call `prepare` with it first, or `perturb` for a batch that is"
            " wanted at once.",
        ),
        (
            lambda: ConcurrentAdversary(network(), 1, 1, 0).prepare(torch.zeros(1), torch.sum),
            "`staleness` must be 1 or more to prepare batches, got 0. Call `perturb` instead.",
        ),
        (
            lambda: ConcurrentAdversary(network(), 1, 1).perturb(torch.zeros(1).int(), torch.sum),
            "`x` must be floating-point inputs, got torch.int32. Perturb what the model computes"
            " from them: embeddings, say.",
        ),
    ],
)
def test_bad_input_is_refused(call: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError, RuntimeError)) as raised:
        call()

    assert str(raised.value) == message
