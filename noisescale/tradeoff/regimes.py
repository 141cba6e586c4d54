# SPDX-License-Identifier: Apache-2.0
"""The law of steps against batch size in a sweep, and its regimes, with bounds."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares
from scipy.special import stdtrit

from noisescale.bounded import Bounded
from noisescale.checks import check_confidence, is_real, refuse, require_positive
from noisescale.refusal import Refusal
from noisescale.tradeoff.profile import (
    BENDS,
    SPREAD,
    STEPS_SCATTER,
    ends_of,
    grid_around,
    least_of,
    log_law,
)
from noisescale.tradeoff.run_sums import Array
from noisescale.tradeoff.tradeoff import Floats

Regime = Literal["perfect scaling", "diminishing returns", "maximal data parallelism", "between"]

Flags = NDArray[np.bool_]

OVERHEAD = 0.2
"""Scaling is perfect while examples are this share above their fewest, or nearer; data parallelism
is maximal once steps are this share above their fewest, or nearer."""

ASSUMED_FREEDOM = 3
"""Degrees of freedom that `STEPS_SCATTER` counts beside the scatter of the sweep."""

RATE_TILT = 0.17
"""Steps lost, per doubling of the batch size, to learning rates that were not searched.

It is the change of log(steps/steps at the best rate), in the root mean square. The sweeps of
benchmarks/prediction/unsearched_rates.py have steps at many learning rates. There the best rate of
one batch size is taken to the others by no change, by the square root rule or by the linear rule.
"""

RATE_SCATTER = 0.14
"""Scatter of log(steps/steps at the best rate) around this tilt, from the same sweeps."""


class _Curves(NamedTuple):
    """Curves that fit nearly as well as the best one, see `find_regimes`."""

    log_min_steps: Array
    log_critical: Array
    sharpness: Array
    spare: Array
    """How far log S_min may move to either side."""


@dataclass(frozen=True)
class Regimes:
    """The law of a sweep: where perfect scaling ends and maximal data parallelism begins.

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
    """The α of the bend, which is 1 if the sweep has no bend."""
    scatter: float
    """Standard deviation of the logarithm of a run's steps: 0.1 is about 10 %."""
    batch_sizes: tuple[float, ...]
    """The batch sizes of the sweep: global, in examples."""
    measured_steps: tuple[float, ...]
    """Steps to the result at each of them."""
    _curves: _Curves = field(repr=False, compare=False)

    def regime_of(self, batch_size: float) -> Regime:
        """Return the regime of a batch size; "between" if the bounds do not decide it.

        A bend with an exponent above 3.8 has no diminishing returns: both other regimes overlap
        around B_crit, where they meet here.
        """
        size = require_positive("batch_size", batch_size, "Give a global batch size, in examples.")
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
        size = require_positive("batch_size", batch_size, "Give a global batch size, in examples.")
        least, most = sorted((self.min_steps.value, self.min_examples.value / size))
        if not least:
            return most
        return most * math.exp(log_law(math.log(least / most), self.sharpness.value))

    def steps_with_bounds(self, batch_size: float) -> Bounded:
        """Return the steps of the curve that fits best, with those of every curve that fits.

        The curves are the ones that give B_crit its bounds. The interval holds the curve at this
        batch size. A single run scatters around the curve, and may lie outside.
        """
        best, of = self.steps(batch_size), self._curves
        logs = of.log_min_steps + log_law(of.log_critical - math.log(batch_size), of.sharpness)
        low, high = math.exp((logs - of.spare).min()), math.exp((logs + of.spare).max())
        return Bounded(best, min(low, best), max(high, best))


def find_regimes(
    batch_sizes: Floats,
    steps: Floats,
    *,
    confidence: float = 0.95,
    scatter: float | None = None,
    searched: Sequence[bool] | None = None,
    exponent: float | None = None,
) -> Regimes:
    """Fit the law of steps against batch size to a sweep, and find where its regimes meet.

    On logarithmic axes the steps to one result first fall with slope -1 (perfect scaling), then
    less (diminishing returns), and no more in the end (maximal data parallelism). The law is

        S(B) = S_min·(1 + (B_crit/B)^α)^(1/α)        B_crit = E_min/S_min

    McCandlish et al. derived α = 1. Trainings bend a little more gently or more sharply, and the
    borders depend on it. They are where examples, or steps, exceed their fewest by 20 %:

        perfect_up_to = B_crit·(1.2^α - 1)^(1/α)
        maximal_from  = B_crit/(1.2^α - 1)^(1/α)

    α = 1 gives B_crit/5 and 5·B_crit. The fit minimises the squares of the logarithmic residuals in
    units of the scatter, plus (log α/`SPREAD`)²: α is normally distributed beforehand, and a sweep
    has to contradict α = 1. An interval holds the values of every curve that fits nearly as well as
    the best one, whatever its α. benchmarks/prediction/regimes.py counts how often intervals hold
    the truth, and how often intervals with α = 1 do.

    At a batch size whose learning rate was not searched, the steps are those of a rate that is too
    low or too high by a factor which changes with the batch size. So its log(steps) has two more
    errors: `RATE_TILT` for each doubling from the nearest batch size that was searched, the same
    tilt for all batch sizes on one side of it, and `RATE_SCATTER`. Both are as large for one run as
    for the mean of many. If no batch size was searched, all have one tilt.

    Args:
        batch_sizes: Global, in examples, shape (n,); repeated ones for repeated runs.
        steps: Optimizer steps of well-tuned runs to one result, shape (n,).
        confidence: Coverage of each interval.
        scatter: Standard deviation of the logarithm of one run's steps: 0.15 is about 15 %.
            Default: the scatter of the means of batch sizes around the curve and the scatter of
            repeated runs, with `STEPS_SCATTER` as a guess that counts three degrees of freedom.
        searched: For each run, whether its learning rate was searched at its batch size. Default:
            all were.
        exponent: The α of the law; 1 is the published law. Default: it is fitted.

    Returns:
        The borders with bounds, open where the sweep does not show them. Two or three batch sizes
        show little: most of their bounds are open.

    Raises:
        ValueError: If there are fewer than two batch sizes, a value is not positive and finite, or
            `confidence` is not between 0 and 1, or `exponent` is not from 0.1 to 10.

    Examples:
        >>> sizes = [8, 16, 32, 64, 128, 256, 512, 1024]
        >>> found = find_regimes(sizes, [998, 502, 252, 133, 81, 58, 53, 51])
        >>> [found.regime_of(size) for size in (8, 128, 1024)]
        ['perfect scaling', 'between', 'maximal data parallelism']

    References:
        Shallue et al. 2019, arXiv:1811.03600, for the regimes, without numbers. Zhang et al. 2024,
        arXiv:2410.21676, for 20 %. McCandlish et al. 2018, arXiv:1812.06162, equation 2.11.
    """
    check_confidence(confidence)
    sizes, counts = require_sweep(batch_sizes, steps)
    tuned = np.ones(len(sizes), bool) if searched is None else np.asarray(searched, bool)
    if tuned.shape != sizes.shape:
        raise Refusal(
            "searched",
            "have one value for each run",
            f"{tuned.size} for {len(sizes)} runs",
            "Say of each run whether its learning rate was searched.",
        )
    bends = BENDS
    if exponent is not None:
        if not (is_real(exponent) and 0.1 <= exponent <= 10):
            refuse("exponent", "be from 0.1 to 10", repr(exponent), "Pass 1: the published law.")
        bends = np.full(3, float(exponent))
    sweep = _Sweep.of(sizes, counts, tuned, scatter or STEPS_SCATTER, bends)
    if scatter is None:
        scatter, freedom = sweep.scatter()
    else:
        require_positive("scatter", scatter, "Pass 0.1 for 10 %, or leave it out.")
        freedom = 10**9  # the normal distribution
    sweep = sweep._replace(price=scatter**2)
    quantile = float(stdtrit(freedom, 0.5 + confidence / 2))
    bounds, curves = sweep.bounds((quantile * scatter) ** 2)
    for border in ("perfect_up_to", "maximal_from"):
        bounds[border] = _limit_to(bounds[border], float(sizes.min()), float(sizes.max()))
    return Regimes(
        **bounds,
        scatter=scatter,
        batch_sizes=tuple(sizes.tolist()),
        measured_steps=tuple(counts.tolist()),
        _curves=curves,
    )


def require_sweep(batch_sizes: Floats, steps: Floats) -> tuple[Array, Array]:
    """Return both as arrays, or raise a ValueError if they cannot be a sweep."""
    batch, count = (np.asarray(x, dtype=np.float64) for x in (batch_sizes, steps))
    if batch.shape != count.shape or batch.ndim != 1:
        raise Refusal(
            ("batch_sizes", "steps"),
            "be one-dimensional and equally long",
            f"shapes {batch.shape} and {count.shape}",
            "Give the steps to the goal for each batch size.",
        )
    for name, values in (("batch_sizes", batch), ("steps", count)):
        wrong = ~((values > 0) & (values < math.inf))
        if wrong.any():
            where = int(np.argmax(wrong))
            raise Refusal(
                name,
                "be positive and finite",
                f"{values[where]} at position {where}",
                "Leave out runs that did not reach the goal.",
            )
    if len(sizes := np.unique(batch)) < 2:
        raise Refusal(
            "batch_sizes",
            "have two values at least",
            len(sizes),
            "Two determine the law, four and more can also contradict it.",
        )
    return batch, count


class _Sweep(NamedTuple):
    """The means of the logarithms at each batch size."""

    log_sizes: Array
    log_steps: Array
    runs: Array
    """The number of runs at each batch size."""
    squares: float
    """The sum of squares of the differences of repeated runs from their mean."""
    weights: Array
    """The inverse of the covariance of the means, in units of the squared scatter of a run."""
    bends: Array
    """The values of α that are considered. The one in the middle is the likeliest beforehand."""
    price: float = 0.0
    """The squared scatter: what an α one `SPREAD` away from 1 adds to the squares."""

    @classmethod
    def of(
        cls, sizes: Array, steps: Array, searched: Flags, scatter: float, bends: Array
    ) -> _Sweep:
        different, which, runs = np.unique(sizes, return_inverse=True, return_counts=True)
        logs = np.log(steps)
        means = np.asarray(np.bincount(which, logs) / runs, dtype=np.float64)
        squares = float(((logs - means[which]) ** 2).sum())
        tuned = np.bincount(which, ~searched) == 0
        covariance = np.diag(1 / runs) + _covariance_of_rates(different, tuned) / scatter**2
        weights = np.asarray(np.linalg.inv(covariance), dtype=np.float64)
        return cls(np.log(different), means, runs.astype(np.float64), squares, weights, bends)

    @property
    def likeliest(self) -> float:
        """The log α that is the likeliest before the sweep is seen."""
        return float(np.log(self.bends[len(self.bends) // 2]))

    @property
    def grid(self) -> Array:
        """Values of log B_crit, from 1e-6 of the smallest batch size to 1e6 of the largest."""
        return grid_around(np.exp(self.log_sizes))[::3]

    def fit(self, critical: Array) -> tuple[Array, Array]:
        """Return the best log S_min at each log B_crit and each of `bends`, and the squares left.

        The last axis of `critical` is the axis of `bends`, or has a length of 1.
        """
        left = self.log_steps - log_law(critical[..., None] - self.log_sizes, self.bends[:, None])
        level = (left @ self.weights).sum(-1) / self.weights.sum()
        rest = left - level[..., None]
        unlikely = ((np.log(self.bends) - self.likeliest) / SPREAD) ** 2
        return level, (rest @ self.weights * rest).sum(-1) + self.price * unlikely

    def scatter(self) -> tuple[float, int]:
        """Return the scatter of a run, and its degrees of freedom.

        Repeated runs share their learning rate, and how well it was tuned. So batch sizes may
        scatter by more than repeated runs do. Their distances from the curve count, and repeated
        runs only improve the guess.
        """
        repeated = self.runs.sum() - len(self.runs)
        guess = ASSUMED_FREEDOM * STEPS_SCATTER**2 + self.squares
        guess /= ASSUMED_FREEDOM + repeated
        free = max(len(self.runs) - 3, 0)
        squares = ASSUMED_FREEDOM * guess + (self.best()[1] if free else 0.0)
        return math.sqrt(squares / (ASSUMED_FREEDOM + free)), ASSUMED_FREEDOM + free

    def best(self) -> tuple[Array, float]:
        """Return log S_min, log B_crit and log α of the best curve, and the squares left.

        B_crit is at an end of the grid if no curve fits better than a straight line.
        """
        levels, misfits = self.fit(self.grid[:, None])
        least = float(misfits.min()) * (1 + 1e-9) + 1e-20 * self.weights.sum()
        for end in (0, -1):
            if misfits[end].min() <= least:
                level = levels[end, len(self.bends) // 2]
                return np.array([level, self.grid[end], self.likeliest]), least
        row, bend = np.unravel_index(misfits.argmin(), misfits.shape)
        start = [levels[row, bend], self.grid[row], math.log(self.bends[bend])]
        first, last = np.log(self.bends[[0, -1]])
        ends = [  # which must differ, also if α is given
            np.array([-math.inf, -math.inf, first - 1e-12]),
            np.array([math.inf, math.inf, last + 1e-12]),
        ]
        found = least_squares(
            self._residuals, start, bounds=ends, xtol=1e-14, ftol=1e-14, gtol=1e-14
        )
        level, critical, log_alpha = found.x
        log_alpha = np.clip(log_alpha, *np.log(self.bends[[0, -1]]))
        return np.array([level, critical, log_alpha]), 2 * float(found.cost)

    def _residuals(self, curve: Array) -> Array:
        level, critical, log_alpha = curve
        left = self.log_steps - level - log_law(critical - self.log_sizes, math.exp(log_alpha))
        weighted = np.linalg.cholesky(self.weights).T @ left
        away = (log_alpha - self.likeliest) / SPREAD
        return np.append(weighted, math.sqrt(self.price) * away)

    def bounds(self, more: float) -> tuple[dict[str, Bounded], _Curves]:
        """Return the best curve's values, with bounds from curves of at most `more` squares.

        The curves are returned, too.
        """
        grid, ((level, critical, log_alpha), least) = self.grid, self.best()
        limit, alpha = least + more, math.exp(log_alpha)
        line = {grid[0]: 0.0, grid[-1]: math.inf}.get(critical)

        def border(distance: Callable[[Array], Array]) -> Bounded:
            """Return the bounds of a border at a distance from log B_crit that depends on α."""
            beyond = distance(self.bends)
            at = critical + float(distance(np.array(alpha)))
            value, at = (math.exp(at), at) if line is None else (line, critical)

            def misfit(log_border: float) -> float:
                return least_of(self.fit(log_border - beyond)[1])

            return Bounded(value, *ends_of(misfit, grid, at, limit))

        found = border(np.zeros_like)
        ends = np.log(np.clip([found.low, found.high], *np.exp(grid[[0, -1]])))
        critical_of_each = np.linspace(ends[0], ends[1], 129)[:, None]
        levels, misfits = self.fit(critical_of_each)
        spare = np.sqrt(np.maximum(limit - misfits, 0.0) / self.weights.sum())
        inside = misfits <= max(limit, misfits.min())

        def fewest(logs: Array, best: float, none: float) -> Bounded:
            """Return the bounds of S_min or E_min, which is 0 where B_crit is `none`."""
            low, high = (logs - spare)[inside].min(), (logs + spare)[inside].max()
            return Bounded(
                0.0 if line == none else math.exp(best),
                0.0 if none in (found.low, found.high) else math.exp(low),
                math.exp(high),
            )

        bends = self.bends[inside.any(axis=0)]
        row, bend = inside.nonzero()
        curves = _Curves(levels[inside], critical_of_each[row, 0], self.bends[bend], spare[inside])
        values = {
            "perfect_up_to": border(lambda bend: -_log_distance(bend)),
            "maximal_from": border(_log_distance),
            "critical_batch_size": found,
            "min_steps": fewest(levels, level, math.inf),
            "min_examples": fewest(levels + critical_of_each, level + critical, 0.0),
            "sharpness": Bounded(alpha, min(alpha, float(bends[0])), max(alpha, float(bends[-1]))),
        }
        return values, curves


def _log_distance(alpha: Array) -> Array:
    """Return the log of where data parallelism is maximal minus log B_crit, see `find_regimes`."""
    return np.asarray(-np.log(np.expm1(alpha * math.log1p(OVERHEAD))) / alpha)


def _covariance_of_rates(sizes: Array, searched: Flags) -> Array:
    """Return the covariance of what learning rates that were not searched add to log(steps)."""
    doublings = np.log2(sizes)
    away, side = doublings - doublings.mean(), np.ones(len(sizes))
    if searched.any():
        apart = doublings[:, None] - doublings[searched]
        nearest = np.abs(apart).argmin(axis=1)
        away = apart[np.arange(len(sizes)), nearest]
        side = np.sign(away) * (nearest + 1)
    tilts = RATE_TILT**2 * np.outer(away, away) * (side[:, None] == side)
    return np.asarray(tilts + RATE_SCATTER**2 * np.diag(~searched))


def _limit_to(border: Bounded, smallest: float, largest: float) -> Bounded:
    """Return the border with bounds within the sweep, or open."""
    low = min(border.low, largest) if border.low >= smallest else 0.0
    high = max(border.high, smallest) if border.high <= largest else math.inf
    return Bounded(border.value, low, high)
