# SPDX-License-Identifier: Apache-2.0
"""Choose the steps that are measured, so that measuring takes a given share of the time."""

from __future__ import annotations

import math
from collections.abc import Collection
from statistics import median
from typing import Literal, NamedTuple

from noisescale.checks import is_positive, is_whole, refuse

AT_FIRST, LATER = 0.05, 0.01
"""The share of a run's time that measuring may take by default, until the opening ends and later.

With a scheduler it is the first one throughout, as decisions wait for measured steps.
"""

OPENING_SECONDS, OPENING_STEPS = 600.0, 500
"""The opening ends after so many seconds, or before if the noise scale is known.

It has so many steps at least: then no run of 500 steps, and none of 2,000, has fewer measured steps
than by the rule of version 0.1, which spent in advance.
"""

KNOWN_WITHIN = 3.0
"""The ratio of the ends of the interval from which on the noise scale is known."""

FIRST_STEPS, EARLY = 100, 8
"""The first steps have more, in log time, as the noise scale changes fast there."""

ADVANCE, ADVANCE_OF_DECISIONS = 5.0, 12.0
"""The plain steps that are spent more, without and with a scheduler.

With a scheduler they leave its first moves where they were: halves have 22 measured steps of the
first 100, and had 24.
"""

FIRST = 2
"""First steps that are measured in any case, so that what cannot be measured is said at once."""

FEWEST_COSTS, ENOUGH, MOST_DOUBLINGS = 8, 0.75, 3
"""The timed steps that κ is found from, how far it has to be off, and how far it may go.

The latter two are powers of two.
"""

_ROUNDING = 1e-9
"""Rounding of sums of costs: a step that is exactly paid for is measured."""


class Pace(NamedTuple):
    """What the budget goes by beside the step: numbers that all ranks have alike.

    Each rank says its own in the rows of measured steps, and all ranks go by the means.
    """

    seconds: float = 0.0
    """Mean seconds of a step while the opening lasts; 0: not known."""
    last_step: float = 0.0
    """The last step of the run; 0: not known."""
    known_at: float = 0.0
    """The step from which on the noise scale is known; 0: it is not."""
    doublings: float = 0.0
    """What a measured step costs, as a power of two of the constant `Collector.cost`."""

    @property
    def opening(self) -> float:
        """The last step of the opening."""
        of_time = OPENING_SECONDS / self.seconds if self.seconds > 0 else math.inf
        return max(min(of_time, self.known_at or math.inf), OPENING_STEPS)

    def cost(self, constant: float) -> float:
        """Return κ, where it would be `constant` if nothing was timed."""
        return constant * 2.0 ** round(self.doublings)

    def at(
        self,
        step: int,
        before: int,
        seconds: float,
        *,
        known: bool,
        costs: Collection[float] = (),
    ) -> Pace:
        """Return what a rank says from a log step on.

        Args:
            step: The step now.
            before: The step of the last log step.
            seconds: Seconds of a step since then; NaN if not known.
            known: Whether the noise scale is known.
            costs: What the last measured steps cost, over the constant.
        """
        mean, spent = self.seconds, self.seconds * before
        if spent < OPENING_SECONDS and step > before and math.isfinite(seconds):
            mean = (spent + seconds * (step - before)) / step
        known_at = self.known_at or (float(step) if known else 0.0)
        doublings = float(round(self.doublings))
        if len(costs) >= FEWEST_COSTS:
            found = math.log2(max(median(costs), 2.0**-MOST_DOUBLINGS))
            if abs(found - doublings) > ENOUGH:
                doublings = float(min(round(found), MOST_DOUBLINGS))
        return self._replace(seconds=mean, known_at=known_at, doublings=doublings)


NOT_AGREED = Pace()
"""What ranks have agreed on before the first log step."""


class Cadence:
    """Measure every n-th step, or as many steps as a share of the run's time pays for.

    Measuring a step costs as much time as κ plain steps. κ begins as a constant, `Collector.cost`.
    Where steps are timed, it is that times the power of two that fits. After t steps

        0.01·t + k·(0.04·min(t, e) + 5·min(ln(1 + t/8)/ln(1 + 100/8), 1))

    plain steps may have been spent. The opening ends with step e: after ten minutes, or once the
    noise scale is known within a factor of 3, and not before step 500. Where the end of the run is
    known, a third of its budget is for its last third: k is 2/3 before, and rises to 1 at the end.
    Else k is 1. A share that is given is spent evenly from the first step to the last. The first
    two steps are always measured.

    Args:
        every_n_steps: n, to measure the first step and every n-th step after it; or "auto", to
            measure as many steps as `max_overhead` pays for.
        max_overhead: The share of a run's time that measuring may take with "auto", throughout;
            None: as above.

    Raises:
        ValueError: If `every_n_steps` is not a whole number or "auto", or `max_overhead` is not
            above 0 and at most 1.

    Examples:
        >>> cadence, spent = Cadence("auto"), Spent()
        >>> for step in range(1, 501):
        ...     if cadence.due(step, spent, cost=0.125):
        ...         spent = spent.plus(cost=0.125)
        >>> spent.steps
        240
    """

    def __init__(
        self, every_n_steps: int | Literal["auto"], max_overhead: float | None = None
    ) -> None:
        self._every_n_steps = checked_every_n_steps(every_n_steps)
        self._at_first, self._later, self._advance = AT_FIRST, LATER, ADVANCE
        if max_overhead is not None:
            self._at_first = self._later = checked_share(max_overhead)
            self._advance = 0.0

    @classmethod
    def for_decisions(cls, every_n_steps: int | Literal["auto"]) -> Cadence:
        """Return the cadence of a run that a scheduler waits for."""
        cadence = cls(every_n_steps, AT_FIRST)
        cadence._advance = ADVANCE_OF_DECISIONS
        return cadence

    def due(
        self,
        step: int,
        spent: Spent,
        cost: float,
        pace: Pace = NOT_AGREED,
        *,
        in_pairs: bool = False,
    ) -> bool:
        """Return whether a step is to be measured.

        Args:
            step: Number of the step, from 1.
            spent: What the steps before it have cost.
            cost: κ, what measuring it costs, in plain steps.
            pace: What ranks agreed on.
            in_pairs: Whether with "auto" the step after one that was paid for is measured in
                advance, so that successive steps can be compared.
        """
        if self._every_n_steps != "auto":
            return (step - 1) % self._every_n_steps == 0
        left = self.budget(step, pace) - spent.plain_steps
        paid = cost <= left + _ROUNDING * (1 + spent.plain_steps)
        return paid or spent.steps < FIRST or (in_pairs and spent.steps % 2 == 1)

    def budget(self, step: int, pace: Pace = NOT_AGREED) -> float:
        """Return the plain steps that "auto" may spend up to a step."""
        opening = (self._at_first - self._later) * min(step, pace.opening)
        in_log_time = math.log1p(step / EARLY) / math.log1p(FIRST_STEPS / EARLY)
        opening += self._advance * min(in_log_time, 1.0)
        in_last_third = max(3 * step / pace.last_step - 2, 0.0) if pace.last_step else 1.0
        return self._later * step + opening * (2 + min(in_last_third, 1.0)) / 3


class Spent(NamedTuple):
    """The cost of measuring in a run so far."""

    plain_steps: float = 0.0
    steps: int = 0
    """Measured steps."""

    def plus(self, cost: float) -> Spent:
        """Return the cost after one more measured step."""
        return Spent(self.plain_steps + cost, self.steps + 1)


NOTHING = Spent()
"""What has been spent at the beginning of a run."""


def checked_every_n_steps(every_n_steps: int | Literal["auto"]) -> int | Literal["auto"]:
    """Return n as a Python int, or "auto"; raise a ValueError for any other value."""
    if every_n_steps == "auto":
        return "auto"
    if not is_whole(every_n_steps) or every_n_steps < 1:
        remedy = 'Pass 1 to measure every step, or "auto".'
        refuse("every_n_steps", "be at least 1", repr(every_n_steps), remedy)
    return int(every_n_steps)


def checked_share(max_overhead: float) -> float:
    """Return a share of a run's time, or raise a ValueError if the value is none."""
    if not (is_positive(max_overhead) and max_overhead <= 1):
        percent = "Pass 0.01 for 1 %."
        if is_positive(max_overhead):
            percent = f"Pass {max_overhead / 100:g} for {max_overhead:g} %."
        needed = "be a share of the run's time, above 0 and at most 1"
        remedy = f"{percent} `every_n_steps=1` measures every step."
        refuse("max_overhead", needed, repr(max_overhead), remedy)
    return float(max_overhead)
