# SPDX-License-Identifier: Apache-2.0
"""Models on several devices, against gradients that are taken one by one on the CPU."""

import math
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from brute_force import columns_of, gradient_of, gradients_of_examples
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore
from ways_of_capture import FEATURES, OUTPUTS, batch, half_squares

from fake_device.expectations import ROWS, agreed, expectations
from fake_device.transfers import READ, TO_HOST, Transfers
from noisescale import NoiseScaleMeter
from noisescale.collectors.ddp import Phase
from noisescale.collectors.gradient_norms import Norms, Piece
from noisescale.collectors.loss_scale import LossScale
from noisescale.collectors.micro_batch import MicroBatchCollector
from noisescale.collectors.rows.step_rows import MeasuredStep
from noisescale.meter.choosing import choose_collector
from noisescale.meter.options import MeterOptions
from noisescale.methods.inner_product import NoiseAlongGradient

STEPS = 4


class Places(NamedTuple):
    first: str
    last: str
    loss: str


PLACES = {
    "two accelerators": Places("fake:0", "fake:1", "fake:1"),
    "two accelerators, the loss on the first": Places("fake:0", "fake:1", "fake:0"),
    "the first layers on the CPU": Places("cpu", "fake:0", "fake:0"),
    "the head on the CPU": Places("fake:0", "cpu", "cpu"),
    "the head on the CPU, the loss not": Places("fake:1", "cpu", "fake:1"),
    "the loss on the CPU": Places("fake:0", "fake:1", "cpu"),
}
TWO, ON_CPU = PLACES["two accelerators"], Places("cpu", "cpu", "cpu")


class Thinned(torch.autograd.Function):
    """Multiplies the gradient by random numbers of its device."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient * torch.rand_like(gradient)


class Split(nn.Module):
    """Layers on two devices; in the first ones rows are moved on behind a layer."""

    def __init__(self, places: Places = ON_CPU, *, between: Any = lambda x: x) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.places, self.between = places, between
        self.first = nn.Linear(FEATURES, 7).to(self.places.first)
        self.norm = nn.LayerNorm(7).to(self.places.first)
        self.last = nn.Linear(7, OUTPUTS).to(self.places.last)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.first(x.to(self.places.first))).tanh()
        return self.last(self.between(self.between(h).to(self.places.last)))

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return half_squares(self(x).to(self.places.loss), y.to(self.places.loss))


@pytest.fixture(autouse=True)
def small_parameters_are_kept_and_large_ones_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("noisescale.collectors.captured._LARGE_BYTES", 100)
    monkeypatch.setattr("noisescale.collectors.captured._MOST_BYTES_KEPT", 50)


def meter_of(model: nn.Module, way: str, **options: Any) -> NoiseScaleMeter:
    return NoiseScaleMeter(model, small_batch=way, every_n_steps=1, **options)  # type: ignore[arg-type]


def measured(model: Any, meter: NoiseScaleMeter, way: str, step: int) -> MeasuredStep:
    """One step, of whose passes each is checked."""
    model.zero_grad()
    for micro, n in enumerate(ROWS[way]):
        meter._capture.collector.check_next_passes(True)
        meter.backward(model.loss(*batch(step, 0, micro, n)) / len(ROWS[way]), n)
    meter.step()
    (found,) = meter._capture.unread.read()
    return found


@pytest.mark.parametrize("way", ROWS)
@pytest.mark.parametrize("place", PLACES)
def test_norms_of_the_whole_and_of_groups_are_those_of_single_gradients(
    place: str, way: str
) -> None:
    model = Split(PLACES[place])
    meter = meter_of(model, way, groups={"first": "^first", "last": "^last"})

    steps = [measured(model, meter, way, step) for step in range(STEPS)]

    for step, got in enumerate(steps):
        assert agreed(got.norms, expectations(Split(), way, step))
        for entry, group in enumerate(("first", "last", "norm")):
            columns = columns_of(Split(), lambda name, group=group: name.startswith(group))
            assert agreed(got.entries[entry], expectations(Split(), way, step, columns)), group
        assert got.changes.cause is None
        assert got.changes.checked


class TwoHeads(nn.Module):
    def __init__(self, places: Places = ON_CPU, *, summed: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.places, self.summed = places, summed
        self.heads = nn.ModuleList(nn.Linear(FEATURES, OUTPUTS).to(to) for to in places[:2])

    def forward(self, x: Tensor) -> Any:
        outputs = [head(x.to(head.weight.device)) for head in self.heads]
        return sum(outputs) if self.summed else outputs

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        first, last = self(x)
        sq = half_squares(first + last.to(first.device), y.to(first.device))
        return sq.to(self.places.loss)


@pytest.mark.parametrize("place", PLACES)
def test_halves_are_cut_at_outputs_on_several_devices(place: str) -> None:
    model = TwoHeads(PLACES[place])
    meter = meter_of(model, "half")

    for step in range(3):
        got = measured(model, meter, "half", step).norms
        assert agreed(got, expectations(TwoHeads(summed=True), "half", step))


def gradient(model: Split, step: int, micro: int, rows: int) -> Tensor:
    """On the CPU, in float64."""
    on_cpu = Split().double()
    on_cpu.load_state_dict(model.state_dict())
    x, y = (part.double() for part in batch(step, 0, micro, rows))
    return gradient_of(on_cpu, lambda net: net.loss(x, y))


OPTIMIZERS: dict[str, Any] = {
    "momentum_buffer": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, foreach=False),
    "exp_avg": lambda p: torch.optim.Adam(p, 0.1, (0.9, 0.99), 1e-3, foreach=False),
}
"""By the name of their mean of gradients."""


@pytest.mark.parametrize("kept", OPTIMIZERS)
@pytest.mark.parametrize("place", PLACES)
def test_an_optimizer_s_state_is_found_on_each_device(place: str, kept: str) -> None:
    """Its state of the steps before; in the first step there is none."""
    model = Split(PLACES[place])
    optimizer = OPTIMIZERS[kept](model.parameters())
    meter = meter_of(model, "micro_batch", extra=[NoiseAlongGradient], optimizer=optimizer)

    for step in range(STEPS):
        known = optimizer.state if step else {}
        means = [known[p][kept].cpu().double().flatten() for p in model.parameters() if known]
        rows = enumerate(ROWS["micro_batch"])
        parts = torch.stack([gradient(model, step, micro, n) for micro, n in rows])
        got = measured(model, meter, "micro_batch", step).entries[-1]
        optimizer.step()

        found = [got.small_sq_norm, got.big_sq_norm]
        if step == 0:
            assert all(map(math.isnan, found))
            continue
        mean = torch.cat(means)
        along = [(some @ mean).square().mean() / (mean @ mean) for some in (parts, parts.mean(0))]
        assert found == pytest.approx([float(one) for one in along], rel=1e-5)


def passes(model: Split, way: str, meter: NoiseScaleMeter | None = None) -> Iterator[int]:
    """Train for some steps; yield before each of them."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1, foreach=False)
    for step in range(STEPS):
        yield step
        for micro, n in enumerate(ROWS[way]):
            loss = model.loss(*batch(step, 0, micro, n)) / len(ROWS[way])
            if meter is not None:
                meter.before_backward(loss, n)
            loss.backward()
        if meter is not None:
            meter.step()
        optimizer.step()
        optimizer.zero_grad()


def transfers_of(places: Places, way: str) -> Counter[str]:
    """In measured steps, from the second on, by kind."""
    model = Split(places)
    steps = passes(model, way, meter_of(model, way))
    next(steps)
    next(steps)
    with Transfers() as transfers:
        list(steps)
    return transfers.kinds(of_package=True)


@pytest.mark.parametrize("way", ROWS)
@pytest.mark.parametrize("place", PLACES)
def test_the_host_reads_nothing_and_copies_no_more_than_with_one_device(
    place: str, way: str
) -> None:
    several = transfers_of(PLACES[place], way)

    assert several[READ] + several[TO_HOST] == 0
    if "cpu" not in PLACES[place]:  # else the halves' pass copies gradients, as every pass does
        assert several == transfers_of(Places(*["fake:0"] * 3), way)


@pytest.mark.parametrize("way", ROWS)
@pytest.mark.parametrize("place", PLACES)
def test_weights_and_random_numbers_are_bitwise_those_without(place: str, way: str) -> None:
    """Of backward passes that draw on both devices."""
    left = []
    for is_measured in (False, True):
        model = Split(PLACES[place], between=Thinned.apply)
        torch.fake.manual_seed_all(0)
        meter = meter_of(model, way, backward_twice=True)
        list(passes(model, way, meter if is_measured else None))
        states = torch.get_rng_state(), *map(torch.fake.get_rng_state, (0, 1))
        left.append([*model.parameters(), *states])

    assert meter.measured_steps == STEPS
    assert all(torch.equal(a, b) for a, b in zip(*left, strict=True))


def test_a_gradient_that_comes_while_those_of_another_device_are_normed_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Autograd has a thread for each device. Here it is interrupted where it matters."""
    model = Split(TWO)
    collector = choose_collector(model, MeterOptions(small_batch="micro_batch"))
    assert isinstance(collector, MicroBatchCollector)
    norm, late = collector.norms.add, [model.last.bias]

    def interrupted(norms: Norms, pieces: list[Piece], **options: Any) -> Norms:
        if late and pieces:
            p = late.pop()
            collector._on_gradient(collector.norms.names.index("last.bias"), torch.ones_like(p))
        return norm(norms, pieces, **options)

    monkeypatch.setattr(collector.norms, "add", interrupted)
    model.last.bias.requires_grad_(False)
    loss = model.loss(*batch(0, 0, 0, 4))
    collector.before_backward(loss, 4)
    loss.backward()

    small: Any = collector.small_sq_norms()
    gradients = [p.grad.double().cpu() for p in model.parameters() if p.grad is not None]
    assert not late
    assert float(small[0]) == pytest.approx(
        sum(float(g.square().sum()) for g in gradients) + OUTPUTS
    )


def halved(state: None, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """An average with gradients of zeros."""
    average: torch.futures.Future[Tensor] = torch.futures.Future()
    average.set_result(bucket.buffer() / 2)
    return average


def test_ddp_measures_a_module_on_two_devices() -> None:
    """DistributedDataParallel takes one on devices of one type. Of two ranks one is there."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    ddp = DistributedDataParallel(Split(TWO))
    ddp.register_comm_hook(None, halved)
    collector = choose_collector(ddp, MeterOptions())

    for step in range(STEPS):  # by hooks at first, then at the end of the pass
        ddp.zero_grad()
        x, y = batch(step, 0, 0, 6)
        loss = half_squares(ddp(x), y.to(TWO.loss))
        collector.before_backward(loss, 6)
        loss.backward()
        small, big = collector.small_sq_norms(), collector.big_sq_norms()
        collector.reset()

        assert small is not None
        gradients = gradients_of_examples(Split(), (x, y), half_squares)
        sq_norm = torch.stack(gradients).mean(0).square().sum().item()
        assert float(small[0]) == pytest.approx(sq_norm, rel=1e-5)
        assert 0 < float(big[0]) < sq_norm / 4  # its share
    assert collector.phase is Phase.AT_BACKWARD_END  # type: ignore[attr-defined]


def test_a_loss_scale_is_taken_out_on_another_device() -> None:
    scaler = torch.amp.GradScaler("fake", init_scale=4.0)
    scaler.scale(torch.ones((), device="fake:1"))

    unscaled = LossScale(scaler).unscale(torch.full((2,), 32.0, device="fake:0"))

    assert unscaled.tolist() == [2.0, 2.0]
    assert unscaled.device == torch.device("fake:0")
