# SPDX-License-Identifier: Apache-2.0
"""The three regimes of a sweep over batch sizes, with bounds on where they meet."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

import numpy as np
from scipy.special import stdtrit

from noisescale.bounded import Bounded
from noisescale.checks import check_confidence, checked_positive
from noisescale.tradeoff import Floats
from noisescale.tradeoff.fit import checked_sweep
from noisescale.tradeoff.profile import FARTHEST, STEPS_SCATTER
from noisescale.tradeoff.run_sums import Array

Regime = Literal["perfect scaling", "diminishing returns", "maximal data parallelism", "between"]

OVERHEAD = 0.2
"""Scaling is perfect while examples are this share above their fewest, or nearer; data parallelism
is maximal once steps are this share above their fewest, or nearer."""

GENTLEST, SHARPEST = 0.4, 20.0
"""Exponents α of the bend that are considered.

The law has 1. At 0.4 diminishing returns stretch over a factor of 400,000 in batch sizes, 20 is a
corner. The sweeps of benchmarks/prediction/single_runs.py and benchmarks/scheduling/adaptive.py
bend by 0.8 to 1.8, those of Zhang et al. 2024 by 0.8 to 1.3.
"""

GENTLE = 0.5
"""Standard deviation of log α below the law's 1, as a normal distribution; all above are alike.

Without it a straight line of 15 % scatter could always be the beginning of a very gentle bend.
"""

ASSUMED_FREEDOM = 3
"""Degrees of freedom that `STEPS_SCATTER` counts beside the scatter of the sweep."""

_PASSES = 6
"""A pass narrows the grid down to what the one before left possible."""


@dataclass(frozen=True)
class Regimes:
    """Where perfect scaling ends and maximal data parallelism begins in a sweep.

    Bounds within the sweep are shown by the sweep. A bound beyond the sweep is open: 0 or infinite.
    """

    perfect_up_to: Bounded
    """The batch size at which examples are 20 % above their fewest, in examples."""
    maximal_from: Bounded
    """The batch size at which steps are 20 % above their fewest, in examples."""
    critical_batch_size: Bounded
    """B_crit, in examples: 0 if no batch size shows falling steps, infinite if all scale."""
    min_steps: Bounded
    """S_min, the steps at an infinite batch size."""
    min_examples: Bounded
    """E_min, the examples at a vanishing batch size."""
    sharpness: Bounded
    """The bend's α between `GENTLEST` and `SHARPEST`; the value is NaN if the sweep has none."""
    scatter: float
    """Standard deviation of the logarithm of a run's steps: 0.1 is about 10 %."""
    batch_sizes: tuple[float, ...]
    """Of the sweep, global, in examples."""
    measured_steps: tuple[float, ...]
    """Steps to the result at each of them."""

    def of(self, batch_size: float) -> Regime:
        """Return the regime of a batch size; "between" if the bounds do not decide it.

        A bend with an exponent above 3.8 has no diminishing returns: both other regimes overlap
        around B_crit, where they meet here.
        """
        size = checked_positive("batch_size", batch_size, "Give a global batch size, in examples.")
        perfect, maximal = size <= self.perfect_up_to.low, size >= self.maximal_from.high
        if perfect and maximal:
            perfect = size <= self.critical_batch_size.value
        if perfect:
            return "perfect scaling"
        if maximal:
            return "maximal data parallelism"
        if self.perfect_up_to.high < size < self.maximal_from.low:
            return "diminishing returns"
        return "between"

    def steps(self, batch_size: float) -> float:
        """Return the steps of the curve that fits best, S_min·(1 + (B_crit/B)^α)^(1/α)."""
        size = checked_positive("batch_size", batch_size, "Give a global batch size, in examples.")
        least, most = sorted((self.min_steps.value, self.min_examples.value / size))
        if not least:
            return most
        alpha = self.sharpness.value
        return most * math.exp(math.log1p((least / most) ** alpha) / alpha)

    @cached_property
    def log_residuals(self) -> tuple[float, ...]:
        """log(measured) - log(fitted) at each batch size of the sweep."""
        pairs = zip(self.batch_sizes, self.measured_steps, strict=True)
        return tuple(math.log(steps / self.steps(size)) for size, steps in pairs)


def find_regimes(
    batch_sizes: Floats,
    steps: Floats,
    *,
    confidence: float = 0.95,
    scatter: float | None = None,
) -> Regimes:
    """Find where perfect scaling ends and maximal data parallelism begins in a sweep.

    On logarithmic axes the steps to one result first fall with slope -1 (perfect scaling), then
    less (diminishing returns), and no more in the end (maximal data parallelism). The curve is

        S(B) = S_min·(1 + (B_crit/B)^α)^(1/α)

    The law of McCandlish et al. has α = 1; trainings bend more gently or more sharply, and the
    borders depend on it. They are where examples, or steps, exceed their fewest by 20 %:

        perfect_up_to = B_crit·(1.2^α - 1)^(1/α)
        maximal_from  = B_crit/(1.2^α - 1)^(1/α)

    α = 1 gives B_crit/5 and 5·B_crit. The sweep has to say what α is: an interval holds the values
    of every curve that fits nearly as well as the best one, whatever its α. Bends gentler than the
    law count as less likely beforehand (`GENTLE`). benchmarks/prediction/regimes.py counts how
    often the intervals hold the truth, and how often intervals with α = 1 do.

    Args:
        batch_sizes: Global, in examples, shape (n,); repeated ones for repeated runs.
        steps: Optimizer steps of well-tuned runs to one result, shape (n,).
        confidence: Coverage of each interval.
        scatter: Standard deviation of the logarithm of one run's steps: 0.15 is about 15 %.
            Default: the scatter of the means of batch sizes around the curve and the scatter of
            repeated runs, with `STEPS_SCATTER` as a guess that counts three degrees of freedom.

    Returns:
        The borders with bounds, open where the sweep does not show them. Two or three batch sizes
        show little: most of their bounds are open.

    Raises:
        ValueError: If there are fewer than two batch sizes, a value is not positive and finite, or
            `confidence` is not between 0 and 1.

    Examples:
        >>> sizes = [8, 16, 32, 64, 128, 256, 512, 1024]
        >>> found = find_regimes(sizes, [998, 502, 252, 133, 81, 58, 53, 51])
        >>> [found.of(size) for size in (8, 128, 1024)]
        ['perfect scaling', 'between', 'maximal data parallelism']

    References:
        Shallue et al. 2019, arXiv:1811.03600, for the regimes, without numbers. Zhang et al. 2024,
        arXiv:2410.21676, for 20 %. McCandlish et al. 2018, arXiv:1812.06162, equation 2.11.
    """
    check_confidence(confidence)
    sizes, counts = checked_sweep(batch_sizes, steps)
    sweep = _Sweep.of(sizes, counts)
    if scatter is None:
        scatter, freedom = sweep.scatter(_best(sweep).misfit)
    else:
        checked_positive("scatter", scatter, "Pass 0.1 for 10 %, or leave it out.")
        freedom = 10**9  # the normal distribution
    sweep = sweep._replace(price=scatter**2)
    best = _best(sweep)
    quantile = float(stdtrit(freedom, 0.5 + confidence / 2))
    bounds = _bounds(sweep, best, best.misfit + (quantile * scatter) ** 2)
    for border in ("perfect_up_to", "maximal_from"):
        bounds[border] = _within(bounds[border], float(sizes.min()), float(sizes.max()))
    return Regimes(
        **bounds,
        scatter=scatter,
        batch_sizes=tuple(sizes.tolist()),
        measured_steps=tuple(counts.tolist()),
    )


class _Sweep(NamedTuple):
    """The means of the logarithms at each batch size."""

    log_sizes: Array
    log_steps: Array
    runs: Array
    """At each batch size."""
    squares: float
    """Of what repeated runs differ from their mean by."""
    price: float = 0.0
    """What an α one standard deviation below the law's adds to the squares, see `GENTLE`."""

    @classmethod
    def of(cls, sizes: Array, steps: Array) -> _Sweep:
        different, which, runs = np.unique(sizes, return_inverse=True, return_counts=True)
        logs = np.log(steps)
        means = np.asarray(np.bincount(which, logs) / runs, dtype=np.float64)
        squares = float(((logs - means[which]) ** 2).sum())
        return cls(np.log(different), means, runs.astype(np.float64), squares)

    def fit(self, critical: Array, alpha: Array) -> tuple[Array, Array]:
        """Return log S_min that fits best with each log B_crit and α, and the squares left."""
        excess = alpha[..., None] * (critical[..., None] - self.log_sizes)
        left = self.log_steps - np.logaddexp(0, excess) / alpha[..., None]
        level = left @ self.runs / self.runs.sum()
        unlikely = (np.minimum(np.log(alpha), 0.0) / GENTLE) ** 2
        return level, (left - level[..., None]) ** 2 @ self.runs + self.price * unlikely

    def scatter(self, misfit: float) -> tuple[float, int]:
        """Return the scatter of a run, and its degrees of freedom.

        Repeated runs share their learning rate, and how well it was tuned. So batch sizes may
        scatter by more than repeated runs do. Their distances from the curve count, and repeated
        runs only improve the guess.
        """
        repeated = self.runs.sum() - len(self.runs)
        guess = ASSUMED_FREEDOM * STEPS_SCATTER**2 + self.squares
        guess /= ASSUMED_FREEDOM + repeated
        free = max(len(self.runs) - 3, 0)
        squares = ASSUMED_FREEDOM * guess + (misfit if free else 0.0)
        return math.sqrt(squares / (ASSUMED_FREEDOM + free)), ASSUMED_FREEDOM + free

    def grid(self) -> Array:
        """Values of log B_crit, out to where the gentlest curve is a straight line."""
        beyond = math.log(FARTHEST) / GENTLEST
        return np.linspace(self.log_sizes[0] - beyond, self.log_sizes[-1] + beyond, 300)


def _border(alpha: Array) -> Array:
    """Log B_crit minus the log of where perfect scaling ends, see `find_regimes`."""
    return -np.log(np.expm1(alpha * math.log1p(OVERHEAD))) / alpha


class _Bend(NamedTuple):
    """A curve: its S_min is the one that fits best."""

    alpha: float
    critical: float
    """log B_crit, infinite for straight lines."""
    misfit: float


def _best_critical(sweep: _Sweep, alpha: Array) -> tuple[Array, Array]:
    """Return the log B_crit that fits best with each α, and the squares left."""
    grid = sweep.grid()
    misfits = sweep.fit(grid[:, None], alpha)[1]
    where = np.clip(misfits.argmin(axis=0), 1, len(grid) - 2)
    low, high = grid[where - 1], grid[where + 1]
    for _ in range(45):  # thirds go: to 1e-9
        third = (high - low) / 3
        lower, upper = low + third, high - third
        left = sweep.fit(lower, alpha)[1] <= sweep.fit(upper, alpha)[1]
        low, high = np.where(left, low, lower), np.where(left, upper, high)
    best = (low + high) / 2
    least = sweep.fit(best, alpha)[1]
    for line, misfit in ((-math.inf, misfits[0]), (math.inf, misfits[-1])):
        fits = misfit <= least * (1 + 1e-9) + 1e-20 * sweep.runs.sum()
        best, least = np.where(fits, line, best), np.where(fits, misfit, least)
    return best, least


def _best(sweep: _Sweep) -> _Bend:
    low, high = math.log(GENTLEST), math.log(SHARPEST)
    for _ in range(_PASSES):
        alphas = np.exp(np.linspace(low, high, 25))
        critical, misfit = _best_critical(sweep, alphas)
        at = int(misfit.argmin())
        low, high = np.log(alphas[[max(at - 1, 0), min(at + 1, 24)]]).tolist()
    straight = math.isinf(critical[at])
    return _Bend(
        SHARPEST if straight else float(alphas[at]), float(critical[at]), float(misfit[at])
    )


def _critical_ends(sweep: _Sweep, alpha: Array, limit: float) -> tuple[Array, Array]:
    """Return the log B_crit between which each α leaves `limit` squares at most; NaN for none."""
    grid = sweep.grid()
    best, least = _best_critical(sweep, alpha)
    inside = sweep.fit(grid[:, None], alpha)[1] <= limit
    ends = []
    for outward, points, known in ((-1, grid, inside), (1, grid[::-1], inside[::-1])):
        farthest = points[known.argmax(axis=0)]
        within = np.where(known.any(axis=0), farthest, np.clip(best, grid[0], grid[-1]))
        outside = within + outward * (grid[1] - grid[0])
        for _ in range(35):
            middle = (within + outside) / 2
            fits = sweep.fit(middle, alpha)[1] <= limit
            within, outside = np.where(fits, middle, within), np.where(fits, outside, middle)
        end = np.where(known[0], outward * math.inf, within)
        ends.append(np.where(least <= limit, end, np.nan))
    return ends[0], ends[1]


def _possible(sweep: _Sweep, best: _Bend, limit: float) -> tuple[Array, Array, Array]:
    """Return each α with which a curve leaves `limit` squares at most, and its ends of B_crit."""
    gentle, sharp = math.log(GENTLEST), math.log(SHARPEST)
    for _ in range(_PASSES):
        alphas = np.exp(np.union1d(np.linspace(gentle, sharp, 41), math.log(best.alpha)))
        low, high = _critical_ends(sweep, alphas, limit)
        found = np.flatnonzero(~np.isnan(low))
        around = np.log(alphas[[max(found[0] - 1, 0), min(found[-1] + 1, len(alphas) - 1)]])
        if around[1] - around[0] > 0.9 * (sharp - gentle):
            break
        gentle, sharp = around.tolist()
    return alphas[found], low[found], high[found]


def _bounds(sweep: _Sweep, best: _Bend, limit: float) -> dict[str, Bounded]:
    """What the best curve has, and all curves that leave `limit` squares at most."""
    alphas, low, high = _possible(sweep, best, limit)
    apart, straight = _border(alphas), math.isinf(best.critical)
    own_apart = float(_border(np.array(best.alpha)))
    first, last = sweep.grid()[[0, -1]]
    between = np.linspace(np.maximum(low, first), np.minimum(high, last), 65)
    level, misfit = sweep.fit(between, alphas)
    more = np.sqrt(np.maximum(limit - misfit, 0.0) / sweep.runs.sum())
    own_critical = np.clip(best.critical, first, last)
    own_level = float(sweep.fit(own_critical, np.array(best.alpha))[0])
    steps = -math.inf if best.critical == math.inf else own_level
    examples = -math.inf if best.critical == -math.inf else own_level + float(own_critical)
    fewest = -math.inf if np.isposinf(high).any() else (level - more).min()
    least = -math.inf if np.isneginf(low).any() else (level + between - more).min()
    logs = {
        "perfect_up_to": (best.critical - own_apart, (low - apart).min(), (high - apart).max()),
        "maximal_from": (best.critical + own_apart, (low + apart).min(), (high + apart).max()),
        "critical_batch_size": (best.critical, low.min(), high.max()),
        "min_steps": (steps, fewest, (level + more).max()),
        "min_examples": (examples, least, (level + between + more).max()),
    }
    bounds = {name: Bounded(*(math.exp(x) for x in ends)) for name, ends in logs.items()}
    value = math.nan if straight else best.alpha
    sharpest = math.inf if alphas[-1] > SHARPEST * (1 - 1e-9) else float(alphas[-1])
    return bounds | {"sharpness": Bounded(value, float(alphas[0]), sharpest)}


def _within(border: Bounded, smallest: float, largest: float) -> Bounded:
    """The border with bounds within the sweep, or open."""
    low = min(border.low, largest) if border.low >= smallest else 0.0
    high = max(border.high, smallest) if border.high <= largest else math.inf
    return Bounded(border.value, low, high)
