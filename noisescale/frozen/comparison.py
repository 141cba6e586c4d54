# SPDX-License-Identifier: Apache-2.0
"""Two estimates of tr(Σ) as a ratio, and what it says of a way to measure or of the batches."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from scipy.special import stdtrit

from noisescale.bounded import UNKNOWN, Bounded
from noisescale.estimation.ratio_interval import fieller_interval

TOLERANCE = 1.25
"""A ratio up to this factor, or down to one over it, does no harm: the noise scale then is within
the bounds that any run gives it."""

_NEAR = 1.1
"""A ratio whose bounds are all farther than this from 1 is no chance."""

_FEWEST = 5

Judgement = Literal["yes", "probably", "unknown", "probably not", "no"]
"""Whether batches are alike."""

WayVerdict = Literal["right", "wrong", "not contradicted", "not measured"]
"""Whether a way of measuring shows the true noise scale."""


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

    def noise_scale_ratio(self, noise_scale: Bounded, batch_size: float) -> Bounded:
        """Return the noise scale that a way shows over the true one.

        The ratio ρ is that of tr(Σ) by the way over the true tr(Σ). A way infers |G|² from |g|² of
        the batch, B, less its own noise, and so finds |G|² + (1 - ρ)·tr(Σ)/B. With b = tr(Σ)/|G|²:

            b_shown/b = ρ/(1 + (1 - ρ)·b/B)

        It is infinite where no |G|² is left. The bounds are the farthest within those of ρ and b.

        Args:
            noise_scale: b with its bounds.
            batch_size: B.

        Examples:
            >>> traces = Comparison(Bounded(0.6, 0.6, 0.6), 50)
            >>> round(traces.noise_scale_ratio(Bounded(64.0, 64.0, 64.0), 8).value, 3)
            0.143
        """
        at = Bounded(*(x / batch_size for x in vars(noise_scale).values()))

        def ratio_at(ratio: float, scale: float) -> float:
            if ratio == 1:
                return 1.0
            left = 1 + (1 - ratio) * scale
            return math.inf if left <= 0 else ratio / left

        low, high = self.ratio.low, self.ratio.high
        return Bounded(
            ratio_at(self.ratio.value, at.value),
            ratio_at(low, at.high if low < 1 else at.low),
            math.inf if math.isinf(high) else ratio_at(high, at.low if high < 1 else at.high),
        )


@dataclass(frozen=True)
class Way:
    """A way of measuring in training, judged by independent batches."""

    name: str
    """"half", "micro_batch" or "rank"."""
    comparison: Comparison | None
    """tr(Σ) by this way, over that of independent batches. None: nothing is measured."""
    reason: str = ""
    """Why it measures nothing, or is right without a comparison."""
    by_construction: bool = False
    """Whether it compares what was compared here."""
    shown: Bounded = UNKNOWN
    """The noise scale that it shows over the true one."""

    @property
    def judgement(self) -> WayVerdict:
        """Whether it shows the true noise scale, as far as the bounds of what it shows say.

        Examples:
            >>> Way("half", Comparison(Bounded(1, 1, 1), 9), shown=Bounded(1, 0.7, 1.2)).judgement
            'not contradicted'
        """
        if self.comparison is None:
            return "right" if self.by_construction else "not measured"
        return verdict_on(self.shown)

    @property
    def factor(self) -> float:
        """The largest factor by which it may be wrong."""
        return max(self.shown.high, 1 / self.shown.low if self.shown.low > 0 else math.inf)


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


def verdict_on(shown: Bounded) -> WayVerdict:
    """Say whether a noise scale over the true one is right, by its bounds."""
    if shown.low >= 1 / TOLERANCE and shown.high <= TOLERANCE:
        return "right"
    is_wrong = shown.high < 1 / TOLERANCE or shown.low > TOLERANCE
    return "wrong" if is_wrong else "not contradicted"


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
