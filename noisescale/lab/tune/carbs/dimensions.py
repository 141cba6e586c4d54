# SPDX-License-Identifier: Apache-2.0
"""Parameters of an Optuna study as basic coordinates, and back to values that Optuna takes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
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
from noisescale.refusal import TypeRefusal

CORNER = 0.3 / math.sqrt(2)
"""Coordinate of a choice on its own axis. Two choices are as far apart as a step is wide."""


@dataclass(frozen=True)
class Dimension:
    """A parameter: its distribution and its space.

    A categorical parameter has a coordinate for each choice, and no space. Its choice is the
    largest coordinate. Where a categorical parameter has a space, its choices are numbers.
    """

    name: str
    distribution: BaseDistribution
    space: Space | None

    @property
    def choices(self) -> tuple[Any, ...]:
        """The choices of a categorical parameter."""
        if isinstance(self.distribution, CategoricalDistribution):
            return tuple(self.distribution.choices)
        return ()

    @property
    def width(self) -> int:
        """Number of coordinates."""
        return len(self.choices) if self.space is None else 1

    @property
    def ends(self) -> tuple[float, float]:
        """The least and the largest number that both the distribution and the space have."""
        assert self.space is not None
        if self.choices:
            return float(min(self.choices)), float(max(self.choices))
        assert isinstance(self.distribution, (FloatDistribution, IntDistribution))
        return self.space.ends(self.distribution.low, self.distribution.high)

    @cached_property
    def limits(self) -> tuple[float, float]:
        """The ends in each coordinate, half a step wider where values are rounded."""
        if self.space is None:
            return -math.inf, math.inf
        low, high = self.ends
        exact = self.space.to_basic([low, high])
        if self.choices:
            return float(exact[0] - 0.3), float(exact[1] + 0.3)
        step = getattr(self.distribution, "step", None)
        half = max(step or 0, self.space.rounding_factor if self.space.is_integer else 0) / 2
        wider = self.space.to_basic([low - half, high + half])
        wider = np.where(np.isfinite(wider), wider, exact)
        return float(wider[0]), float(wider[1])

    @property
    def middle(self) -> Array:
        """The middle; of choices without a space the point that is as far from all."""
        if self.space is None:
            return np.zeros(self.width)
        ends = self.space.to_basic(self.ends)
        finite = np.where(np.isfinite(ends), ends, 0.0)
        return np.asarray(self.snap(np.array([[(finite.min() + finite.max()) / 2]]))[0])

    def to_basic(self, values: Sequence[Any]) -> Array:
        """Return a row of coordinates for each value."""
        if self.space is None:
            rows = [int(self.distribution.to_internal_repr(value)) for value in values]
            return np.asarray(CORNER * np.eye(self.width)[rows])
        return self.space.to_basic(values).reshape(-1, 1)

    def snap(self, basic: Array) -> Array:
        """Return the coordinates of the nearest values."""
        if self.space is None:
            return np.asarray(CORNER * np.eye(self.width)[basic.argmax(axis=1)])
        if self.choices:
            return np.asarray(self.to_basic(self.choices)[self._nearest_choices(basic)])
        return self.space.to_basic(self.nearest(self.space.from_basic(basic)))

    def from_basic(self, basic: Array) -> Any:
        """Return the value at one row of coordinates, as Optuna has it."""
        if self.space is None:
            return self.choices[int(basic.argmax())]
        if self.choices:
            return self.choices[int(self._nearest_choices(basic.reshape(1, 1))[0])]
        value = float(self.nearest(self.space.from_basic(basic[0])))
        return int(value) if isinstance(self.distribution, IntDistribution) else value

    def nearest(self, values: Array) -> Array:
        """Return the numbers of space and distribution that are nearest to others."""
        assert self.space is not None
        assert isinstance(self.distribution, (FloatDistribution, IntDistribution))
        values = np.clip(self.space.round(values), *self.ends)
        low, high, step = self.distribution.low, self.distribution.high, self.distribution.step
        if step is not None and step != 1:
            values = low + np.rint((values - low) / step) * step
        elif isinstance(self.distribution, IntDistribution):
            values = np.rint(values)
        return np.asarray(np.clip(values, low, high))

    def _nearest_choices(self, basic: Array) -> Any:
        return np.abs(basic - self.to_basic(self.choices)[:, 0]).argmin(axis=1)


def dimensions_of(
    distributions: Mapping[str, BaseDistribution], spaces: Mapping[str, Space]
) -> list[Dimension]:
    """Return the dimensions of a search, in the order of their names.

    Raises:
        ValueError: If a space and a distribution have no value in common.
        TypeError: If a parameter has a space but choices that are not numbers.
    """
    return [
        _dimension(name, each, spaces.get(name)) for name, each in sorted(distributions.items())
    ]


def _dimension(name: str, distribution: BaseDistribution, space: Space | None) -> Dimension:
    if space is None and not isinstance(distribution, CategoricalDistribution):
        assert isinstance(distribution, (FloatDistribution, IntDistribution))
        kind = LogSpace if distribution.log else LinearSpace
        space = kind.across(distribution.low, distribution.high, distribution.step or 0.0)
    found = Dimension(name, distribution, space)
    if space is None:
        return found
    if not all(is_real(choice) and not isinstance(choice, bool) for choice in found.choices):
        refuse(
            "spaces",
            f"have no space for {name!r}, whose choices are not numbers",
            repr(found.choices),
            "Leave it out of `spaces`.",
            error=TypeRefusal,
        )
    if not np.isfinite(space.to_basic(found.choices)).all():
        refuse(
            "spaces",
            f"have a space for {name!r} that contains its choices",
            repr(found.choices),
            "Pass another space, or leave it out of `spaces`.",
        )
    if found.ends[0] > found.ends[1]:
        refuse(
            "spaces",
            f"have a space for {name!r} with a value that the trial may ask for",
            f"{space} for {distribution}",
            "Pass another space, or a wider distribution.",
        )
    return found
