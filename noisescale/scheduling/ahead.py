# SPDX-License-Identifier: Apache-2.0
"""The learning rates that a schedule is going to give."""

from __future__ import annotations

import copy
import warnings
from typing import Any, NamedTuple

from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

_MOST_STEPS = 50_000
"""A longer schedule is not walked: at 10 to 30 microseconds a step this takes about a second."""


class ScheduleForecast(NamedTuple):
    """What a schedule does from now to the end of the run."""

    peak: float
    """The largest learning rate."""
    floor: float
    """The smallest learning rate after the largest one."""
    restarts: int
    """How often the learning rate rises again after it has fallen to less than half."""

    @property
    def never_falls(self) -> bool:
        """Whether the learning rate stays at its peak."""
        return self.floor >= self.peak


def schedule_ahead(schedule: object, steps: float) -> ScheduleForecast | None:
    """Walk a copy of a schedule, and return what it does; None if it does not tell.

    A schedule that waits for a metric does not tell, nor one whose function is a method: a copy of
    it would be one of the whole module. A schedule of more than 50,000 steps takes too long.
    Nothing of the schedule or its optimizer changes.

    Args:
        schedule: A schedule of torch.
        steps: The steps of the schedule that are left in the run.

    Examples:
        >>> import torch
        >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
        >>> halved = torch.optim.lr_scheduler.StepLR(optimizer, 10, gamma=0.5)
        >>> schedule_ahead(halved, 20)
        ScheduleForecast(peak=0.1, floor=0.05, restarts=0)
    """
    if isinstance(schedule, ReduceLROnPlateau) or not isinstance(schedule, LRScheduler):
        return None
    if not 1 <= steps <= _MOST_STEPS:
        return None
    if _has_methods(schedule):
        return None
    optimizer = _NoOptimizer(schedule.optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # A user's schedule may do anything: that it cannot be copied is no reason to fail.
        try:
            walked = copy.deepcopy(schedule, {id(schedule.optimizer): optimizer})
            rates = [optimizer.learning_rate]
            for _ in range(int(steps) - 1):
                walked.step()
                rates.append(optimizer.learning_rate)
        except Exception:
            return None
    return _sum_up(rates)


def _has_methods(schedule: Any) -> bool:
    """Return whether a schedule, or one that it is made of, calls the method of an object."""
    parts = getattr(schedule, "_schedulers", ())
    functions = getattr(schedule, "lr_lambdas", ())
    return any(map(_has_methods, parts)) or any(hasattr(one, "__self__") for one in functions)


def _sum_up(rates: list[float]) -> ScheduleForecast:
    peak = max(rates)
    restarts, top, low = 0, rates[0], rates[0]
    for rate in rates:
        restarted = low < top / 2 and rate > 2 * low
        if restarted or rate > top:
            restarts, top, low = restarts + restarted, rate, rate
        low = min(low, rate)
    return ScheduleForecast(peak, min(rates[rates.index(peak) :]), restarts)


class _NoOptimizer:
    """What a schedule needs of an optimizer, without parameters."""

    def __init__(self, optimizer: Any) -> None:
        self.param_groups = [
            copy.deepcopy({name: value for name, value in group.items() if name != "params"})
            for group in optimizer.param_groups
        ]
        self.defaults = optimizer.defaults
        self._opt_called = True

    @property
    def learning_rate(self) -> float:
        """The mean of the parameter groups."""
        rates = [float(group["lr"]) for group in self.param_groups]
        return sum(rates) / len(rates)

    def step(self) -> None:
        """Do nothing: schedules ask whether an optimizer has it."""
