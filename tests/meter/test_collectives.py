# SPDX-License-Identifier: Apache-2.0
"""Collectives of measuring: few, and the same on all ranks in the same order, whatever happens."""

import contextlib
import json
import warnings
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import devices
import pytest
import torch
import torch.distributed as dist
from faults import OF_A_METER, FaultError, Faults
from ranks import on_ranks
from recorded_collectives import Collective, RecordedCollectives
from tiers import slow_but
from torch.amp import GradScaler
from ways_of_capture import WAYS, Net, Way, alone, batch, ddp, half_squares, not_averaging

from noisescale import NoiseScaleMeter

UNAVERAGED = "averaged by nobody"
STATIC = "DDP, static graph"

WAYS_OF_TWO = {name: way for name, way in WAYS.items() if way.ranks == 2} | {
    STATIC: Way(2, "rank", "rank", partial(ddp, static_graph=True)),
    "DDP, unused parameters": Way(
        2, "rank", "rank", lambda model, *, unused: ddp(model, unused=True)
    ),
    UNAVERAGED: Way(2, "rank", "auto", alone),
}

QUICK = ("DDP", "FSDP2", UNAVERAGED)
"""A way of each kind."""

FAULTY_STEPS, WITHOUT_NEWS = 300, 20
"""Two of three steps have a fault, each in another function, until no function is new for long."""

COLLECTIVE = OF_A_METER | {
    "Meter.due",
    "Meter._open_step",
    "StepCapture.due",
    "StepCapture.open_step",
    "StepCapture.leave_step_out",
    "UnaveragedCollector._measure",
    "UnaveragedCollector._unknown",
}
"""And that of a meter's other ways."""

OF_THE_PASS = {"Unit.allocate", "Unit.__call__"}
"""What torch calls in a forward or backward pass, and hands on."""


class Run:
    """A training of one rank, step by step, whose collectives are recorded."""

    def __init__(self, name: str, *, measured: bool = True, every_n_steps: int = 1) -> None:
        self.name, self.way = name, WAYS_OF_TWO[name]
        self.device = devices.of_rank(dist.get_rank())
        self.model: Any = self.way.wrapped(Net().to(self.device), unused=False)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.scaler = GradScaler(devices.name, init_scale=4.0)
        self.meter: NoiseScaleMeter | None = None
        if measured:
            self.meter = NoiseScaleMeter(
                self.model,
                every_n_steps=every_n_steps,
                small_batch=self.way.small_batch,  # type: ignore[arg-type]
                averaged=name != UNAVERAGED,
                grad_scaler=self.scaler,
            )
        self.due: list[bool] = []
        self.steps: list[list[Collective]] = []

    def step(self, *, passes: int = 2, averages: bool = True, factor: float = 1.0) -> None:
        """Train for a step, whose last backward pass averages gradients over ranks or not."""
        step = len(self.steps)
        passes = min(passes, 1) if self.name == STATIC else passes  # it does not accumulate
        self.due.append(self.meter is not None and self.meter.due)
        with RecordedCollectives() as recorded:
            for micro in range(passes):
                last = micro == passes - 1
                with self._averaging(last=last and averages):
                    x, y = (t.to(self.device) for t in batch(step, dist.get_rank(), micro, 4))
                    loss = self.scaler.scale(half_squares(self.model(x), y) / passes * factor)
                    if self.meter is not None:
                        with contextlib.suppress(FaultError):  # as a callback does
                            self.meter.before_backward(loss, 4, last=last, capture_average=last)
                    loss.backward()
            if self.meter is not None:
                with contextlib.suppress(FaultError):
                    self.meter.step()
        self.steps.append(recorded.collectives)
        if passes:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        self.optimizer.zero_grad()

    def steps_on(self, steps: int) -> "Run":
        for _ in range(steps):
            self.step()
        return self

    def _averaging(self, *, last: bool) -> Any:
        if self.name == STATIC:
            return contextlib.nullcontext()
        return not_averaging(self.model, self.way, last=last)


def faults(name: str) -> Run:
    """On rank 1 alone."""

    def spared(module: str, function: str) -> bool:
        # Halves are of earlier trainings in this process: their hooks may outlive them.
        others = module == "guard.py" or module.startswith("collectors/halves/")
        return others or function in COLLECTIVE | OF_THE_PASS

    run, faults = Run(name), Faults("Meter.before_backward", spared)
    done: list[int] = []
    for step in range(FAULTY_STEPS):
        if step % 3 and dist.get_rank() == 1:
            faults.next_step()
        run.step(passes=1)
        faults.stop()
        done.append(len(faults.done))
        if step >= WITHOUT_NEWS and step % 10 == 0:
            over = torch.tensor(done[-WITHOUT_NEWS] == done[-1])
            dist.broadcast(over, src=1)
            if over:
                break
    else:
        raise AssertionError(f"functions had no fault yet after {FAULTY_STEPS} steps")
    assert dist.get_rank() == 0 or done[-1] > 40
    return run


def no_backward(name: str) -> Run:
    """On rank 1, or on both where the training has collectives in each pass."""
    run = Run(name)
    alike = name == STATIC or name.startswith("FSDP")
    for step in range(5):
        without = step == 2 and (dist.get_rank() == 1 or alike)
        run.step(passes=0 if without else 2, averages=step != 2)
    return run


def overflow(name: str) -> Run:
    """On rank 1."""
    run = Run(name)
    for step in range(5):
        run.step(factor=torch.inf if step == 2 and dist.get_rank() == 1 else 1.0)
    return run


def resumed(name: str) -> Run:
    """From the state after two steps."""
    before, run = Run(name).steps_on(2), Run(name)
    run.meter.load_state_dict(json.loads(json.dumps(before.meter.state_dict())))
    return run.steps_on(5)


EVENTS: dict[str, Callable[[str], Run]] = {
    "plain": lambda name: Run(name, measured=False).steps_on(5),
    "every_second_step": lambda name: Run(name, every_n_steps=2).steps_on(5),
    "goes_on": lambda name: Run(name).steps_on(5),
    "no_backward": no_backward,
    "overflow": overflow,
    "resumed": resumed,
}


class Seen:
    def __init__(self, run: Run) -> None:
        self.due, self.steps = run.due, run.steps
        self.measured = 0.0 if run.meter is None else run.meter.noise_scale.steps


def on_two(way: str, events: dict[str, Callable[[str], Run]]) -> list[dict[str, Seen]]:
    def all_of_it() -> dict[str, Seen]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return {name: Seen(event(way)) for name, event in events.items()}

    return on_ranks(2, all_of_it)


@cache
def seen(way: str) -> list[dict[str, Seen]]:
    return on_two(way, EVENTS)


def own(way: str, event: str) -> list[list[Collective]]:
    """The collectives of each step but for those of the training, which come first."""
    (one, _) = seen(way)
    steps = []
    for here, without in zip(one[event].steps, one["plain"].steps, strict=True):
        assert here[: len(without)] == without
        steps.append(here[len(without) :])
    return steps


def sizes(calls: list[Collective]) -> list[int]:
    assert {call.name for call in calls} <= {"allreduce"}
    return [torch.Size(shape).numel() for call in calls for shape in call.shapes]


@pytest.fixture
def found_out(way: str) -> None:
    """Before tests that are forked each: ranks of all of them are the same."""
    seen(way)


of_each_way = pytest.mark.parametrize("way", slow_but(WAYS_OF_TWO, *QUICK))


def assert_alike(first: Seen, second: Seen) -> None:
    """On tensors of their device alone, as for a backend that takes no others."""
    assert first.steps == second.steps
    used = {device for step in first.steps for call in step for device in call.devices}
    assert used <= {devices.name}
    assert first.measured == second.measured


@of_each_way
@pytest.mark.usefixtures("device", "found_out")
def test_ranks_call_the_same_collectives_in_the_same_order(way: str) -> None:
    first, second = seen(way)

    for event in first:
        assert_alike(first[event], second[event])
        assert first[event].measured > 0 or event == "plain", event


# What follows from an error is the same on each device.
@pytest.mark.parametrize("way", slow_but(WAYS_OF_TWO, "DDP"))
def test_ranks_call_the_same_collectives_whatever_fails_on_one(way: str) -> None:
    first, second = on_two(way, {"faults": faults})

    assert_alike(first["faults"], second["faults"])
    assert first["faults"].measured > 0


@of_each_way
@pytest.mark.usefixtures("device", "found_out")
def test_only_measured_steps_have_collectives_of_their_own(way: str) -> None:
    """One: that of the row. Who averages gradients for it needs one more."""
    (one, _) = seen(way)
    due = one["every_second_step"].due
    parameters = sum(p.numel() for p in Net().parameters() if p.requires_grad)
    # An entry of norms at coordinates, and what is said of earlier steps; 8 numbers of groups.
    beside = 2 + 4 if way.startswith("DDP") else 0
    row = 2 + 3 + 15 + 8 + beside

    found = [sizes(calls) for calls in own(way, "every_second_step")]

    assert sorted(set(due)) == [False, True]
    measured = [parameters, row] if way == UNAVERAGED else [row]
    assert found == [measured if is_due else [] for is_due in due]


@of_each_way
@pytest.mark.usefixtures("device", "found_out")
def test_a_resumed_run_has_the_collectives_of_the_run_that_went_on(way: str) -> None:
    assert own(way, "resumed")[2:] == own(way, "goes_on")[2:]
