# SPDX-License-Identifier: Apache-2.0
"""A rank's own gradient, and the mean that nobody else computes."""

import warnings
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from brute_force import expected, micro_batch
from forked_once import Ranks
from refused import refused
from torch import Tensor, nn

from noisescale import AdasumOptimizer, NoiseScaleMeter
from noisescale.collectors import unaveraged
from noisescale.collectors.unaveraged import UnaveragedCollector
from noisescale.methods.inner_product import NoiseAlongGradient


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(9, 4, sparse=True), nn.Linear(4, 3), nn.Linear(3, 2).double())


def loss_of(net: nn.Sequential, rank: int, step: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    x = torch.randint(9, (5 + rank,), generator=generator)
    return net[2](net[1](net[0](x)).double()).square().sum(1).mean()


def gradients(rank: int, micro_batches: int = 1) -> Tensor:
    net = model()
    for step in range(micro_batches):
        (loss_of(net, rank, step) / micro_batches).backward()
    return torch.cat([p.grad.to_dense().double().flatten() for p in net.parameters()])


def measured(bucket: int = 2**22, micro_batches: int = 1, **options: Any) -> list[float]:
    """Small norms of this rank, big ones of all, and |G|²."""
    unaveraged._BUCKET = bucket
    net = model()
    meter = NoiseScaleMeter(net, averaged=False, **options)
    collector = meter._capture.collector
    assert isinstance(collector, UnaveragedCollector)
    for step in range(micro_batches):
        loss = loss_of(net, dist.get_rank(), step) / micro_batches
        meter.backward(loss, local_batch_size=5 + dist.get_rank())
    before = [p.grad.clone() for p in net.parameters()]
    small, big = collector.small_sq_norms(), collector.big_sq_norms()
    assert all(
        torch.equal(p.grad.to_dense(), one.to_dense())
        for p, one in zip(net.parameters(), before, strict=True)
    )
    dist.all_reduce(big)
    meter.step()
    return [*small.tolist(), *big.tolist(), meter.average_moments.grad_sq_norm]


two, three = Ranks(2), Ranks(3)
NORMS = {(b, m): three(partial(measured, b, m)) for b in (1, 20, 2**22) for m in (1, 2)}
of_groups = three(partial(measured, groups={"last": r"^2\."}))


@pytest.mark.parametrize(("bucket", "micro_batches"), NORMS)
def test_norms_are_those_of_this_rank_and_of_the_mean(bucket: int, micro_batches: int) -> None:
    found = NORMS[bucket, micro_batches]()

    each = [gradients(rank, micro_batches) for rank in range(3)]
    sizes = [micro_batches * (5 + rank) for rank in range(3)]
    step = expected([micro_batch(g, n) for g, n in zip(each, sizes, strict=True)])
    for gradient, (small, big, signal) in zip(each, found, strict=True):
        assert small == pytest.approx(float(gradient.square().sum()), rel=1e-5)
        assert big == pytest.approx(step.big_sq_norm, rel=1e-5)
        assert signal == pytest.approx(step.moments[0], rel=1e-4)


def test_groups_have_their_own_norms() -> None:
    mean = torch.stack([gradients(rank) for rank in range(3)]).mean(0)
    last = 3 * 2 + 2
    parts = [float(part.square().sum()) for part in (mean[-last:], mean[:-last])]
    assert of_groups()[0][2:4] == pytest.approx(parts, rel=1e-5)


@two
def without_gradients_on_a_rank() -> int:
    net = model()
    meter = NoiseScaleMeter(net, averaged=False)
    for step in range(3):
        if dist.get_rank() or step == 1:
            meter.backward(loss_of(net, dist.get_rank(), step), local_batch_size=5)
        meter.step()
        net.zero_grad()
    return meter.measured_steps


def test_a_rank_without_a_gradient_counts_as_zero_and_leaves_nobody_waiting() -> None:
    assert without_gradients_on_a_rank() == [1, 1]


@two
def late_and_clipped() -> list[Any]:
    found = []
    for clipped in (False, True):
        net = model()
        meter = NoiseScaleMeter(net, averaged=False)
        loss = loss_of(net, dist.get_rank())
        meter.before_backward(loss, 5, capture_average=clipped)
        loss.backward()
        if clipped:
            for p in net.parameters():
                p.grad.mul_(0.001)
        meter.step()
        found.append(tuple(meter.average_moments))
    return found


def test_norms_of_a_pass_that_is_clipped_before_the_step_are_taken_at_its_end() -> None:
    late, clipped = late_and_clipped()[0]
    assert late == pytest.approx(clipped)


class AveragesInItsStep(torch.optim.SGD):
    """As nanochat's optimizers do."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                dist.all_reduce(p.grad, dist.ReduceOp.SUM)
                p.grad.div_(dist.get_world_size())
        super().step(closure)


def averaged_in_the_step(late: bool, micro_batches: int) -> tuple[int, list[str]]:
    net = model()
    optimizer = AveragesInItsStep(net.parameters(), lr=0.0)
    meter = NoiseScaleMeter(net, averaged=False, every_n_steps=1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(3):
            optimizer.zero_grad()
            for pass_ in range(micro_batches):
                loss = loss_of(net, dist.get_rank(), 2 * step + pass_) / micro_batches
                meter.backward(loss, local_batch_size=5)
            for one in (optimizer, meter) if late else (meter, optimizer):
                one.step()
        return meter.measured_steps, [str(one.message) for one in caught]


IN_THE_STEP = {
    (late, micros): two(partial(averaged_in_the_step, late, micros))
    for late in (False, True)
    for micros in (1, 2)
}


@pytest.mark.parametrize(("late", "micro_batches"), IN_THE_STEP)
def test_an_optimizer_that_averages_in_its_step_is_measured_before_it(
    late: bool, micro_batches: int
) -> None:
    """After the step the ranks' gradients are gone, which a warning tells."""
    first, second = IN_THE_STEP[late, micro_batches]()

    assert first[0] == second[0] == (0 if late else 3)
    assert any("`meter.step()`" in text for text in first[1]) == late


@two
def with_loss_scales() -> list[float]:
    """Without a scale, with one, and unscaled by the loop."""
    found = []
    for scale, unscaled in ((None, False), (1024.0, False), (1024.0, True)):
        net = model()
        scaler = None if scale is None else torch.amp.GradScaler("cpu", init_scale=scale)
        optimizer = AdasumOptimizer(torch.optim.SGD(list(net.parameters())[1:], 0.1))
        meter = NoiseScaleMeter(
            net, averaged=False, grad_scaler=scaler, parameters=list(net.parameters())[1:]
        )
        loss = loss_of(net, dist.get_rank())
        meter.backward(loss if scaler is None else scaler.scale(loss), 5)
        if scaler is not None and unscaled:
            scaler.unscale_(optimizer)
        meter.step()
        found.append(meter.average_moments.noise_trace)
    return found


def test_the_loss_scale_is_taken_out() -> None:
    plain, *scaled = with_loss_scales()[0]
    assert scaled == pytest.approx([plain, plain], rel=1e-5)


@two
def refusals() -> None:
    extra = {"extra": [NoiseAlongGradient]}
    for options in ({"small_batch": "micro_batch"}, {"small_batch": "half"}, extra):
        with refused("averaged", requirement="be True with"):
            NoiseScaleMeter(model(), averaged=False, **options)


def test_only_ranks_can_be_compared() -> None:
    """In one process there is nothing to average."""
    assert refusals() == [None, None]
    meter = NoiseScaleMeter(nn.Linear(2, 1), averaged=False)
    assert not isinstance(meter._capture.collector, UnaveragedCollector)
