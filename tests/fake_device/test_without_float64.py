# SPDX-License-Identifier: Apache-2.0
"""A device without float64, as Macs' MPS."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from ways_of_capture import Net, batch, half_squares

import fake_device
from fake_device.expectations import ROWS, steps_expected, train
from noisescale import NoiseScaleMeter
from noisescale.collectors import squared_norms
from noisescale.collectors.rows.step_norms import StepNorms
from noisescale.collectors.squared_norms import sums_of, sums_of_squares, wide_dtype
from noisescale.estimation.noise_scale import NoiseScale
from noisescale.lightning.scheduler.scheduled_fit import _mean_over_ranks
from noisescale.methods.across_ranks.rank_states import mean_of_states_
from noisescale.methods.adasum.optimizer import AdasumOptimizer
from noisescale.methods.decentlam.own_weights import MeanWeights
from noisescale.methods.inner_product import NoiseAlongGradient
from noisescale.scheduling.agreement import Agreement

DEVICE = torch.device("fake:0")


@pytest.fixture(autouse=True)
def without_float64() -> Iterator[None]:
    with patch.dict(squared_norms._HAS_FLOAT64, clear=True), fake_device.without_float64():
        yield


def test_a_type_of_device_is_asked_once_whether_it_has_float64() -> None:
    assert wide_dtype(DEVICE) == torch.float32
    assert wide_dtype(torch.device("cpu")) == torch.float64
    with patch.object(torch, "ones", side_effect=AssertionError):
        assert wide_dtype(torch.device("fake:1")) == torch.float32
    squared_norms._HAS_FLOAT64.clear()
    torch.ops.fake_device.set_float64(True)
    assert wide_dtype(DEVICE) == torch.float64


@pytest.mark.parametrize("tensors", [10, 100_000])
def test_sums_of_squares_in_float32_are_right_to_three_in_ten_million(tensors: int) -> None:
    """Norms that differ a million times, as those of a model's layers may."""
    generator = torch.Generator().manual_seed(tensors)
    norms = 10 ** (6 * torch.rand(tensors, generator=generator) - 3)
    exact = norms.double().square().sum().item()

    (found,) = sums_of_squares([[norms.to(DEVICE)]], device=DEVICE).tolist()
    (plain,) = sums_of([[norms.to(DEVICE)]], device=DEVICE).tolist()

    assert found == pytest.approx(exact, rel=3e-7)
    assert plain == pytest.approx(norms.double().sum().item(), rel=3e-7)


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("way", ROWS)
def test_norms_and_moments_are_those_of_single_gradients(
    way: str, scaled: bool, recorded: list[StepNorms]
) -> None:
    model = Net().to(DEVICE)
    scaler = torch.amp.GradScaler("fake", enabled=scaled)
    meter = NoiseScaleMeter(model, small_batch=way, every_n_steps=1, grad_scaler=scaler)  # type: ignore[arg-type]

    for step in range(4):
        train(model, meter, way, step, scaler)

    found = steps_expected(meter, way, recorded, rel=1e-6)
    assert len(found) == 4
    for got, wanted in found:
        assert got.moments() == pytest.approx(wanted.moments, rel=1e-5)


OPTIMIZERS: dict[str, Any] = {
    "momentum": lambda p: torch.optim.SGD(p, 0.001, momentum=0.9, foreach=False),
    "Adam": lambda p: torch.optim.Adam(p, 0.001, foreach=False),
}


def along_its_mean(name: str, device: torch.device) -> NoiseScale:
    """Of a few steps of an optimizer, whose state is the direction."""
    model = Net().to(device)
    optimizer = OPTIMIZERS[name](model.parameters())
    meter = NoiseScaleMeter(model, every_n_steps=1, extra=[NoiseAlongGradient], optimizer=optimizer)
    for step in range(16):
        x, y = (part.to(device) for part in batch(step, 0, 0, 32))
        meter.backward(half_squares(model(x), y), 32)
        meter.step()
        optimizer.step()
        optimizer.zero_grad()
    assert meter.measured_steps == 16
    return meter.extra_noise_scales[NoiseAlongGradient.name]


@pytest.mark.parametrize("way", ROWS)
def test_numbers_of_the_host_are_not_on_the_default_device(way: str) -> None:
    """As after `torch.set_default_device("mps")`."""
    with torch.device(DEVICE):
        model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1))
        meter = NoiseScaleMeter(model, small_batch=way, every_n_steps=1)  # type: ignore[arg-type]
        for _ in range(4):
            for rows in ROWS[way]:
                loss = (model(torch.randn(rows, 4)) - 1).square().sum() / sum(ROWS[way])
                meter.backward(loss, rows)
            meter.step(loss_divisor=1)
            model.zero_grad()
        assert meter.measured_steps >= 3


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_what_an_optimizer_s_state_shows_is_what_it_shows_on_the_cpu(name: str) -> None:
    here, on_cpu = (along_its_mean(name, device) for device in (DEVICE, torch.device("cpu")))

    assert here.steps == on_cpu.steps > 0
    assert on_cpu.low > 0  # known
    wanted = [on_cpu.grad_sq_norm, on_cpu.noise_trace, on_cpu.low]
    assert [here.grad_sq_norm, here.noise_trace, here.low] == pytest.approx(wanted, rel=1e-4)


class OtherRank:
    """Stands in for the sum or the largest over this rank and one with other numbers."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, theirs: list[float]) -> None:
        self.theirs = theirs
        monkeypatch.setattr(dist, "all_reduce", self)
        monkeypatch.setattr("noisescale.scheduling.agreement.world_size", lambda: 2)
        monkeypatch.setattr("noisescale.scheduling.agreement.device_for", lambda _, device: device)

    def __call__(self, numbers: Tensor, op: Any = None, **_: Any) -> None:
        theirs = torch.tensor(self.theirs).to(numbers).view_as(numbers)
        if op == dist.ReduceOp.MAX:
            numbers.copy_(torch.maximum(numbers, theirs))
        else:
            numbers += theirs


def test_checksums_of_32_bits_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """float32 alone holds 24 bits."""
    agreement = Agreement(DEVICE, checksum=2**31 + 1)

    OtherRank(monkeypatch, [2**31, -(2**31), 1, -1])
    agreement.check_schedule()
    assert agreement.same_schedule
    OtherRank(monkeypatch, [2**31, -(2**31), 2, -2])
    with pytest.raises(RuntimeError, match="the same schedule"):
        Agreement(DEVICE, checksum=2**31 + 1).check_schedule()


def test_ranks_add_up_and_compare_what_they_want(monkeypatch: pytest.MonkeyPatch) -> None:
    OtherRank(monkeypatch, [100.0])
    trainer: Any = SimpleNamespace(world_size=2, strategy=SimpleNamespace(root_device=DEVICE))
    assert _mean_over_ranks(64.0, trainer) == 82.0

    OtherRank(monkeypatch, [100.0, -100.0, 0.0, 0.0])
    with pytest.raises(RuntimeError, match="got 64 to 100"):
        Agreement(DEVICE).check(64.0)


def test_weights_and_states_of_optimizers_are_averaged() -> None:
    assert MeanWeights([torch.ones(3, device=DEVICE)], None).consensus_distance == 0.0

    def optimizer(gradient: float) -> AdasumOptimizer:
        p = nn.Parameter(torch.zeros(2, device=DEVICE))
        p.grad = torch.full_like(p, gradient)
        made = AdasumOptimizer(torch.optim.SGD([p], lr=0.1, momentum=0.9, foreach=False))
        made.step()
        return made

    base = optimizer(1.0)

    mean_of_states_(base, [optimizer(2.0).state_dict()], counts_own=True)

    ((_, state),) = base.state.items()
    assert state["momentum_buffer"].tolist() == [1.5, 1.5]
