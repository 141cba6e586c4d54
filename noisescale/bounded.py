# SPDX-License-Identifier: Apache-2.0
"""A number with its lower and its upper bound."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Bounded:
    """A value between its bounds, in the unit of whatever it describes.

    Where only bounds are known `value` is NaN; where there is no upper one `high` is infinite.

    Examples:
        >>> Bounded(2.0, 1.5, 3.0) * Bounded(10.0, 9.0, 12.0)
        Bounded(value=20.0, low=13.5, high=36.0)
        >>> Bounded(187.017, 73.409, math.inf)
        Bounded(value=187.0, low=73.4, high=inf)
    """

    value: float
    low: float
    high: float

    def __repr__(self) -> str:
        """Return the fields with three digits: more are never certain."""
        value, low, high = (float(f"{x:.3g}") for x in (self.value, self.low, self.high))
        return f"Bounded({value=}, {low=}, {high=})"

    def __mul__(self, other: Bounded | float) -> Bounded:
        """Multiply non-negative bands: bounds by bounds, which is the widest it can be."""
        if not isinstance(other, Bounded):
            other = Bounded(other, other, other)
        low, high = self.low * other.low, self.high * other.high
        return Bounded(self.value * other.value, low, high)

    @property
    def known(self) -> bool:
        """Whether anything is known: at least one finite bound."""
        return not math.isnan(self.low)


UNKNOWN = Bounded(math.nan, math.nan, math.nan)
"""The bounds of a number that was not measured at all."""
