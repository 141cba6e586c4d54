# SPDX-License-Identifier: Apache-2.0
"""What to time for a run: device batch sizes around its own, in about a minute."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from noisescale.history.history import History
from noisescale.history.segments import Segments
from noisescale.prediction.run_hardware import (
    is_nearly,
    largest_device_batch,
    own_plan,
    timed_plans,
)
from noisescale.refusal import Refusal

ABOUT = 60.0
"""Seconds that timing may take, if 5 steps of each configuration take no longer."""

FIT = 0.5
"""Seconds to set up a fit."""

MOST_STEPS, FEWEST_STEPS = 20, 5
"""Optimizer steps to time of each configuration."""


@dataclass(frozen=True)
class AroundRun:
    """The configurations to time: each size without accumulation, the run's own also with it."""

    own: int
    """The device batch size of the run, rounded."""
    accumulation: int
    """Micro-batches of the run, or 2 if it has one: they show what a step costs once."""
    seconds: float | None
    """Seconds of one of the run's micro-batches; None if it was not timed."""

    @classmethod
    def of(cls, history: History, examples: float) -> AroundRun:
        """Return what to time for a run.

        Args:
            history: The run.
            examples: The examples in the data.

        Raises:
            ValueError: If the run counts something else than the data set does.
        """
        segments = Segments.of(history)
        plan, plans = own_plan(history, segments), timed_plans(history)
        size = plan.device_batch_size if plan else largest_device_batch(history, segments)
        own = max(1, round(size))
        if own > examples:
            raise Refusal(
                "run",
                "have batches of the data set's examples",
                f"{own:,} at once, and {examples:,.0f} in all",
                "The run may count tokens, or have other data: give the `device_batch_sizes`.",
            )
        micro_batches = plan.accumulation if plan else 1
        took = next((x.mean for x in plans if plan and is_nearly(x.timing.plan, plan)), None)
        seconds = None if took is None else took / micro_batches
        return cls(own, max(micro_batches, 2), seconds)

    def sizes(self, examples: float) -> list[int]:
        """Return half of the run's own device batch size, and 1, 2, 4 and 8 times as much."""
        ladder = sorted({max(1, self.own // 2), *(self.own * 2**k for k in range(4))})
        fitting = [size for size in ladder if size <= examples]
        while len(fitting) > 3 and (self.forecast(fitting, FEWEST_STEPS, 5) or 0) > ABOUT:
            fitting.pop()
        return fitting

    def forecast(self, sizes: Sequence[int], steps: int, warm_up: int) -> float | None:
        """Return the seconds that timing takes at most, if examples bring their time along."""
        if self.seconds is None:
            return None
        micro_batches = sum(size / self.own for size in sizes) + self.accumulation
        return (steps + warm_up) * micro_batches * self.seconds + FIT * (len(sizes) + 1)

    def steps(self, sizes: Sequence[int], warm_up: int) -> int:
        """Return as many steps as take about a minute in all, from 5 to 20."""
        one, none = self.forecast(sizes, 1, 0), self.forecast(sizes, 0, 0)
        if one is None or none is None:
            return MOST_STEPS
        affordable = math.floor((ABOUT - none) / (one - none)) - warm_up
        return max(FEWEST_STEPS, min(affordable, MOST_STEPS))
