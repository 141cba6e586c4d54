# SPDX-License-Identifier: Apache-2.0
"""Average the rows of a run in blocks. Noisier runs get longer blocks."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtrit

from noisescale.estimation.ratio_interval import fieller_interval, steps_needed
from noisescale.history.rows import Array, Rows

MOST_BLOCKS = 32
"""The largest number of blocks. More blocks would only show more noise."""

FEWEST_UNITS = 8
"""The fewest steps in a block: its interval comes from their scatter."""

ONE_UNIT = 1 + 1e-9
"""A block of one unit has no scatter to tell its error from."""

RELATIVE_WIDTH = 1.0
"""The relative width, (high - low)/value, of the interval that a block's length aims at."""


class Blocks(NamedTuple):
    """Averages over blocks of consecutive rows; arrays have a value for each block."""

    of_row: NDArray[np.intp]
    """The block of each row."""
    noise_trace: Array
    """S: the average of tr(Σ). Each step's moments are divided by the trailing |g|²."""
    grad_sq_norm: Array
    """Q: the average of |G|², divided in the same way."""
    covariance: tuple[Array, Array, Array]
    """v_SS, v_SQ and v_QQ of the two averages, from the scatter of the units."""
    units: Array
    """n = (Σv)²/Σv², where v = w·|g|² is the influence of a unit on S and on Q.

    n units of equal influence would err as much. It is 1 if one unit rules the block.
    """
    measured: float
    """The number of units in all blocks."""

    @classmethod
    def of(cls, rows: Rows, batch_size: Array, steps: Array) -> Blocks:
        """Divide a run into as many blocks as its noise allows.

        The weight of a row within its block is the number of its examples, however many of its
        steps were measured. Rows without a measured step do not count. The length of the blocks
        comes from the scatter of single rows over the whole run. It does not depend on which blocks
        are resolved: this would favour blocks that read low by luck.
        """
        block = _of_equal_units(rows, _number(rows, batch_size))
        rows = rows.standing_for(steps * batch_size)

        def total(values: Array) -> Array:
            return np.bincount(block, weights=values).astype(np.float64)

        weight = np.maximum(total(rows.weight), 1e-300)
        s, q = total(rows.noise_trace) / weight, total(rows.grad_sq_norm) / weight
        ds, dq = (of_row - of[block] for of_row, of in zip(rows.means, (s, q), strict=True))
        units = _units(rows, batch_size, total)
        scatter = (
            rows.noise_trace_squares + rows.sq_weight * ds * ds,
            rows.products + rows.sq_weight * ds * dq,
            rows.grad_sq_norm_squares + rows.sq_weight * dq * dq,
        )
        left = weight**2 * np.maximum(1 - 1 / units, 1e-300)
        ss, sq, qq = (total(squares) / left for squares in scatter)
        return cls(block, s, q, (ss, sq, qq), units, float(rows.units.sum()))

    def intervals(self, confidence: float) -> tuple[Array, Array, Array]:
        """Return the noise scale S/Q of each block with Fieller's interval.

        The value is NaN where Q is not positive. If few units rule a block, its interval is 0 to
        infinity, see `quantile_of`.
        """
        quantiles = quantile_of(self.units, confidence, self.measured)
        covariances = zip(*self.covariance, strict=True)
        low, high = np.zeros_like(self.units), np.full_like(self.units, math.inf)
        for k, (covariance, quantile) in enumerate(zip(covariances, quantiles, strict=True)):
            if math.isfinite(quantile):
                s, q = float(self.noise_trace[k]), float(self.grad_sq_norm[k])
                low[k], high[k] = fieller_interval(s, q, map(float, covariance), float(quantile))
        ratio = self.noise_trace / np.where(self.grad_sq_norm > 0, self.grad_sq_norm, math.nan)
        value = np.where(self.units > ONE_UNIT, ratio.clip(low, high), math.nan)
        return value, low, high

    def progress(self, batch_size: Array) -> tuple[Array, Array]:
        """Return the progress of a step in each row, and its standard error within the block.

        At noise scale b and batch size B the progress of a step, as a share of the progress of a
        noise-free step, is

            p = 1/(1 + b/B) = B·Q/(B·Q + S)

        The denominator is B times the mean |g|². It scatters little and is positive. So p is nearly
        linear in Q: it is nearly unbiased and normal, even where the ratio b is not. Values of p
        may be negative, and can be averaged and summed. The remaining bias, of second order in the
        covariance, is subtracted.
        """
        block = self.of_row
        s, q = self.noise_trace[block], self.grad_sq_norm[block]
        ss, sq, qq = (entry[block] for entry in self.covariance)
        # |g|² can be no smaller than its noise; of few steps it may come out so.
        sq_norm = np.maximum(batch_size * q + s, 0.1 * np.abs(s) + 1e-300)
        bias = (
            batch_size * q * ss + batch_size * (batch_size * q - s) * sq - batch_size**2 * s * qq
        ) / sq_norm**3
        variance = np.maximum(q**2 * ss - 2 * q * s * sq + s**2 * qq, 0.0)
        error = batch_size / sq_norm**2 * np.sqrt(variance)
        known = self.units[block] > ONE_UNIT
        return batch_size * q / sq_norm - np.where(known, bias, 0.0), np.where(
            known, error, math.inf
        )


def quantile_of(units: Array | float, confidence: float, measured: float) -> Array:
    """Return how many standard errors the interval of a weighted mean reaches on either side.

    Let r be the residuals of the units at a supposed mean, each times its weight. The interval has
    all means at which the sum of the residuals agrees with its own squares,

        (Σr)² <= x²·Σr²

    with Student's quantile x for all units of the run. In standard errors this is

        x·√((n - 1)/(n - x²))

    It is infinite up to n = x²: so few units say nothing. Student's t takes the error as
    independent of the mean. Where few units rule a sum they rule its error, too, and the ratio is
    near 1. So the interval holds for any symmetric residuals, also of very different variances.
    Student's t with the degrees of freedom that are left then, often only one, is several times
    wider.

    Args:
        units: n, the number of units of equal influence.
        confidence: Coverage of the interval.
        measured: The number of units in the run.

    Examples:
        >>> quantile_of(np.array([3.0, 8.0, 30.0]), 0.95, measured=40).round(2)
        array([ inf, 2.71, 2.14])

    References:
        Efron 1969, "Student's t-test under symmetry conditions", JASA 64.
    """
    square = float(stdtrit(max(measured - 1, 1.0), 0.5 + confidence / 2)) ** 2
    least = np.maximum(units, math.nextafter(square, math.inf))
    wider = np.sqrt(square * (1 + (square - 1) / (least - square)))
    return np.where(np.asarray(units) > square, wider, math.inf)


def _units(rows: Rows, batch_size: Array, total: Callable[[Array], Array]) -> Array:
    """Return n = (Σv)²/Σv² of each block, see `Blocks.units`."""
    noise, signal = rows.means
    mean = signal + noise / batch_size
    squares = (
        rows.noise_trace_squares / batch_size**2
        + 2 * rows.products / batch_size
        + rows.grad_sq_norm_squares
        + rows.sq_weight * mean**2
    )
    return np.maximum(total(rows.weight * mean) ** 2 / np.maximum(total(squares), 1e-300), 1.0)


def _of_equal_units(rows: Rows, number: int) -> NDArray[np.intp]:
    """Return the block of each row. Blocks are consecutive rows, with about equally many units."""
    middle = np.cumsum(rows.units) - rows.units / 2
    total = rows.units.sum()
    wanted = np.minimum(middle * number / total, number - 1).astype(np.intp)
    # Rows that nothing was measured in belong to a block where something was.
    measured = np.unique(wanted[rows.units > 0])
    return np.asarray(np.minimum(np.searchsorted(measured, wanted), len(measured) - 1))


def _number(rows: Rows, batch_size: Array) -> int:
    """Return the number of blocks whose intervals are expected to have `RELATIVE_WIDTH`.

    The expectation comes from the noise of the whole run, see `steps_needed`. There are two blocks
    at least, if each has `FEWEST_UNITS`: late units are few and stand for many steps each. If some
    of them rule the second block, the first one still has its own interval.
    """
    measured = rows.units > 0
    rows = rows.standing_for(rows.units * batch_size)
    units, weight = float(rows.units.sum()), float(rows.weight.sum())
    of_halves = np.bincount(_of_equal_units(rows, 2), weights=rows.units)
    least = len(of_halves) if of_halves.min() >= FEWEST_UNITS else 1
    s, q = float(rows.noise_trace.sum()) / weight, float(rows.grad_sq_norm.sum()) / weight
    if s <= 0 or q <= 0:
        return least
    # Squares of q·S - s·Q, which is zero on average, within rows.
    inner = (
        q**2 * rows.noise_trace_squares
        - 2 * q * s * rows.products
        + s**2 * rows.grad_sq_norm_squares
    )
    unit_weight, (noise, signal) = rows.unit_weight[measured], rows.means
    between = np.diff((q * noise - s * signal)[measured])
    # A unit of batch size B has the variance C/B; both sums estimate C.
    precision = (rows.weight * batch_size)[measured] / unit_weight
    pairs = precision[1:] * precision[:-1] / (precision[1:] + precision[:-1])
    counted = float((rows.units[measured] - 1).sum()) + len(between)
    if not counted:
        return least
    spread = float((inner[measured] / unit_weight).sum() + (pairs * between**2).sum()) / counted
    cv_squared = spread / (weight / units) / (s * q) ** 2
    needed = max(steps_needed(cv_squared, RELATIVE_WIDTH), FEWEST_UNITS)
    return int(np.clip(units // needed, least, min(MOST_BLOCKS, int(measured.sum()))))
