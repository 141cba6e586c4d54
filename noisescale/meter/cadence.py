# SPDX-License-Identifier: Apache-2.0
"""Choose the steps that are measured, so that measuring takes a given share of the time."""

from __future__ import annotations

import enum
import math
from typing import Literal, NamedTuple

from noisescale.checks import is_positive, is_whole, refuse

COST, COST_OF_DECISIONS = 0.01, 0.05
"""The share of a run's time that measuring may take, without and with a scheduler."""

SETTLED, SETTLED_OF_DECISIONS = 2_000, 500
"""Steps after which a run has spent exactly that share; before, it spends in advance."""

EARLY, EARLY_IF_DEAREST = 8, 32
"""The number of first steps that are measured evenly; later steps are, in log time.

By halves, 32 leave 26 of the first 53 measured steps to steps 200 to 1,500, and 8 leave 22. In a
replay of half of the runs of `benchmarks/accuracy/now.py` 56 % of the looks were then resolved, of
46 %. The cheap ways measure nearly all of the first steps.
"""

FIRST = 2
"""First steps that are measured in any case, so that what cannot be measured is said at once."""

OPENING, OPENING_OF_DECISIONS = 32, 16
"""Further measured steps among those, where a measured step is dear.

Within the first 500 steps they would leave 7 to the next 1,500. The interval of B_crit is then half
as wide again after 2,000 steps (0.87 of its value for 0.59, at b = 2 B, by halves), and an eighth
narrower after 200 (0.50 for 0.57).

With a scheduler, 5 % in advance of 2,000 steps cost up to 29 % of the first 200 steps, by halves.
In advance of 500 steps, with 16 further ones, they cost 13 %. Under "tradeoff" the first move of a
small transformer then came after 25 to 308 steps with the 80 % interval; before, after 49 to 289
with that of 95 %.
"""

DEAR, DEAREST = 0.3, 0.5
"""Plain steps that a measured one takes more, from which on the first steps pay for few."""

_ROUNDING = 1e-9
"""Rounding of sums of costs: a step that is exactly paid for is measured."""


class Cadence:
    """Measure every n-th step, or as many steps as a share of the run's time pays for.

    Measuring a step costs as much time as κ plain steps. κ is a constant of the way of measuring
    (`Collector.cost`). It is never timed, so that all ranks, and a resumed run, measure the same
    steps. After t steps

        cost·max(t, T·ln(1 + t/e)/ln(1 + T/e)),  e = 8, or 32 if κ is 0.5 or more

    plain steps may have been spent, where T is `settled`. The first two steps are always measured.
    The noise scale changes with log time, so early steps are measured more often. If κ is 0.3 or
    more, 32 extra steps (`opening`) are measured up to step T. They are paid back after step T,
    with half of the budget: at the default, halves have paid them back at step 6,800.

    Args:
        every_n_steps: n, to measure the first step and every n-th step after it; or "auto", to
            measure as many steps as `cost` pays for.
        cost: The share of a run's time that measuring may take with "auto"; None: 0.01.
        settled: T, the steps after which a run has spent exactly that share.
        opening: Extra first steps, where a measured step is dear.

    Raises:
        ValueError: If `every_n_steps` is not a whole number or "auto", or `cost` is not
            above 0 and at most 1.

    Examples:
        >>> cadence, spent = Cadence("auto", cost=0.01), Spent()
        >>> for step in range(1, 2001):
        ...     if due := cadence.due(step, spent, cost=0.125):
        ...         spent = spent.plus(due, cost=0.125)
        >>> spent.steps
        160
    """

    def __init__(
        self,
        every_n_steps: int | Literal["auto"],
        cost: float | None = None,
        *,
        settled: int = SETTLED,
        opening: int = OPENING,
    ) -> None:
        self._every_n_steps = checked_every_n_steps(every_n_steps)
        self._cost = COST if cost is None else checked_cost(cost)
        self._settled, self._opening = settled, opening

    @classmethod
    def for_decisions(cls, every_n_steps: int | Literal["auto"]) -> Cadence:
        """Return the cadence of a run that a scheduler waits for."""
        return cls(
            every_n_steps,
            COST_OF_DECISIONS,
            settled=SETTLED_OF_DECISIONS,
            opening=OPENING_OF_DECISIONS,
        )

    def due(self, step: int, spent: Spent, cost: float) -> Due:
        """Return whether a step is to be measured, and what pays for it.

        Args:
            step: Number of the step, from 1.
            spent: What the steps before it have cost.
            cost: κ, what measuring it costs, in plain steps.
        """
        if self._every_n_steps != "auto":
            return Due.REGULAR if (step - 1) % self._every_n_steps == 0 else Due.NOT
        if spent.steps < FIRST:
            return Due.REGULAR
        paid_back = min(spent.opening, self._cost * max(step - self._settled, 0) / 2)
        left = self.budget(step, cost) - paid_back - spent.budget
        if cost <= left + _ROUNDING * (1 + spent.budget):
            return Due.REGULAR
        if cost >= DEAR and spent.opening_steps < self._opening:
            opened = self._opening * min(self._early(step, cost), 1.0)
            if spent.opening_steps + 1 <= opened + _ROUNDING:
                return Due.OPENING
        return Due.NOT

    def budget(self, step: int, cost: float) -> float:
        """Return the plain steps that "auto" may spend up to a step, extra first steps aside.

        Args:
            step: Number of the step, from 1.
            cost: κ, what measuring it costs, in plain steps.
        """
        # The larger of both: in log time a run is ahead until `settled`, and behind from there.
        settled = self._settled
        return self._cost * (step if step >= settled else settled * self._early(step, cost))

    def _early(self, step: int, cost: float) -> float:
        """Return how far a step is towards `settled` in log time: 1 at `settled`."""
        early = EARLY if cost < DEAREST else EARLY_IF_DEAREST
        return math.log1p(step / early) / math.log1p(self._settled / early)


class Due(enum.IntEnum):
    """Whether a step is to be measured; true if so."""

    NOT = 0
    REGULAR = 1
    """The budget pays for the step."""
    OPENING = 2
    """The step is one of the further steps at the beginning."""


class Spent(NamedTuple):
    """The cost of measuring in a run so far, by the constants."""

    budget: float = 0.0
    """Plain steps, without the extra first steps."""
    opening: float = 0.0
    """Plain steps for the extra first steps."""
    steps: int = 0
    """Measured steps."""
    opening_steps: int = 0
    """Extra first steps that were measured."""

    def plus(self, due: Due, cost: float) -> Spent:
        """Return the cost after one more measured step."""
        if due is Due.OPENING:
            opening = self.opening + cost, self.steps + 1, self.opening_steps + 1
            return Spent(self.budget, *opening)
        return self._replace(budget=self.budget + cost, steps=self.steps + 1)


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


def checked_cost(cost: float) -> float:
    """Return a share of a run's time, or raise a ValueError if the value is none."""
    if not (is_positive(cost) and cost <= 1):
        percent = (
            f"Pass {cost / 100:g} for {cost:g} %." if is_positive(cost) else "Pass 0.01 for 1 %."
        )
        needed = "be a share of the run's time, above 0 and at most 1"
        refuse("cost", needed, repr(cost), f"{percent} `every_n_steps=1` measures every step.")
    return float(cost)
