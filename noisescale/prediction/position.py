# SPDX-License-Identifier: Apache-2.0
"""Where a run's batch size stands against the critical one, and what other sizes would save."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from noisescale.bounded import Bounded

Place = Literal["below", "probably below", "near", "probably above", "above", "unknown"]

LITTLE = 1.2
"""A batch size is cheap if the result costs at most this many times the examples of the run."""

NEAR = 2.0
"""A batch size is near the critical one if no bound of that is farther off than this factor."""

CLEARLY = 1.5
"""A value that is off by less than this factor is near, if its bounds are on both sides."""

ROUGH = 100.0
"""Bounds that are this far apart are a rough range, which a second run has to settle."""


@dataclass(frozen=True)
class Position:
    """The run's batch size B against the critical one, c.

    Let s = c/(B + c), the share of noise in a step. Then to the same result

        S(B')/S(B) = 1 - s + s·B/B'      E(B')/E(B) = B'/B·S(B')/S(B)

    and the examples are `LITTLE` times those of the run at B' = 1.2·B + 0.2·c.
    """

    batch_size: float
    critical: Bounded
    """The value is NaN or infinite if the critical batch size is not resolved."""
    at_end: bool
    """Whether `critical` is of the run's end, as that of the whole run is not resolved."""
    rough: bool
    """Whether the bounds of `critical` are so far apart that only a second run helps."""

    @property
    def resolved(self) -> bool:
        """Whether the critical batch size has a value and an upper bound."""
        return math.isfinite(self.critical.value) and math.isfinite(self.critical.high)

    @property
    def place(self) -> Place:
        """Where the batch size stands. What the bounds of `critical` deny is only probable."""
        own, found = self.batch_size, self.critical
        if not self.resolved and math.isinf(found.high):
            return "below" if found.low > own else "unknown"
        if own <= NEAR * found.low and found.high <= NEAR * own:
            return "near"
        if found.low > own:
            return "below"
        if found.high < own:
            return "above"
        if not self.resolved:
            return "unknown"
        if found.value >= CLEARLY * own:
            return "probably below"
        return "probably above" if found.value <= own / CLEARLY else "near"

    @property
    def cheap_up_to(self) -> Bounded:
        """The batch size at which the result costs 1.2 times the examples of the run."""
        return _map(lambda c: LITTLE * self.batch_size + (LITTLE - 1) * c, self.critical)

    def steps(self, batch_size: float) -> Bounded:
        """Return the steps at a batch size, divided by the run's."""

        def ratio(critical: float) -> float:
            noise = 1.0 if math.isinf(critical) else critical / (self.batch_size + critical)
            return 1 - noise + noise * self.batch_size / batch_size

        return _map(ratio, self.critical)

    def examples(self, batch_size: float) -> Bounded:
        """Return the examples at a batch size, divided by the run's."""
        return self.steps(batch_size) * (batch_size / self.batch_size)


def worth_up_to(batch_size: float, critical: Bounded) -> float:
    """Return the largest batch size that saves steps at little cost, from a run at `batch_size`.

    Above the critical batch size it is twice that: there the steps are 1.5 times their fewest.

    Examples:
        >>> worth_up_to(20.0, Bounded(230.0, 94.0, 780.0))
        70.0
        >>> worth_up_to(2048.0, Bounded(340.0, 190.0, 700.0))
        680.0
    """
    if not math.isfinite(critical.value):
        return LITTLE * batch_size + (LITTLE - 1) * critical.low
    return min(LITTLE * batch_size + (LITTLE - 1) * critical.value, 2 * critical.value)


def _map(of: Callable[[float], float], band: Bounded) -> Bounded:
    """Return the band of a monotonic function."""
    ends = of(band.low), of(band.high)
    value = of(band.value) if math.isfinite(band.value) else math.nan
    return Bounded(value, min(ends), max(ends))
