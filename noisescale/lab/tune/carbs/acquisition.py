# SPDX-License-Identifier: Apache-2.0
"""Where to look next: candidates near the Pareto set, and what each of them promises."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray
from scipy.special import erfcx, logsumexp, ndtr, ndtri

from noisescale.lab.tune.carbs.dimensions import Dimension
from noisescale.lab.tune.carbs.spaces import Array

RADIUS = 0.3
"""Standard deviation of a step, in each basic coordinate."""

CANDIDATES = 100
"""The number of candidates for each parameter."""

FINE = 0.1
"""Standard deviation of a small step, in each coordinate that it moves."""


def steps_from(
    origins: Array,
    dimensions: Sequence[Dimension],
    count: int,
    rng: np.random.Generator,
    *,
    shorter: bool = False,
) -> Array:
    """Return candidates: each a random origin plus a step, as near as the spaces allow.

    Steps have a normal distribution that is cut off at the ends of the spaces. The authors draw
    without ends and leave out what falls beyond them. That is the same distribution.

    With `shorter`, half of the steps are cut to a random share of their length. Whole steps in
    several coordinates all end far from their origin, and miss what is just beside it.
    """
    at = origins[rng.integers(len(origins), size=count)]
    low, high = _limits(dimensions)
    below, above = ndtr((low - at) / RADIUS), ndtr((high - at) / RADIUS)
    share = below + rng.random(at.shape) * (above - below)
    moved = np.clip(at + RADIUS * ndtri(share), low, high)
    if shorter:
        lengths = np.where(rng.random(count) < 0.5, 1.0, rng.random(count))
        moved = at + lengths[:, None] * (moved - at)
    return snap(moved, dimensions)


def small_steps_from(
    origins: Array, dimensions: Sequence[Dimension], count: int, rng: np.random.Generator
) -> Array:
    """Return candidates: each a random origin with a small step in about half of its coordinates.

    Among random steps in many coordinates none has its best length in all of them.
    """
    at = origins[rng.integers(len(origins), size=count)]
    moved = at + (rng.random(at.shape) < 0.5) * FINE * rng.normal(size=at.shape)
    return snap(np.clip(moved, *_limits(dimensions)), dimensions)


def _limits(dimensions: Sequence[Dimension]) -> tuple[Array, Array]:
    """Return the ends in each coordinate."""
    ends = np.array([d.limits for d in dimensions for _ in range(d.width)])
    return ends[:, 0], ends[:, 1]


def snap(points: Array, dimensions: Sequence[Dimension]) -> Array:
    """Return the points at the nearest values that the parameters can have."""
    ends = np.cumsum([dimension.width for dimension in dimensions])[:-1]
    parts = np.split(points, ends, axis=1)
    return np.hstack([d.snap(part) for d, part in zip(dimensions, parts, strict=True)])


def log_near(points: Array, origins: Array) -> Array:
    """Return the log of the normal density at each point's distance to the nearest origin.

    The constant is left out: only differences count.
    """
    squares = ((points[:, None, :] - origins[None, :, :]) ** 2).sum(axis=-1)
    return np.asarray(-squares.min(axis=1) / (2 * RADIUS**2))


def log_expected_improvement(mean: Array, deviation: Array, best: Array) -> Array:
    """Return log E[max(f - best, 0)] for f ~ N(mean, deviation²).

    With z = (mean - best)/deviation the expectation is deviation·h(z), where

        h(z) = φ(z) + z·Φ(z) = φ(z)·(1 + z·√(π/2)·erfcx(-z/√2))

    The second form is exact where the first one underflows. Below z = -1000 its bracket is lost
    to rounding, and is 1/z². So candidates far below the front still have an order, which the
    authors' expected improvement has not: it is 0 there.

    Examples:
        >>> zero = np.zeros(1)
        >>> log_expected_improvement(zero, np.ones(1), zero).round(4)  # 1/√(2π)
        array([-0.9189])
        >>> log_expected_improvement(zero, np.ones(1), zero + 50).round(1)
        array([-1258.7])
    """
    deviation = np.maximum(deviation, 1e-9)
    z = (mean - best) / deviation
    near = np.maximum(z, -1000.0)
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        direct = np.log(np.exp(-near * near / 2) / math.sqrt(2 * math.pi) + near * ndtr(near))
        bracket = np.log1p(near * math.sqrt(math.pi / 2) * erfcx(-near / math.sqrt(2)))
        far = np.where(z < -1000.0, -2 * np.log(np.abs(z)), bracket)
    log_h = np.where(z > -1, direct, -z * z / 2 - math.log(2 * math.pi) / 2 + far)
    return np.asarray(np.log(deviation) + log_h)


@dataclass(frozen=True)
class Front:
    """The best output at each log cost: stairs that rise where a member begins."""

    members: NDArray[np.intp]
    """Rows of the points that the stairs were made of."""
    edges: Array
    """Where each step of the stairs begins in log cost, and where the last one ends."""
    outputs: Array
    """The output of each step. The first one is below all members."""

    @classmethod
    def of(cls, log_costs: Array, outputs: Array, ends: tuple[float, float]) -> Self:
        """Return the front of points. What is cheaper than all of them has the worst output.

        Args:
            log_costs: Of the points.
            outputs: Of the points. Larger is better.
            ends: How far below the cheapest and above the dearest point costs count, in logs.
        """
        order = np.lexsort((-outputs, log_costs))
        highest = np.maximum.accumulate(outputs[order])
        members = order[np.diff(highest, prepend=-np.inf) > 0]
        low, high = log_costs.min() - ends[0], log_costs.max() + ends[1]
        return cls(
            members,
            np.concatenate([[low], log_costs[members], [high]]),
            np.concatenate([[outputs.min()], outputs[members]]),
        )

    def log_gain(
        self, log_costs: Array, mean: Array, deviation: Array, least: float = -math.inf
    ) -> Array:
        """Return the log of the dominated area that each candidate is expected to add.

        A candidate of log cost c and output f ~ N(mean, deviation²) is available at every cost
        from c up. So it adds

            ∫_c^end E[max(f - front(c'), 0)] dc'

        which is a sum over the steps of the front. It is -inf beyond the end. Costs below `least`
        do not count.
        """
        begins = np.maximum(log_costs, least)[:, None]
        room = self.edges[1:] - np.maximum(self.edges[:-1], begins)
        over = log_expected_improvement(mean[:, None], deviation[:, None], self.outputs)
        with np.errstate(divide="ignore"):
            return np.asarray(logsumexp(over + np.log(np.maximum(room, 0.0)), axis=1))
