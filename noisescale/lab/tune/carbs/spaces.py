# SPDX-License-Identifier: Apache-2.0
"""Spaces: maps from the values of a parameter to the coordinate in which the search takes steps.

The values are those of an Optuna distribution. A step of the search is drawn from a normal
distribution of the same width in every coordinate. A space says how far that is in the parameter.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import expit

from noisescale.checks import refuse, require_count, require_positive
from noisescale.refusal import TypeRefusal

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Space:
    """A coordinate of a numerical parameter; the spaces below have one each.

    Args:
        scale: How much of the coordinate's unit the search takes for one. The first suggestions
            have a standard deviation of 0.3 of it.
        is_integer: Whether values are whole numbers, also where the distribution has others.
        rounding_factor: Whole numbers are multiples of it.

    Raises:
        ValueError: If an argument is out of its range, or the space does not round.
    """

    scale: float = 1.0
    is_integer: bool = False
    rounding_factor: int = 1

    domain: ClassVar[tuple[float, float]] = (-math.inf, math.inf)
    """The least and the largest value that may have a coordinate."""
    rounds: ClassVar[bool] = True
    """Whether values may be whole numbers."""

    def __post_init__(self) -> None:
        """Check the arguments."""
        require_positive("scale", self.scale, "Pass the size of a large step.")
        require_count("rounding_factor", self.rounding_factor, "Pass 8 for multiples of 8.")
        if self.is_integer and not self.rounds:
            refuse(
                "is_integer",
                f"be left out for a {type(self).__name__}",
                self.is_integer,
                "Take a LinearSpace or a LogSpace for whole numbers.",
            )
        if self.rounding_factor > 1 and not self.is_integer:
            refuse(
                "rounding_factor",
                "be 1 where values are not whole numbers",
                self.rounding_factor,
                "Pass `is_integer=True`.",
            )

    @classmethod
    def across(cls, low: float, high: float, step: float = 0.0, scale: float = 1.0) -> Self:
        """Return the space whose scale is half of a range, but at most a decade, times `scale`."""
        half = float(np.ptp(cls().to_basic([low, high]))) / 2
        return cls(scale * (min(1.0, half) or 1.0))

    def ends(self, low: float, high: float) -> tuple[float, float]:
        """Return the least and the largest value that the space has in a range."""
        low, high = max(low, self.domain[0]), min(high, self.domain[1])
        if not self.is_integer:
            return low, high
        unit = self.rounding_factor
        return math.ceil(low / unit) * unit, math.floor(high / unit) * unit

    def to_basic(self, values: ArrayLike) -> Array:
        """Return the coordinates of values; infinite or NaN where a value has none."""
        with np.errstate(all="ignore"):
            return self._coordinate(np.asarray(values, np.float64)) / self.scale

    def from_basic(self, basic: ArrayLike) -> Array:
        """Return the values at coordinates, rounded."""
        with np.errstate(all="ignore"):
            values = self._value(np.asarray(basic, np.float64) * self.scale)
            return np.clip(self.round(values), *self.domain)

    def round(self, values: Array) -> Array:
        """Return the values of the space that are nearest to others."""
        if not self.is_integer:
            return values
        return np.asarray(np.rint(values / self.rounding_factor) * self.rounding_factor)

    def _coordinate(self, values: Array) -> Array:
        raise NotImplementedError

    def _value(self, coordinates: Array) -> Array:
        raise NotImplementedError


class LinearSpace(Space):
    """The coordinate is x/scale.

    Examples:
        >>> LinearSpace(scale=64, is_integer=True, rounding_factor=8).from_basic(1.3).item()
        80.0
    """

    @classmethod
    def across(cls, low: float, high: float, step: float = 0.0, scale: float = 1.0) -> Self:
        """Return the space whose scale is half of a range, times `scale`.

        The half counts as three steps of the values at least: a step of the search then reaches
        the next value.
        """
        return cls(scale * (max((high - low) / 2, 3 * step) or 1.0))

    def _coordinate(self, values: Array) -> Array:
        return values

    def _value(self, coordinates: Array) -> Array:
        return coordinates


class LogSpace(Space):
    """The coordinate is log10(x)/scale: by default its unit is a factor of 10.

    Examples:
        >>> LogSpace().to_basic(1e-3).item()
        -3.0
    """

    domain = (0.0, math.inf)

    def _coordinate(self, values: Array) -> Array:
        return np.log10(values)

    def _value(self, coordinates: Array) -> Array:
        return np.asarray(10.0**coordinates)


class LogitSpace(Space):
    """The coordinate is log10(x/(1-x))/scale: 0.9, 0.99 and 0.999 are a unit apart.

    Examples:
        >>> LogitSpace().from_basic([-1, 0, 1]).round(3).tolist()
        [0.091, 0.5, 0.909]
    """

    domain = (0.0, 1.0)
    rounds = False

    def _coordinate(self, values: Array) -> Array:
        return np.log10(values / (1 - values))

    def _value(self, coordinates: Array) -> Array:
        return np.asarray(expit(coordinates * math.log(10)))


class MomentumSpace(Space):
    """The coordinate is log10(1/(1-x))/scale: a momentum x averages over 1/(1-x) steps.

    Examples:
        >>> MomentumSpace().to_basic([0, 0.9, 0.99]).round(9).tolist()
        [0.0, 1.0, 2.0]
    """

    domain = (0.0, 1.0)
    rounds = False

    def _coordinate(self, values: Array) -> Array:
        return np.asarray(0.0 - np.log10(1 - values))  # no -0.0

    def _value(self, coordinates: Array) -> Array:
        return np.asarray(1 - 10.0**-coordinates)


class PowerOfTwoSpace(LogSpace):
    """Whole powers of two. The coordinate is log10(x)/scale, as of a `LogSpace`.

    Examples:
        >>> PowerOfTwoSpace().from_basic([0, 1, 2]).tolist()
        [1.0, 8.0, 128.0]
    """

    domain = (1.0, math.inf)
    rounds = False

    def ends(self, low: float, high: float) -> tuple[float, float]:
        """Return the least and the largest power of two in a range."""
        if high < 1:
            return super().ends(low, high)
        return 2.0 ** math.ceil(math.log2(max(low, 1))), 2.0 ** math.floor(math.log2(high))

    def round(self, values: Array) -> Array:
        """Return the nearest powers of two, in logs."""
        return np.asarray(2.0 ** np.rint(np.log2(values)))


def require_spaces(spaces: Any) -> dict[str, Space]:
    """Return the spaces by their parameters, or raise a TypeError that names the wrong one."""
    for name, space in dict(spaces or {}).items():
        if not isinstance(space, Space):
            refuse(
                "spaces",
                f"have a space of noisescale.lab.tune.carbs.spaces for {name!r}",
                repr(space),
                "Pass, for example, `LogSpace()`.",
                error=TypeRefusal,
            )
    return dict(spaces or {})
