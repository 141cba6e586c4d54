# SPDX-License-Identifier: Apache-2.0
"""Average the rows of a run in blocks. Noisier runs get longer blocks."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from noisescale.estimation.ratio_interval import LEAST_FREEDOM, WeightedMeans, steps_needed
from noisescale.history.rows import Array, Rows

MOST_BLOCKS = 32
"""The largest number of blocks. More blocks would only show more noise."""

FEWEST_UNITS = 8
"""The fewest steps in a block: its interval comes from their scatter."""

RELATIVE_WIDTH = 1.0
"""The relative width, (high - low)/value, of the interval that a block's length aims at."""


class Blocks(NamedTuple):
    """Averages over blocks of consecutive rows; arrays have a value for each block."""

    of_row: NDArray[np.intp]
    """The block of each row."""
    means: list[WeightedMeans]
    """S and Q: the averages of tr(Σ) and |G|². Each step's moments are divided by trailing |g|²."""
    freedom: Array
    """Degrees of freedom of the covariance of S and Q; 0 where it is not known."""

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
        sq_weight = rows.sq_weight
        squares = (
            total(rows.noise_trace_squares + sq_weight * ds * ds),
            total(rows.products + sq_weight * ds * dq),
            total(rows.grad_sq_norm_squares + sq_weight * dq * dq),
        )
        columns = {
            "noise_trace": s,
            "grad_sq_norm": q,
            "weight": np.ones_like(weight),
            "scatter": (squares / weight**2).T,
            "sq_weight": total(sq_weight) / weight**2,
            "fourth_weight": total(rows.weight * rows.unit_weight**3) / weight**4,
        }
        of_blocks = zip(*(column.tolist() for column in columns.values()), strict=True)
        means = [WeightedMeans(**dict(zip(columns, x, strict=True))) for x in of_blocks]
        ruling = _ruling_units(rows, batch_size, total) - 1
        known = np.maximum([mean.freedom for mean in means], 0.0)
        freedom = np.minimum(known, np.maximum(ruling, 1.0))
        return cls(block, means, freedom)

    def intervals(self, confidence: float) -> tuple[Array, Array, Array]:
        """Return the noise scale S/Q of each block with Fieller's interval.

        The value is NaN where Q is not positive. If the scatter is not known, as in a block of one
        unit, the interval is 0 to infinity and the value is NaN.
        """
        found = [
            mean.ratio_interval(confidence, freedom)
            for mean, freedom in zip(self.means, self.freedom.tolist(), strict=True)
        ]
        value, low, high = np.array(found).T
        return np.where(self.freedom > LEAST_FREEDOM, value, math.nan), low, high

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
        s, q = np.array([(mean.noise_trace, mean.grad_sq_norm) for mean in self.means])[block].T
        ss, sq, qq = np.array([mean.covariance for mean in self.means])[block].T
        # |g|² can be no smaller than its noise; of few steps it may come out so.
        sq_norm = np.maximum(batch_size * q + s, 0.1 * np.abs(s) + 1e-300)
        bias = (
            batch_size * q * ss + batch_size * (batch_size * q - s) * sq - batch_size**2 * s * qq
        ) / sq_norm**3
        variance = np.maximum(q**2 * ss - 2 * q * s * sq + s**2 * qq, 0.0)
        error = batch_size / sq_norm**2 * np.sqrt(variance)
        known = self.freedom[block] > LEAST_FREEDOM
        return batch_size * q / sq_norm - bias, np.where(known, error, math.inf)


def _ruling_units(
    rows: Rows, batch_size: Array, total: Callable[[Array], Array]
) -> NDArray[np.float64]:
    """Return (Σv²)²/Σv⁴ of each block. v = w·|g|² is the influence of a unit on S and on Q.

    At a jump of |g|² few steps dominate the average and its error. The fourth powers within a row
    are not known: (Σv)²/Σv² of its steps are assumed to dominate. One degree of freedom is left.
    """
    noise, signal = rows.means
    mean = signal + noise / batch_size
    squares = (
        rows.noise_trace_squares / batch_size**2
        + 2 * rows.products / batch_size
        + rows.grad_sq_norm_squares
        + rows.sq_weight * mean**2
    )
    fourths = squares**3 / np.maximum((rows.weight * mean) ** 2, 1e-300)
    return np.asarray(total(squares) ** 2 / np.maximum(total(fourths), 1e-300))


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

    The expectation comes from the noise of the whole run, see `steps_needed`.
    """
    measured = rows.units > 0
    rows = rows.standing_for(rows.units * batch_size)
    units, weight = float(rows.units.sum()), float(rows.weight.sum())
    s, q = float(rows.noise_trace.sum()) / weight, float(rows.grad_sq_norm.sum()) / weight
    if s <= 0 or q <= 0:
        return 1
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
        return 1
    spread = float((inner[measured] / unit_weight).sum() + (pairs * between**2).sum()) / counted
    cv_squared = spread / (weight / units) / (s * q) ** 2
    needed = max(steps_needed(cv_squared, RELATIVE_WIDTH), FEWEST_UNITS)
    rows_measured = int(measured.sum())
    return int(np.clip(units // needed, 1, min(MOST_BLOCKS, rows_measured)))
