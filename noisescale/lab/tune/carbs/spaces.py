# SPDX-License-Identifier: Apache-2.0
"""Spaces of parameters: values, and the basic coordinates in which the search takes steps.

A step of the search is drawn from a normal distribution of the same width in every basic
coordinate. A space says how far that is in the parameter.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import expit

from noisescale.checks import checked_count, checked_positive, is_real, refuse

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Space:
    """The values of a numerical parameter; see the spaces below for its coordinate.

    Args:
        min: The least value.
        max: The largest value.
        scale: How much of the coordinate's unit the search takes for one. The first suggestions
            have a standard deviation of 0.3 of it.
        is_integer: Whether values are whole numbers.
        rounding_factor: Whole numbers are multiples of it.

    Raises:
        ValueError: If no value lies in the space.
    """

    min: float = -math.inf
    max: float = math.inf
    scale: float = 1.0
    is_integer: bool = False
    rounding_factor: int = 1

    def __post_init__(self) -> None:
        """Check the arguments."""
        checked_positive("scale", self.scale, "Pass the size of a large step.")
        checked_count("rounding_factor", self.rounding_factor, "Pass 8 for multiples of 8.")
        if self.rounding_factor > 1 and not self.is_integer:
            refuse(
                "rounding_factor",
                "be 1 where values are not whole numbers",
                self.rounding_factor,
                "Pass `is_integer=True`.",
            )
        low, high = self.ends
        if not (is_real(self.min) and is_real(self.max) and low <= high):
            refuse(
                "min",
                f"leave a value up to `max` in a {type(self).__name__}",
                f"{self.min!r} to {self.max!r}",
                "Pass a lower `min` or a higher `max`.",
            )

    @property
    def ends(self) -> tuple[float, float]:
        """The least and the largest value that the space has."""
        if not self.is_integer:
            return self.min, self.max
        unit = self.rounding_factor
        return (
            math.ceil(self.min / unit) * unit if math.isfinite(self.min) else self.min,
            math.floor(self.max / unit) * unit if math.isfinite(self.max) else self.max,
        )

    def to_basic(self, values: ArrayLike) -> Array:
        """Return the coordinates of values; infinite or NaN where a value has none."""
        with np.errstate(all="ignore"):
            return self._coordinate(np.asarray(values, np.float64)) / self.scale

    def from_basic(self, basic: ArrayLike) -> Array:
        """Return the values at coordinates, rounded and inside the space."""
        with np.errstate(all="ignore"):
            values = self._value(np.asarray(basic, np.float64) * self.scale)
            return np.clip(self._rounded(values), *self.ends)

    def _coordinate(self, values: Array) -> Array:
        raise NotImplementedError

    def _value(self, coordinates: Array) -> Array:
        raise NotImplementedError

    def _rounded(self, values: Array) -> Array:
        if not self.is_integer:
            return values
        return np.rint(values / self.rounding_factor) * self.rounding_factor


@dataclass(frozen=True)
class LinearSpace(Space):
    """The coordinate is x/scale.

    Examples:
        >>> LinearSpace(scale=64, is_integer=True, rounding_factor=8).from_basic(1.3).item()
        80.0
    """

    def _coordinate(self, values: Array) -> Array:
        return values

    def _value(self, coordinates: Array) -> Array:
        return coordinates


@dataclass(frozen=True)
class LogSpace(Space):
    """The coordinate is log10(x)/scale: by default its unit is a factor of 10.

    Examples:
        >>> LogSpace().to_basic(1e-3).item()
        -3.0
    """

    min: float = 0.0

    def _coordinate(self, values: Array) -> Array:
        return np.log10(values)

    def _value(self, coordinates: Array) -> Array:
        return np.asarray(10.0**coordinates)


@dataclass(frozen=True)
class LogitSpace(Space):
    """The coordinate is log10(x/(1-x))/scale: 0.9, 0.99 and 0.999 are a unit apart.

    Examples:
        >>> LogitSpace().from_basic([-1, 0, 1]).round(3).tolist()
        [0.091, 0.5, 0.909]
    """

    min: float = 0.0
    max: float = 1.0

    def __post_init__(self) -> None:
        """Check the arguments."""
        super().__post_init__()
        if self.is_integer or not 0 <= self.min <= self.max <= 1:
            refuse(
                "min",
                "lie between 0 and `max`, up to 1, in a LogitSpace, whose values are not whole",
                f"{self.min!r} to {self.max!r}, `is_integer` {self.is_integer}",
                "Take a LinearSpace or a LogSpace for other values.",
            )

    def _coordinate(self, values: Array) -> Array:
        return np.log10(values / (1 - values))

    def _value(self, coordinates: Array) -> Array:
        return np.asarray(expit(coordinates * math.log(10)))


@dataclass(frozen=True)
class PowerOfTwoSpace(Space):
    """Whole powers of two. The coordinate is log10(x)/scale, as of a `LogSpace`.

    Examples:
        >>> PowerOfTwoSpace(min=8).from_basic([0, 1, 2]).tolist()
        [8.0, 8.0, 128.0]
    """

    min: float = 1.0
    is_integer: bool = True

    def __post_init__(self) -> None:
        """Check the arguments."""
        if not self.is_integer or self.rounding_factor != 1 or not self.max >= 1:
            refuse(
                "PowerOfTwoSpace",
                "have whole values from 1 up and no `rounding_factor`",
                f"`max` {self.max!r}, `rounding_factor` {self.rounding_factor!r}, `is_integer`"
                f" {self.is_integer!r}",
                "Take a LogSpace for other values.",
            )
        super().__post_init__()

    @property
    def ends(self) -> tuple[float, float]:
        """The least and the largest power."""
        most = 2.0 ** math.floor(math.log2(self.max)) if self.max < math.inf else math.inf
        return 2.0 ** math.ceil(math.log2(max(self.min, 1))), most

    def _coordinate(self, values: Array) -> Array:
        return np.log10(values)

    def _value(self, coordinates: Array) -> Array:
        return np.asarray(10.0**coordinates)

    def _rounded(self, values: Array) -> Array:
        return np.asarray(2.0 ** np.rint(np.log2(values)))


def checked_spaces(spaces: Any) -> dict[str, Space]:
    """Return the spaces by their parameters, or raise a TypeError that names the wrong one."""
    for name, space in dict(spaces or {}).items():
        if not isinstance(space, Space):
            refuse(
                "spaces",
                f"have a space of noisescale.lab.tune.carbs.spaces for {name!r}",
                repr(space),
                "Pass, for example, `LogSpace()`.",
                error=TypeError,
            )
    return dict(spaces or {})
