# SPDX-License-Identifier: Apache-2.0
"""The law of steps against batch size, how sharply it may bend, and intervals that may be open."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from scipy.optimize import brentq, minimize_scalar

from noisescale.bounded import Bounded
from noisescale.tradeoff.run_sums import Array

STEPS_SCATTER = 0.15
"""Scatter of the logarithm of the steps to a result, by seed and by the tuning of learning rates.

The trainings of benchmarks/prediction/single_runs.py scatter by 5 to 23 % between seeds, 15 % in
the root mean square.
"""

SPREAD = 0.35
"""Standard deviation of log α around 0, the law of McCandlish et al., before a sweep is seen.

16 sweeps bend by 0.9 to 1.4, and none excludes 1: those of Zhang et al. 2024 and of
benchmarks/prediction/single_runs.py and benchmarks/scheduling/adaptive.py. They spread by 0.12
(`benchmarks/prediction/regimes.py --published`).
"""

BENDS = np.exp(SPREAD * np.linspace(-4, 4, 81))
"""The values of α that are considered."""

UNLIKELY = (np.log(BENDS) / SPREAD) ** 2
"""What each of them adds to the squares of residuals, in units of their scatter."""

FARTHEST = 1e6
"""The factor below the smallest and above the largest batch size in which B_crit is sought."""


def log_law(excess: Array | float, sharpness: Array | float) -> Array:
    """Return log(S/S_min) = log(1 + (B_crit/B)^α)/α, where `excess` is log(B_crit/B)."""
    return np.asarray(np.logaddexp(0, sharpness * excess) / sharpness)


def least_of(misfits: Array) -> float:
    """Return the least misfit between the first and the last of `BENDS`, by a parabola."""
    k = int(np.clip(misfits.argmin(), 1, len(misfits) - 2))
    before, at, after = misfits[k - 1 : k + 2].tolist()
    slope, curvature = (after - before) / 2, before + after - 2 * at
    step = min(max(-slope / curvature, -1.0), 1.0) if curvature > 0 else 0.0
    return float(at + step * (slope + step * curvature / 2))


def profile_of(
    misfit: Callable[[float], float],
    batch_sizes: Array,
    more: float,
    bent: Callable[[float], float] | None = None,
) -> Bounded:
    """Return the B_crit of the least misfit, and the interval with at most `more` misfit.

    The interval has no upper end if it includes perfect scaling, and begins at 0 if it includes
    steps that do not fall at all.

    Args:
        misfit: A function of the logarithm of B_crit.
        batch_sizes: B_crit is searched up to a million times above and below them.
        more: How much the misfit at the ends exceeds the least one.
        bent: The least misfit of any bend, for the ends. Default: `misfit`.
    """
    grid = grid_around(batch_sizes)
    where = int(np.argmin([misfit(x) for x in grid]))
    if 0 < where < len(grid) - 1:
        around = grid[where - 1], grid[where + 1]
        found = minimize_scalar(misfit, bounds=around, method="bounded", options={"xatol": 1e-12})
        best, value = float(found.x), math.exp(found.x)
    else:
        best, value = float(grid[where]), 0.0 if where == 0 else math.inf
    return Bounded(value, *ends_of(bent or misfit, grid, best, misfit(best) + more))


def grid_around(batch_sizes: Array) -> Array:
    """Return logarithms of the critical batch sizes that are considered."""
    ends = math.log(batch_sizes.min() / FARTHEST), math.log(batch_sizes.max() * FARTHEST)
    return np.linspace(*ends, 400)


def ends_of(
    misfit: Callable[[float], float], grid: Array, best: float, limit: float
) -> tuple[float, float]:
    """Return the ends around the logarithm `best` at which the misfit reaches a limit.

    An end that is not on the grid is 0 or infinite.
    """
    return (
        _end(lambda x: misfit(x) - limit, best, grid[grid < best][::-1], 0.0),
        _end(lambda x: misfit(x) - limit, best, grid[grid > best], math.inf),
    )


def _end(excess: Callable[[float], float], best: float, outward: Array, beyond: float) -> float:
    """Return where an interval around the logarithm `best` ends; `beyond` if it does not end."""
    inside = [k for k, x in enumerate(outward) if excess(x) <= 0]
    first_outside = inside[-1] + 1 if inside else 0
    if first_outside == len(outward):
        return beyond
    last_inside = float(outward[first_outside - 1]) if first_outside else best
    if excess(last_inside) >= 0:  # no scatter: the interval is the value
        return math.exp(last_inside)
    ends = sorted((last_inside, float(outward[first_outside])))
    return math.exp(brentq(excess, *ends, xtol=1e-12))
