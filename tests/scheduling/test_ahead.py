# SPDX-License-Identifier: Apache-2.0
"""What schedules are going to do, against what they do."""

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler
from torch.optim.lr_scheduler import LambdaLR

from noisescale.scheduling.ahead import schedule_ahead

STEPS = 60


def optimizer_of_two_groups() -> torch.optim.Optimizer:
    groups = [{"params": [torch.nn.Parameter(torch.ones(1))], "lr": lr} for lr in (0.1, 0.3)]
    return torch.optim.AdamW(groups)


SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "constant": lambda o: lr_scheduler.ConstantLR(o, 1.0),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, STEPS),
    "exponential": lambda o: lr_scheduler.ExponentialLR(o, 0.97),
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, [0.5, 0.7], total_steps=STEPS),
    "restarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 20),
    "warm-up": lambda o: LambdaLR(o, lambda step: min(1, step / 70)),
    "in sequence": lambda o: lr_scheduler.SequentialLR(
        o,
        [lr_scheduler.LinearLR(o, 0.1, total_iters=9), lr_scheduler.CosineAnnealingLR(o, 51)],
        [9],
    ),
    "chained": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ExponentialLR(o, 0.97), lr_scheduler.StepLR(o, 20)], optimizer=o
    ),
}


def rates(optimizer: torch.optim.Optimizer, schedule: Any, steps: int) -> list[float]:
    found = []
    for _ in range(steps):
        found.append(sum(g["lr"] for g in optimizer.param_groups) / 2)
        optimizer.step()
        schedule.step()
    return found


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("done", [0, 13])
def test_the_peak_and_the_floor_are_those_that_come(name: str, done: int) -> None:
    optimizer = optimizer_of_two_groups()
    schedule = SCHEDULES[name](optimizer)
    rates(optimizer, schedule, done)
    before = copy.deepcopy(schedule.state_dict()), copy.deepcopy(optimizer.state_dict())

    found = schedule_ahead(schedule, STEPS - done)

    assert (schedule.state_dict(), optimizer.state_dict()) == before
    expected = rates(optimizer, schedule, STEPS - done)
    assert found is not None
    assert found.peak == pytest.approx(max(expected))
    assert found.floor == pytest.approx(min(expected[expected.index(max(expected)) :]))
    assert found.restarts == {"restarts": 2}.get(name, 0)


def test_schedules_that_do_not_tell() -> None:
    optimizer = optimizer_of_two_groups()

    class Fails(LambdaLR):
        def __deepcopy__(self, memo: Any) -> Any:
            raise RuntimeError("no copies")

    assert schedule_ahead(lr_scheduler.ReduceLROnPlateau(optimizer), 10) is None
    assert schedule_ahead(Fails(optimizer, lambda step: 1.0), 10) is None
    assert schedule_ahead(SCHEDULES["cosine"](optimizer), math.inf) is None
    assert schedule_ahead(SCHEDULES["cosine"](optimizer), 60_000) is None
    assert schedule_ahead(object(), 10) is None

    class Module(torch.nn.Module):
        def rate(self, step: int) -> float:
            return 1.0

        def __deepcopy__(self, memo: Any) -> Any:
            raise AssertionError("the module is copied")

    method = LambdaLR(optimizer, Module().rate)
    assert schedule_ahead(method, 10) is None
    assert schedule_ahead(lr_scheduler.SequentialLR(optimizer, [method, method], [3]), 10) is None
