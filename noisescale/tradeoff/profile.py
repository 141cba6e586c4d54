# SPDX-License-Identifier: Apache-2.0
"""The critical batch size of a few runs to one result, with an interval that may be open."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from scipy.optimize import brentq, minimize_scalar
from scipy.special import stdtrit

from noisescale.bounded import Bounded
from noisescale.checks import check_confidence, checked_positive
from noisescale.refusal import Refusal
from noisescale.tradeoff.run_sums import Array
from noisescale.tradeoff.tradeoff import Floats

STEPS_SCATTER = 0.15
"""Of the logarithm of the steps to one result, by seed and by how finely learning rates are tuned.

The trainings of benchmarks/prediction/single_runs.py scatter by 5 to 23 % between seeds, 15 % in
the root mean square.
"""

FARTHEST = 1e6
"""Below the smallest batch size, and above the largest, in which B_crit is sought."""


def profiled_critical_batch_size(
    batch_sizes: Floats,
    steps: Floats,
    scatter: float | None = None,
    *,
    confidence: float = 0.95,
) -> Bounded:
    """Return B_crit of the law S(B) = S_min·(1 + B_crit/B) with its profile interval.

    S_min is fitted at each B_crit, in logarithms. The interval holds each B_crit whose squared
    residuals, in units of the scatter, exceed the least by less than Student's quantile squared. It
    has no upper end if that includes perfect scaling, and begins at 0 if it includes steps that do
    not fall at all.

    Args:
        batch_sizes: Global, in examples, shape (n,); repeated ones for repeated runs.
        steps: Steps of well-tuned runs to one result, shape (n,).
        scatter: Standard deviation of the logarithm of the steps: 0.15 is about 15 %. Default: the
            scatter of repeated runs around their mean; `STEPS_SCATTER` without repeated runs.
        confidence: Coverage of the interval.

    Returns:
        B_crit in examples; 0 and infinite are possible values.

    Raises:
        ValueError: If there are fewer than two batch sizes, or a value is not positive.

    Examples:
        >>> profiled_critical_batch_size([32, 512], [900, 120])
        Bounded(value=391.5..., low=182.9..., high=1145.5...)

    References:
        McCandlish et al. 2018, arXiv:1812.06162, equation 2.11.
    """
    check_confidence(confidence)
    sizes, counts = (np.asarray(x, dtype=np.float64) for x in (batch_sizes, steps))
    if sizes.shape != counts.shape or sizes.ndim != 1 or len(np.unique(sizes)) < 2:
        raise Refusal(
            "batch_sizes",
            "have two values or more, and `steps` equally many",
            f"shapes {sizes.shape} and {counts.shape} with {len(np.unique(sizes))} batch sizes",
            "Train at a second batch size.",
        )
    for name, values in (("batch_sizes", sizes), ("steps", counts)):
        if not (np.isfinite(values).all() and (values > 0).all()):
            raise Refusal(
                name,
                "be positive and finite",
                values.tolist(),
                "Leave out runs that did not reach the result.",
            )
    freedom = math.inf
    if scatter is None:
        scatter, freedom = _scatter(sizes, np.log(counts))
    else:
        checked_positive("scatter", scatter, "Pass 0.1 for 10 %.")
    quantile = float(stdtrit(min(freedom, 1e9), 0.5 + confidence / 2))

    def misfit(log_critical: float) -> float:
        logs = np.log(counts) - np.log1p(math.exp(log_critical) / sizes)
        return float(((logs - logs.mean()) ** 2).sum())

    return profile_of(misfit, sizes, (quantile * scatter) ** 2)


def profile_of(misfit: Callable[[float], float], batch_sizes: Array, more: float) -> Bounded:
    """Return the B_crit of the least misfit, and the interval with at most `more` misfit.

    Args:
        misfit: A function of the logarithm of B_crit.
        batch_sizes: B_crit is searched up to a million times above and below them.
        more: How much the misfit at the ends exceeds the least one.
    """
    ends = math.log(batch_sizes.min() / FARTHEST), math.log(batch_sizes.max() * FARTHEST)
    grid = np.linspace(*ends, 400)
    where = int(np.argmin([misfit(x) for x in grid]))
    if 0 < where < len(grid) - 1:
        around = grid[where - 1], grid[where + 1]
        found = minimize_scalar(misfit, bounds=around, method="bounded", options={"xatol": 1e-12})
        best, value = float(found.x), math.exp(found.x)
    else:
        best, value = float(grid[where]), 0.0 if where == 0 else math.inf
    limit = misfit(best) + more
    return Bounded(
        value,
        _end(lambda x: misfit(x) - limit, best, grid[grid < best][::-1], 0.0),
        _end(lambda x: misfit(x) - limit, best, grid[grid > best], math.inf),
    )


def _end(excess: Callable[[float], float], best: float, outward: Array, beyond: float) -> float:
    """Where an interval around the logarithm `best` ends; `beyond` if it does not."""
    inside = [k for k, x in enumerate(outward) if excess(x) <= 0]
    first_outside = inside[-1] + 1 if inside else 0
    if first_outside == len(outward):
        return beyond
    last_inside = float(outward[first_outside - 1]) if first_outside else best
    if excess(last_inside) >= 0:  # no scatter: the interval is the value
        return math.exp(last_inside)
    ends = sorted((last_inside, float(outward[first_outside])))
    return math.exp(brentq(excess, *ends, xtol=1e-12))


def _scatter(sizes: Array, logs: Array) -> tuple[float, float]:
    """Standard deviation within repeats, and its degrees of freedom; else what is usual."""
    groups = [logs[sizes == size] for size in np.unique(sizes)]
    freedom = len(logs) - len(groups)
    within = sum(float(((group - group.mean()) ** 2).sum()) for group in groups)
    return (math.sqrt(within / freedom), freedom) if within else (STEPS_SCATTER, math.inf)
