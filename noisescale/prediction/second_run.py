# SPDX-License-Identifier: Apache-2.0
"""A second run to the same result: S_min and E_min by two equations, with no theory of noise."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.special import ndtri

from noisescale.bounded import Bounded
from noisescale.checks import check_confidence, require_positive
from noisescale.history.segments import Array, Segments
from noisescale.refusal import Refusal
from noisescale.tradeoff.profile import (
    BENDS,
    FARTHEST,
    SPREAD,
    STEPS_SCATTER,
    UNLIKELY,
    least_of,
    log_law,
    profile_of,
)

NEARLY_ALL = 0.8
"""A second run that determines B_crit to this share of the best possible one is far enough off."""

MOST_DOUBLINGS = 4
"""Doublings of the batch size, or halvings, from one run to the second."""

LARGEST_ERROR = math.log(30)
"""The width of the logarithm of B_crit at which a second run says nothing."""


@dataclass(frozen=True)
class SecondRun:
    """The critical batch size from two runs to one result.

    S(B) = S_min + E_min/B gives two equations at two batch sizes. They hold for any optimizer, as
    they contain no noise scale. The errors are the scatter of the steps, from seed to seed and
    with how finely the learning rates were tuned, and how sharply the law bends, see `SPREAD`.

    The second run needs a tuned learning rate. A rule gave it from the learning rate of the first
    run in 16 second runs: the answer was 0.1 to 0.6 of B_crit in 12 of them.

    References:
        McCandlish et al. 2018, arXiv:1812.06162, equation 2.11.
    """

    batch_sizes: tuple[float, float]
    """Batch sizes of the first run and of the second."""
    steps: tuple[float, float]
    """Steps that each run took to the result."""
    result: str
    """What the result is, as a part of a sentence."""
    scatter: float
    """Standard deviation of the logarithm of the steps."""
    critical_batch_size: Bounded
    """0 and infinite are possible values, and ends."""

    @classmethod
    def of(
        cls,
        first: Mapping[str, Array],
        second: Mapping[str, Array],
        *,
        result: str = "the ends of both runs",
        scatter: float = STEPS_SCATTER,
        confidence: float = 0.95,
    ) -> SecondRun:
        """Compare two histories, each up to the result.

        Raises:
            ValueError: If the runs are of one batch size, or of different models.
        """
        counts = [getattr(history, "parameters", math.nan) for history in (first, second)]
        if abs(counts[0] - counts[1]) > 0:  # not where one was not recorded
            raise Refusal(
                "second_run",
                "be of the same model",
                f"{counts[1]:,.0f} trained parameters, while the first run has {counts[0]:,.0f}",
                "Train the same model at another batch size.",
            )
        runs = [Segments.of(history) for history in (first, second)]
        steps = [float(run.steps.sum()) for run in runs]
        sizes = [run.mean_batch_size for run in runs]
        if max(sizes) < 1.5 * min(sizes):
            raise Refusal(
                "second_run",
                "be at another batch size",
                f"{sizes[1]:,.4g}, while the first run has {sizes[0]:,.4g} (means over the runs)",
                str(advice_on(sizes[0], math.nan)),
            )
        found = _critical_batch_size(runs, scatter, confidence)
        return cls((sizes[0], sizes[1]), (steps[0], steps[1]), result, scatter, found)

    @property
    def doubts(self) -> list[str]:
        """Reasons why the answer is open, in whole sentences, each with its remedy."""
        found, (first, second) = self.critical_batch_size, self.batch_sizes
        if found.low > 0 and math.isfinite(found.high):
            return []
        if found.low == 0 and math.isinf(found.high) and not 0 < found.value < math.inf:
            steps, others = self.steps
            return [
                f"From {first:,.4g} to {second:,.4g} the steps went from {steps:,.0f} to"
                f" {others:,.0f}, which no critical batch size explains: one of the two runs is not"
                " at its own best learning rate, or did not reach the same result."
            ]
        what = "perfect scaling" if found.low > 0 else "steps that no longer fall"
        if found.low == 0 and math.isinf(found.high):
            what = "perfect scaling as steps that do not fall"
        known = [x for x in (found.value, found.low, found.high) if 0 < x < math.inf]
        advice = advice_on(first, known[0] if known else math.nan, self.scatter)
        return [
            f"From {first:,.4g} to {second:,.4g} the steps of the two runs agree with {what},"
            f" within their scatter: the interval is open. {advice}"
        ]

    @property
    def source(self) -> str:
        """How B_crit was found, in a sentence."""
        (first, second), (steps, others) = self.batch_sizes, self.steps
        return (
            f"B_crit comes from two runs to {self.result}: {steps:,.0f} steps at {first:,.4g} and"
            f" {others:,.0f} at {second:,.4g}, which are taken to scatter by {self.scatter:.0%}."
        )


def _critical_batch_size(runs: Sequence[Segments], scatter: float, confidence: float) -> Bounded:
    """Return B_crit of two runs that made the same progress, with its interval.

    The progress is Σ steps/(1 + (B_crit/B)^α)^(1/α). The value is that of α = 1, which two runs
    cannot contradict, and the interval holds the B_crit of every α that is likely. Batch sizes may
    have changed along a run. Where no B_crit explains the steps, to within their scatter, nothing
    is known: all are possible.
    """
    check_confidence(confidence)
    require_positive("scatter", scatter, "Pass 0.15 for 15 %.")

    def misfits(log_critical: float, bends: Array) -> Array:
        progress = [
            np.exp(-log_law(log_critical - np.log(run.batch_size), bends[:, None])) @ run.steps
            for run in runs
        ]
        return np.asarray(np.log(progress[0] / progress[1]) ** 2 / 2)

    def misfit(log_critical: float) -> float:
        return float(misfits(log_critical, np.ones(1))[0])

    def bent(log_critical: float) -> float:
        return least_of(misfits(log_critical, BENDS) + scatter**2 * UNLIKELY)

    sizes = np.concatenate([run.batch_size for run in runs])
    more = (float(ndtri(0.5 + confidence / 2)) * scatter) ** 2
    found = profile_of(misfit, sizes, more, bent)
    if not 0 < found.value < math.inf:
        end = (sizes.min() / FARTHEST, sizes.max() * FARTHEST)[found.value > 0]
        if misfit(math.log(end)) > more:
            return Bounded(found.value, 0.0, math.inf)
    return found


def informative_batch_size(batch_size: float, critical: float) -> int:
    """Return the batch size of a second run that determines B_crit nearly as well as any could.

    With β = B_crit, the logarithm of the ratio of the steps at B and B' changes with log β by
    |β/(B + β) - β/(B' + β)|. The limit for a far larger B' is β/(B + β), for a
    far smaller one B/(B + β). The result is the power of two times B that is nearest to B and
    reaches the share `NEARLY_ALL` of the larger limit. It is a whole number of examples, and at
    most 16 times off: farther off, a learning rate at which the law holds may not exist. If B is
    too small for a smaller batch size, the result is a larger one.

    Examples:
        >>> informative_batch_size(32, 170), informative_batch_size(1024, 170)
        (512, 64)
    """
    share = critical / (batch_size + critical)
    if share < 0.5:
        left = share + NEARLY_ALL * (1 - share)  # of the progress that noise takes at B'
        doublings = math.floor(math.log2(critical * (1 / left - 1) / batch_size))
        smaller = batch_size * 2.0 ** max(doublings, -MOST_DOUBLINGS)
        if smaller >= 1:
            return round(smaller)
    left = (1 - NEARLY_ALL) * share
    doublings = math.ceil(math.log2(critical * (1 / left - 1) / batch_size))
    return round(batch_size * 2.0 ** min(doublings, MOST_DOUBLINGS))


def advice_on(batch_size: float, critical: float, scatter: float = STEPS_SCATTER) -> str:
    """Say at which batch size a second run determines B_crit best, in whole sentences."""
    if not 0 < critical < math.inf:
        return f"Train a second run at 16 times the batch size, {16 * batch_size:,.4g}."
    best = informative_batch_size(batch_size, critical)
    told = abs(critical / (batch_size + critical) - critical / (best + critical))
    bent = SPREAD * (_bent(critical / batch_size) - _bent(critical / best))
    error = 1.96 * math.hypot(math.sqrt(2) * scatter, bent) / told
    if error > LARGEST_ERROR:
        return (
            f"B_crit is too far from {batch_size:,.4g} for a second run within a factor of"
            f" {2**MOST_DOUBLINGS}. Measure a run at a batch size nearer to B_crit."
        )
    return (
        f"A second run at {best:,.4g} to the same result, at its own best learning rate, gives"
        f" B_crit within a factor of about {math.exp(error):.2g}."
    )


def _bent(ratio: float) -> float:
    """Return how much log S rises with log α at a ratio B_crit/B, at α = 1."""
    return ratio * math.log(ratio) / (1 + ratio) - math.log1p(ratio)
