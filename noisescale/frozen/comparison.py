# SPDX-License-Identifier: Apache-2.0
"""Two estimates of tr(Σ) as a ratio, and what it says of a way to measure or of the batches."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from scipy.special import stdtrit

from noisescale.bounded import Bounded
from noisescale.estimation.ratio_interval import fieller_interval

TOLERANCE = 1.25
"""A ratio up to this factor, or down to one over it, does no harm: the noise scale then is within
the bounds that any run gives it."""

_NEAR = 1.1
"""A ratio whose bounds are all farther than this from 1 is no chance."""

_FEWEST = 5

Judgement = Literal["yes", "probably", "unknown", "probably not", "no"]


@dataclass(frozen=True)
class Comparison:
    """An estimate of tr(Σ) over another one."""

    ratio: Bounded
    batches: int
    """How many batches both are of."""

    @property
    def judgement(self) -> Judgement:
        """Whether the ratio is near enough to 1, as far as its bounds tell.

        Examples:
            >>> Comparison(Bounded(1.02, 0.95, 1.1), 50).judgement
            'yes'
            >>> Comparison(Bounded(0.4, 0.35, 0.47), 50).judgement
            'no'
        """
        low, high = self.ratio.low, self.ratio.high
        if low >= 1 / TOLERANCE and high <= TOLERANCE:
            return "yes"
        if high < 1 / TOLERANCE or low > TOLERANCE:
            return "no"
        if 1 / TOLERANCE <= self.ratio.value <= TOLERANCE:
            return "probably"
        return "probably not" if high < 1 / _NEAR or low > _NEAR else "unknown"

    @property
    def decided(self) -> bool:
        """Whether more batches would not change the judgement."""
        return self.judgement in ("yes", "no")


@dataclass(frozen=True)
class Way:
    """A way of measuring in training, judged by independent batches."""

    name: str
    """"half", "micro_batch" or "rank"."""
    comparison: Comparison | None
    """tr(Σ) by this way, over that of independent batches, is near 1. None: nothing is measured."""
    reason: str = ""
    """Why it measures nothing, or is right without a comparison."""
    by_construction: bool = False
    """Whether it compares what was compared here."""

    @property
    def judgement(self) -> Judgement:
        """Whether it measures right."""
        if self.comparison is not None:
            return self.comparison.judgement
        return "yes" if self.by_construction else "no"


@dataclass(frozen=True)
class Order:
    """Whether the batches of the loader are independent draws."""

    at_random: bool
    """Whether a sampler of torch draws each example at random."""
    successive: Comparison | None = None
    """tr(Σ) of two successive batches over that of all of them. None if drawn at random."""
    shuffled: Comparison | None = None
    """tr(Σ) of the loader's batches over that of shuffled ones, where that was measured."""
    near: Comparison | None = None
    """tr(Σ) of the first batches over that of batches far on in a stream, by all before them."""

    @property
    def independent(self) -> bool:
        """Whether successive batches are as far apart as others, as far as can be told."""
        if self.near is not None and self.near.judgement == "no":
            return False
        return self.successive is None or self.successive.judgement not in ("no", "probably not")


def compare(
    some: Sequence[float],
    others: Sequence[float],
    confidence: float = 0.95,
    *,
    of_same: bool = True,
) -> Comparison:
    """Return the mean of `some` over that of `others`.

    Args:
        some: Values of tr(Σ), one of each batch.
        others: Other values of it.
        confidence: Coverage of the bounds.
        of_same: Whether both are of the same batches, in the same order.

    Examples:
        >>> compare([1.0, 1.1, 0.9, 1.0, 1.0], [1.0, 1.0, 1.1, 0.9, 1.0]).ratio.value
        1.0
    """
    fewest = min(len(some), len(others))
    if fewest < _FEWEST:
        return Comparison(Bounded(math.nan, 0.0, math.inf), fewest)
    mean, other = float(np.mean(some)), float(np.mean(others))
    a, b = (float(np.var(x, ddof=1)) / len(x) for x in (some, others))
    together = float(np.cov(some, others)[0, 1]) / fewest if of_same else 0.0
    quantile = float(stdtrit(fewest - 1, 0.5 + confidence / 2))
    low, high = fieller_interval(mean, other, (a, together, b), quantile)
    value = mean / other if other > 0 else math.nan
    return Comparison(Bounded(value, low, high), fewest)
