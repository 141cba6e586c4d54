# SPDX-License-Identifier: Apache-2.0
"""Parameters of an Optuna study as basic coordinates, and back to values that Optuna takes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)

from noisescale.checks import is_real, refuse
from noisescale.lab.tune.carbs.spaces import Array, LinearSpace, LogSpace, Space

CORNER = 0.3 / math.sqrt(2)
"""Coordinate of a choice on its own axis. Two choices are as far apart as a step is wide."""


@dataclass(frozen=True)
class Dimension:
    """A parameter: its distribution and its space.

    A categorical parameter has a coordinate for each choice, and no space. Its choice is the
    largest coordinate.
    """

    name: str
    distribution: BaseDistribution
    space: Space | None

    @property
    def width(self) -> int:
        """Number of coordinates."""
        if self.space is None and isinstance(self.distribution, CategoricalDistribution):
            return len(self.distribution.choices)
        return 1

    @property
    def limits(self) -> tuple[float, float]:
        """The ends in each coordinate, half a step wider where values are rounded."""
        if self.space is None:
            return -math.inf, math.inf
        low, high = self.space.ends
        if isinstance(self.distribution, CategoricalDistribution):
            choices = self.space.to_basic(self._numbers())
            return float(choices.min() - 0.3), float(choices.max() + 0.3)
        step = getattr(self.distribution, "step", None)
        half = max(step or 0, self.space.rounding_factor if self.space.is_integer else 0) / 2
        wider = self.space.to_basic([low - half, high + half])
        exact = self.space.to_basic([low, high])
        wider = np.where(np.isfinite(wider), wider, exact)
        return float(wider[0]), float(wider[1])

    def to_basic(self, values: Sequence[Any]) -> Array:
        """Return a row of coordinates for each value."""
        if self.space is None:
            assert isinstance(self.distribution, CategoricalDistribution)
            rows = [int(self.distribution.to_internal_repr(value)) for value in values]
            return np.asarray(CORNER * np.eye(self.width)[rows])
        return self.space.to_basic(values).reshape(-1, 1)

    def snapped(self, basic: Array) -> Array:
        """Return the coordinates of the nearest values."""
        if self.space is None:
            return np.asarray(CORNER * np.eye(self.width)[basic.argmax(axis=1)])
        return self.space.to_basic(self._values(basic)).reshape(-1, 1)

    def from_basic(self, basic: Array) -> Any:
        """Return the value at one row of coordinates, as Optuna has it."""
        if self.space is None:
            assert isinstance(self.distribution, CategoricalDistribution)
            return self.distribution.choices[int(basic.argmax())]
        value = float(self._values(basic.reshape(1, -1))[0])
        if isinstance(self.distribution, CategoricalDistribution):
            numbers = self._numbers()
            return self.distribution.choices[int(np.abs(np.subtract(numbers, value)).argmin())]
        return int(value) if isinstance(self.distribution, IntDistribution) else value

    def _numbers(self) -> list[float]:
        assert isinstance(self.distribution, CategoricalDistribution)
        # `_space_of` has refused choices that are no numbers.
        return [float(choice) for choice in self.distribution.choices]  # type: ignore[arg-type]

    def _values(self, basic: Array) -> Array:
        """Return values that the space and the distribution have."""
        assert self.space is not None
        values = self.space.from_basic(basic[:, 0])
        if isinstance(self.distribution, CategoricalDistribution):
            choices = self.space.to_basic(self._numbers())
            nearest = np.abs(basic - choices).argmin(axis=1)
            return np.asarray(np.asarray(self._numbers())[nearest])
        assert isinstance(self.distribution, (FloatDistribution, IntDistribution))
        low, high, step = self.distribution.low, self.distribution.high, self.distribution.step
        if step is not None and step != 1:
            values = low + np.rint((values - low) / step) * step
        elif isinstance(self.distribution, IntDistribution):
            values = np.rint(values)
        return np.asarray(np.clip(values, low, high))


def dimensions_of(
    distributions: Mapping[str, BaseDistribution], spaces: Mapping[str, Space]
) -> list[Dimension]:
    """Return the dimensions of a search, in the order of their names.

    Raises:
        ValueError: If a space and a distribution have no value in common.
        TypeError: If a parameter has a space but choices that are not numbers.
    """
    return [
        Dimension(name, distribution, _space_of(name, distribution, spaces.get(name)))
        for name, distribution in sorted(distributions.items())
    ]


def _space_of(name: str, distribution: BaseDistribution, given: Space | None) -> Space | None:
    if isinstance(distribution, CategoricalDistribution):
        if given is not None and not all(
            is_real(choice) and not isinstance(choice, bool) for choice in distribution.choices
        ):
            refuse(
                "spaces",
                f"have no space for {name!r}, whose choices are not numbers",
                repr(distribution.choices),
                "Leave it out of `spaces`.",
                error=TypeError,
            )
        if (
            given is not None
            and not np.isfinite(given.to_basic(np.array(distribution.choices, np.float64))).all()
        ):
            refuse(
                "spaces",
                f"have a space for {name!r} that contains its choices",
                repr(distribution.choices),
                "Pass another space, or leave it out of `spaces`.",
            )
        return given
    assert isinstance(distribution, (FloatDistribution, IntDistribution))
    space = given if given is not None else _default_space(distribution)
    low, high = max(space.min, distribution.low), min(space.max, distribution.high)
    if low > high:
        refuse(
            "spaces",
            f"have a space for {name!r} that overlaps with what the trial asks for",
            f"{space.min:g} to {space.max:g} and {distribution.low:g} to {distribution.high:g}",
            "Make one of them wider.",
        )
    return replace(space, min=float(low), max=float(high))


def _default_space(distribution: FloatDistribution | IntDistribution) -> Space:
    """Return the space of a distribution: at least two units wide, a decade a unit at most.

    Whole numbers take a scale of three steps at least. A step of the search then reaches the next.
    """
    low, high = distribution.low, distribution.high
    if distribution.log:
        decades = math.log10(high / low)
        return LogSpace(
            scale=min(1.0, decades / 2) or 1.0,
            is_integer=isinstance(distribution, IntDistribution),
        )
    return LinearSpace(scale=max((high - low) / 2, 3 * (distribution.step or 0)) or 1.0)


def middle_of(dimension: Dimension) -> Array:
    """Return the middle of a dimension; of categorical ones the point as far from all choices."""
    if dimension.space is None:
        return np.zeros(dimension.width)
    if isinstance(dimension.distribution, CategoricalDistribution):
        ends = dimension.space.to_basic(dimension._numbers())
    else:
        ends = dimension.space.to_basic(dimension.space.ends)
    finite = np.where(np.isfinite(ends), ends, 0.0)
    return np.asarray(dimension.snapped(np.array([[(finite.min() + finite.max()) / 2]]))[0])
