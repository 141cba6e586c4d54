# SPDX-License-Identifier: Apache-2.0
"""Whether the rows of a batch are more alike than rows of different batches.

What is measured within one batch takes its rows as independent draws. If rows share a draw (a time,
a mask, negatives, a class, neighbours of a buffer), the noise within a batch is less than the noise
between batches, and the noise scale is too low. Two statistics show that without another pass:

1. R = |g_t - g_(t-1)|²/2 over the variance of g by the halves of the batch, at some coordinates of
   the gradient. It is 1 where rows are independent, and 1/ρ if they hold a share ρ of the noise. At
   the edge of stability gradients alternate, and R exceeds 1 at a lag of one step far more than at
   a lag of two. A shared draw does so at both lags alike.
2. The intraclass correlation of log|dL/dz_i|, z_i a row at the cut: the variance between steps
   beyond that of means of rows, as a share of the whole. Training moves the mean: of a
   convolutional network at its best learning rate (AdamW, .03) so far in 15 steps that the
   correlation was .07, at least .02. So steps that are apart must show more than successive ones,
   which are measured once steps that are apart show a little. Neighbours of a shuffle buffer are
   seen in steps that are apart alone.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.special import chdtri, stdtrit

Array = NDArray[np.float64]

LOOKS = (30, 100, 300, 1000, 3000, 10_000)
"""Numbers of measured steps at which the statistics are looked at: each look may be wrong once."""

BY_CHANCE = 1e-4
"""The probability that a bound is wrong by chance."""

LEAST_RATIO = 1.25
"""The R above which rows are alike."""

MOVED_RATIO = 2.0
"""The R above which weights may move so far that the cut shows nothing, however uncertain R is."""

FEWEST = 20
"""Measured steps that R needs: some fewer than those of the first look, which it lags behind."""

LAGS_ALIKE = (0.85, 1.5)
"""(R - 1) at a lag of two steps over that at a lag of one, where rows share draws.

It was 0.2 to 0.8 in trainings at the edge of stability, whose mean gradient turns at each step.
"""

CERTAIN = 0.25
"""The lower bound of R - 1 as a share of R - 1, below which R is too uncertain to be judged."""

LEAST_CORRELATION, LEAST_APART = 0.01, 0.1
"""The intraclass correlation above which rows are alike, by successive steps and by others."""


LEAST_VARIANCE = 1e-6
"""The variance of log|dL/dz_i| within batches below which rounding decides."""


class Similarity(NamedTuple):
    """How alike rows are."""

    ratio: float
    """R; NaN if it is not known."""
    ratio_low: float
    """The lower bound of R."""
    lags: float
    """(R - 1) at a lag of two steps over that at a lag of one."""
    correlation: float
    """The intraclass correlation; NaN if it is not known."""
    correlation_low: float
    """The lower bound of the intraclass correlation."""
    apart: float = math.nan
    """The intraclass correlation by measured steps that do not follow each other."""
    apart_low: float = math.nan
    """The lower bound of this one."""

    @property
    def by_steps(self) -> bool:
        """Whether gradients of different steps show that rows are alike."""
        certain = self.ratio_low - 1 > CERTAIN * (self.ratio - 1)
        return self.ratio_low > LEAST_RATIO and certain and self._lags_alike

    @property
    def moves(self) -> bool:
        """Whether gradients may differ between steps as the weights move.

        As one lag is unlike the other, or R is large and uncertain. The gradients at the cut then
        differ between steps, too, whatever the rows are.
        """
        differ = self.ratio_low > LEAST_RATIO or self.ratio > MOVED_RATIO
        return differ and not self.by_steps

    @property
    def _lags_alike(self) -> bool:
        return LAGS_ALIKE[0] < self.lags < LAGS_ALIKE[1]

    @property
    def by_rows(self) -> bool:
        """Whether gradients at the cut show that rows are alike."""
        shown = self.correlation_low > LEAST_CORRELATION or self.apart_low > LEAST_APART
        return shown and not self.moves

    @property
    def suspected(self) -> bool:
        """Whether successive steps are to tell if rows are alike, or if weights move."""
        return self.apart_low > LEAST_CORRELATION and not self.moves

    @property
    def shown(self) -> bool:
        """Whether rows are alike."""
        return self.by_steps or self.by_rows


class RowSimilarity:
    """Collects what shows how alike rows are.

    Examples:
        >>> rng = np.random.default_rng(0)
        >>> rows = RowSimilarity()
        >>> for _ in range(100):
        ...     shared, own = rng.normal(), rng.normal(size=16)
        ...     of_rows = 0.5 * shared + own
        ...     rows.add_rows(16, of_rows.mean(), of_rows.var(ddof=1))
        >>> f"{rows.look().correlation:.1f}", rows.look().by_rows
        ('0.2', True)
    """

    def __init__(self) -> None:
        self._rows: list[tuple[float, float, float, float, int]] = []
        self._gaps = 0
        self._steps: list[tuple[float, float, float]] = []
        self._compared = 0
        """Measured steps that were compared with those after them, whatever came of it."""
        self._looked = 0

    def add_rows(self, number: float, mean: float, variance: float, *, size: float = 0.0) -> None:
        """Add the number of rows of a step, and the mean and variance of log|dL/dz_i| of them.

        Only steps of one `size` are compared: a mean over a short batch has the gradient of each
        row larger.
        """
        if number >= 2 and math.isfinite(mean) and math.isfinite(variance):
            self._rows.append((number, mean, variance, size, self._gaps))

    def add_gap(self) -> None:
        """Note that the step before and the next one that is added do not follow each other."""
        self._gaps += 1

    def add_steps(self, within: float, next_step: float, second_step: float) -> None:
        """Add |g_s|², and half of |Δg|² to the next step and to the one after it."""
        self._compared += 1
        if all(map(math.isfinite, (within, next_step, second_step))):
            self._steps.append((within, next_step, second_step))

    @property
    def is_due(self) -> bool:
        """Whether the numbers have become enough for another look since the last one."""
        due = sum(self._compared >= look for look in LOOKS)
        if due <= self._looked:
            return False
        self._looked = due
        return True

    def look(self) -> Similarity:
        """Return how alike rows are, by all numbers so far."""
        return Similarity(*self._ratio(), *self._correlation(), *self._correlation(apart=True))

    def _ratio(self) -> tuple[float, float, float]:
        n = len(self._steps)
        if n < FEWEST:
            return math.nan, math.nan, math.nan
        within, first, second = np.array(self._steps, dtype=np.float64).T
        mean = within.mean()
        if mean <= 0:
            return math.nan, math.nan, math.nan
        ratio, later = first.mean() / mean, second.mean() / mean
        # Successive windows share gradients: blocks of three are nearly independent.
        left = _blocks(first - ratio * within) / mean
        error = math.sqrt(left.var(ddof=1) / len(left))
        low = ratio - float(stdtrit(len(left) - 1, 1 - BY_CHANCE)) * error
        return float(ratio), float(low), float((later - 1) / (ratio - 1))

    def _correlation(self, *, apart: bool = False) -> tuple[float, float]:
        if len(self._rows) < LOOKS[0]:
            return math.nan, math.nan
        number, mean, variance, size, gaps = np.array(self._rows, dtype=np.float64).T
        compared = (np.diff(size) == 0) & ((np.diff(gaps) > 0) == apart)
        differences = np.diff(mean)[compared]
        n = len(differences)
        if n < LOOKS[0] // 2 - 1:
            return math.nan, math.nan
        of_means, within = (variance / number).mean(), variance.mean()
        if within < LEAST_VARIANCE:
            return math.nan, math.nan
        between = float((differences**2).mean() / 2)
        # Successive differences share means: von Neumann's count of what is independent.
        freedom = 2 * n**2 / (2 * n + (compared[1:] & compared[:-1]).sum())
        low = between * freedom / float(chdtri(freedom, BY_CHANCE))
        return _share(between - of_means, within), _share(low - of_means, within)


def _share(between: float, within: float) -> float:
    return float(between / (between + within)) if between + within > 0 else math.nan


def _blocks(values: Array, length: int = 3) -> Array:
    whole = len(values) // length * length
    return np.asarray(values[:whole].reshape(-1, length).mean(1))
