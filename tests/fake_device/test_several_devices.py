# SPDX-License-Identifier: Apache-2.0
"""Models on several devices, against gradients that are taken one by one on the CPU."""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
from brute_force import (
    Expected,
    columns_of,
    examples_of,
    expected,
    gradients_of_examples,
    halvings,
    micro_batch,
)
from torch import Tensor, nn
from ways_of_capture import FEATURES, OUTPUTS, batch, half_squares

from fake_device.transfers import READ, TO_DEVICE, TO_DEVICE_LATER, TO_HOST, Transfers
from noisescale import NoiseScaleMeter
from noisescale.collectors.choosing import choose_collector
from noisescale.collectors.collector import Collector
from noisescale.collectors.loss_scale import LossScale
from noisescale.collectors.rows.step_norms import StepNorms
from noisescale.collectors.rows.step_rows import MeasuredStep, StepRows

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
TWO = PLACES["two accelerators"]


class Split(nn.Module):
    """Layers on two devices; in the first ones rows are moved on behind a layer."""

    def __init__(self, places: Places | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.places = places or Places("cpu", "cpu", "cpu")
        self.first = nn.Linear(FEATURES, 7).to(self.places.first)
        self.norm = nn.LayerNorm(7).to(self.places.first)
        self.last = nn.Linear(7, OUTPUTS).to(self.places.last)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.first(x.to(self.places.first))).tanh()
        return self.last(h.to(self.places.last))

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return half_squares(self(x).to(self.places.loss), y.to(self.places.loss))


@pytest.fixture(autouse=True)
def small_parameters_are_kept_and_large_ones_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("noisescale.collectors.micro_batch._LARGE_BYTES", 100)
    monkeypatch.setattr("noisescale.collectors.micro_batch._MOST_BYTES_KEPT", 50)


ROWS = {"half": (6,), "micro_batch": (3, 6, 2), "example": (3, 4)}


def measured(model: Split, collector: Collector, step: int, rows: tuple[int, ...]) -> MeasuredStep:
    """One step, of micro-batches of so many rows."""
    model.zero_grad()
    for micro, n in enumerate(rows):
        loss = model.loss(*batch(step, 0, micro, n)) / len(rows)
        collector.expect(rows=n, last=micro == len(rows) - 1)
        collector.check_next_passes(True)
        collector.before_backward(loss, n)
        loss.backward()
    small, changes = collector.small_sq_norms(), collector.changes
    queue = StepRows(collector.norms, collector.group)
    layout = collector.layout(rows, len(rows))
    counts: dict[str, Any] = {"examples": sum(rows), "unmeasured_examples": 0}
    queue.add(
        small, collector.big_sq_norms(), layout, unmeasured_steps=0, changes=changes, **counts
    )
    (found,) = queue.read()
    collector.reset()
    return found


def expectations(way: str, step: int, columns: list[int]) -> list[Expected]:
    """What a step may show, by the CPU."""
    single = [
        gradients_of_examples(Split(), batch(step, 0, micro, n), half_squares)
        for micro, n in enumerate(ROWS[way])
    ]
    if way == "half":
        return halvings(single[0], columns)
    if way == "example":
        return [expected([part for some in single for part in examples_of(some)], columns)]
    return [
        expected([micro_batch(torch.stack(some).mean(0), len(some)) for some in single], columns)
    ]


def agree(got: StepNorms, wanted: list[Expected]) -> bool:
    return any(got[:4] == pytest.approx(tuple(want), rel=1e-5) for want in wanted)


@pytest.mark.parametrize("way", ROWS)
@pytest.mark.parametrize("place", PLACES)
def test_norms_of_the_whole_and_of_groups_are_those_of_single_gradients(
    place: str, way: str
) -> None:
    model = Split(PLACES[place])
    groups = {"first": "^first", "last": "^last"}
    collector = choose_collector(model, small_batch=way, groups=groups)  # type: ignore[arg-type]

    steps = [measured(model, collector, step, ROWS[way]) for step in range(STEPS)]

    for step in range(1 if way == "example" else 0, STEPS):  # the first is a probe
        got, names = steps[step], [n for n, _ in model.named_parameters()]
        assert agree(got.norms, expectations(way, step, columns_of(Split(), lambda n: True)))
        for entry, group in enumerate(("first", "last", "norm")):
            columns = columns_of(Split(), [n for n in names if n.startswith(group)].__contains__)
            assert agree(got.entries[entry], expectations(way, step, columns)), group
        assert got.changes.cause is None
        assert got.changes.checked


def gradient_by_name(model: Split, step: int, micro: int, rows: int) -> dict[str, Tensor]:
    """On the CPU, in float64."""
    on_cpu = Split().double()
    on_cpu.load_state_dict({n: p.cpu() for n, p in model.state_dict().items()})
    x, y = batch(step, 0, micro, rows)
    on_cpu.loss(x.double(), y.double()).backward()
    return {n: p.grad for n, p in on_cpu.named_parameters()}  # type: ignore[misc]


def along_momentum(
    gradients: dict[str, Tensor], states: dict[str, dict[str, Tensor]], _: float
) -> float:
    m = {n: state["momentum_buffer"].double() for n, state in states.items()}
    length = math.sqrt(sum(float(one.square().sum()) for one in m.values()))
    return (sum(float((gradients[n] * m[n]).sum()) for n in m) / length) ** 2


def as_adam_scales(
    gradients: dict[str, Tensor], states: dict[str, dict[str, Tensor]], steps: float
) -> float:
    v = {n: state["exp_avg_sq"].double() / (1 - 0.99**steps) for n, state in states.items()}
    return sum(float((g / (v[n].sqrt() + 1e-3)).square().sum()) for n, g in gradients.items())


OPTIMIZERS: dict[str, Any] = {
    "momentum": (lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, foreach=False), along_momentum),
    "preconditioner": (
        lambda p: torch.optim.Adam(p, 0.1, (0.9, 0.99), 1e-3, foreach=False),
        as_adam_scales,
    ),
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("place", PLACES)
def test_an_optimizer_s_state_is_found_on_each_device(place: str, kind: str) -> None:
    """Its state of the steps before; in the first step there is none."""
    model = Split(PLACES[place])
    make, by_hand = OPTIMIZERS[kind]
    optimizer = make(model.parameters())
    collector = choose_collector(model, small_batch="micro_batch", **{kind: optimizer})
    rows = ROWS["micro_batch"]

    for step in range(STEPS):
        states = {
            n: {k: v.cpu().clone() for k, v in optimizer.state[p].items() if v is not None}
            for n, p in model.named_parameters()
        }
        parts = [gradient_by_name(model, step, micro, n) for micro, n in enumerate(rows)]
        whole = {n: sum(part[n] for part in parts) / len(parts) for n in parts[0]}
        got = measured(model, collector, step, rows).entries[-1]
        optimizer.step()

        if step == 0:
            assert math.isnan(got.small_sq_norm)
            assert math.isnan(got.big_sq_norm)
            continue
        of_parts = sum(by_hand(part, states, step) for part in parts) / len(parts)
        assert got.small_sq_norm == pytest.approx(of_parts, rel=1e-5)
        assert got.big_sq_norm == pytest.approx(by_hand(whole, states, step), rel=1e-5)


WAYS: dict[str, Any] = {
    "half": {},
    "micro_batch": {"groups": {"first": "^first"}},
    "example": {"groups": {"first": "^first"}},
}


def trained(
    model: Split, optimizer: torch.optim.Optimizer, meter: NoiseScaleMeter | None
) -> Iterator[int]:
    """Yield after each step."""
    rows = (3, 4) if meter is None or meter.measures_along_gradient else (6, 6)
    for step in range(12):
        for micro, n in enumerate(rows):
            loss = model.loss(*batch(step, 0, micro, n)) / len(rows)
            if meter is None:
                loss.backward()
            else:
                meter.backward(loss, n)
        if meter is not None:
            meter.step()
        optimizer.step()
        optimizer.zero_grad()
        yield step
