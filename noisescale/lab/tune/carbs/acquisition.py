# SPDX-License-Identifier: Apache-2.0
"""Where to look next: candidates near the Pareto set, and what each of them promises."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from scipy.special import erfcx, ndtr, ndtri

from noisescale.lab.tune.carbs.dimensions import Dimension
from noisescale.lab.tune.carbs.spaces import Array

RADIUS = 0.3
"""Standard deviation of a step, in each basic coordinate."""

CANDIDATES = 100
"""The number of candidates for each parameter."""

EXPLORATION = 1.0
"""How far above the front an output must lie to be an improvement, in its standard deviations."""


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
    low = np.concatenate([[d.limits[0]] * d.width for d in dimensions])
    high = np.concatenate([[d.limits[1]] * d.width for d in dimensions])
    below, above = ndtr((low - at) / RADIUS), ndtr((high - at) / RADIUS)
    share = below + rng.random(at.shape) * (above - below)
    moved = np.clip(at + RADIUS * ndtri(share), low, high)
    if shorter:
        lengths = np.where(rng.random(count) < 0.5, 1.0, rng.random(count))
        moved = at + lengths[:, None] * (moved - at)
    return snap(moved, dimensions)


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
    """Return log E[max(f - best - EXPLORATION, 0)] for f ~ N(mean, deviation²).

    With z = (mean - best - EXPLORATION)/deviation the expectation is deviation·h(z), where

        h(z) = φ(z) + z·Φ(z) = φ(z)·(1 + z·√(π/2)·erfcx(-z/√2))

    The second form is exact where the first one underflows. Below z = -1000 its bracket is lost
    to rounding, and is 1/z². So candidates far below the front still have an order, which the
    authors' expected improvement has not: it is 0 there.

    Examples:
        >>> zero = np.zeros(1)
        >>> log_expected_improvement(zero, np.ones(1), zero - 1).round(4)  # 1/√(2π)
        array([-0.9189])
        >>> log_expected_improvement(zero, np.ones(1), zero + 49).round(1)
        array([-1258.7])
    """
    deviation = np.maximum(deviation, 1e-9)
    z = (mean - best - EXPLORATION) / deviation
    near = np.maximum(z, -1000.0)
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        direct = np.log(np.exp(-near * near / 2) / math.sqrt(2 * math.pi) + near * ndtr(near))
        bracket = np.log1p(near * math.sqrt(math.pi / 2) * erfcx(-near / math.sqrt(2)))
        far = np.where(z < -1000.0, -2 * np.log(np.abs(z)), bracket)
    log_h = np.where(z > -1, direct, -z * z / 2 - math.log(2 * math.pi) / 2 + far)
    return np.asarray(np.log(deviation) + log_h)
