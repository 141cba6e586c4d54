# SPDX-License-Identifier: Apache-2.0
import copy
import math
from typing import Any

import pytest
import torch
from brute_force import gradients_of_examples
from fits import FEATURES, classifier, data, fit, loss_of, network
from ranks import on_ranks
from refused import refused
from tiers import slow
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


def fgsm(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """As it is written in textbooks, in a copy of the random numbers."""
    state = torch.get_rng_state()
    x = x.clone().requires_grad_(True)
    cross_entropy(model(x), y).backward()
    torch.set_rng_state(state)
    assert x.grad is not None
    return x.detach() + RADIUS * x.grad.sign()


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
        expected = fgsm(reference, x, y)
        if bounds is not None:
            expected = expected.clamp(*bounds)
        seen += torch.equal(adversarial, expected) and not torch.equal(adversarial, x)
        optimizer.zero_grad()
        (loss_of(trained, (x, y)) + loss_of(trained, (adversarial, y))).backward()
        optimizer.step()

    assert seen == 6


@pytest.mark.parametrize("staleness", [1, 3])
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
        right.append(torch.equal(adversarial, fgsm(reference, x, y)))
        fresh.append(torch.equal(adversarial, fgsm(trained, x, y)))
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


def test_the_l2_step_has_the_length_of_the_radius_along_the_gradient_where_there_is_one() -> None:
    x, y = batches(1)[0]
    net = network()
    leaf = x.clone().requires_grad_()
    cross_entropy(net(leaf)[:6], y[:6]).backward()
    assert leaf.grad is not None

    adversary = ConcurrentAdversary(net, 0.2, 0.5, norm="l2")
    step = adversary.perturb(x, lambda out: cross_entropy(out[:6], y[:6])) - x

    expected = 0.2 * leaf.grad[:6] / leaf.grad[:6].norm(dim=1, keepdim=True)
    torch.testing.assert_close(step[:6], expected, atol=1e-6, rtol=1e-4)
    assert torch.equal(step[6:], torch.zeros(2, FEATURES))


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


def test_ranks_stay_equal_where_their_copies_differ_and_batches_of_all_ranks_are_refused() -> None:
    def one_rank() -> tuple[list[Tensor], Tensor]:
        ddp = DistributedDataParallel(net_with_state())
        adversary = ConcurrentAdversary(ddp, RADIUS, RADIUS)
        examples = data(48)
        loader = DataLoader(examples, batch_size=4, sampler=DistributedSampler(examples))
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        for (x, y), adversarial in adversary.batches_from(loader, loss_of_output):
            optimizer.zero_grad()
            loss_of(ddp, (interleave(x, adversarial), interleave(y, y))).backward()
            optimizer.step()
        shared = DataLoader(data(16), batch_size=4)
        with refused("batches", remedy="DistributedSampler"):
            list(adversary.batches_from(shared, loss_of_output))
        return [p.detach() for p in ddp.parameters()], adversarial - x

    (first, moved), (second, moved_too) = on_ranks(2, one_rank)

    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert not torch.equal(moved, moved_too)


@pytest.mark.parametrize("way", ["two passes", slow("interleaved")])
def test_the_noise_scale_counts_an_example_with_its_copy_once(way: str) -> None:
    net = network()
    x, y = (torch.stack(column) for column in zip(*data(200), strict=True))
    adversary = ConcurrentAdversary(net, RADIUS, RADIUS)
    adversarial = adversary.perturb(x, lambda out: cross_entropy(out, y.long()))
    both = torch.stack([x, adversarial], 1)

    def of_both(output: Tensor, label: Tensor) -> Tensor:
        return cross_entropy(output[0], label.expand(2))

    gradients = torch.stack(gradients_of_examples(net, (both, y), of_both))
    # They are drawn with replacement.
    truth = float(gradients.var(0, correction=0).sum() / gradients.mean(0).square().sum())
    meter = NoiseScaleMeter(net, every_n_steps=1, window=2**14)
    generator = torch.Generator().manual_seed(1)

    for _ in range(200):
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


def test_a_trainer_goes_through_its_batches_on_two_ranks_and_counts_distinct_examples() -> None:
    made, seen = classifier(), []

    class Robust(type(made)):  # type: ignore[misc]
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            (x, y), adversarial = batch
            seen.append(float((adversarial - x).abs().max()))
            return (loss_of(self.net, (x, y)) + loss_of(self.net, (adversarial, y))) / 2

    module, monitor = Robust(), NoiseScaleMonitor(every_n_steps=1)
    sampler = RepeatedAugmentationSampler(data(96), repeats=1)  # asks for its rank when it is there
    loader = DataLoader(data(96), batch_size=8, sampler=sampler)
    adversary = ConcurrentAdversary(module.net, RADIUS, RADIUS)

    def results(*_: Any) -> Any:
        history = monitor.history
        counts = history["batch_size"][-1], history["examples"][-1]
        return list(module.parameters()), seen, monitor.noise_scale.low, counts

    found = fit(
        monitor,
        model=module,
        train_loader=adversary.batches_from(loader, loss_of_output),
        results=results,
        max_epochs=2,
    )

    for weights, moved, low, counts in found:
        assert all(map(torch.equal, weights, found[0][0]))
        assert moved == pytest.approx([RADIUS] * 12)
        assert math.isfinite(low)
        assert counts == (16.0, 2 * 96.0)


@pytest.mark.parametrize(
    ("arguments", "name", "got"),
    [
        ({"radius": 0}, "radius", "0"),
        ({"step_size": math.inf}, "step_size", "inf"),
        ({"staleness": -1}, "staleness", "-1"),
        ({"norm": "l1"}, "norm", "'l1'"),
        ({"bounds": (1, 0)}, "bounds", "(1, 0)"),
    ],
)
def test_bad_arguments_are_refused(arguments: Any, name: str, got: str) -> None:
    with refused(name, got=got):
        ConcurrentAdversary(network(), **{"radius": 1, "step_size": 1, **arguments})


def test_batches_that_cannot_be_perturbed_or_prepared_are_refused() -> None:
    adversary = ConcurrentAdversary(network(), 1, 1)

    with pytest.raises(RuntimeError, match="`prepare`"):
        adversary.take()
    with refused("staleness", got="0", remedy="`perturb`"):
        ConcurrentAdversary(network(), 1, 1, 0).prepare(torch.zeros(1), torch.sum)
    with refused("x", error=TypeError, got="torch.int32"):
        adversary.perturb(torch.zeros(1).int(), torch.sum)
