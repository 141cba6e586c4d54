# SPDX-License-Identifier: Apache-2.0
"""Where a run's batch size stands against the critical one, and the verdict that follows."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from scipy.stats import norm

from noisescale.bounded import Bounded

Verdict = Literal["larger", "keep", "smaller", "keep_or_larger", "keep_or_smaller", "unknown"]

APART = 3.0
"""A batch is too small below a third of the critical batch size, where doubling it leaves at most
0.625 of the steps. It is too large above three times that, where halving it saves at least 37 % of
the examples."""

ONE, PAIR = 0.75, 0.9
"""A verdict needs a larger probability than this: one of three, or one of two that border. At 0.7
more runs have one of three, but one in eleven was wrong, see benchmarks/prediction/verdicts."""

LIKELY = 0.8
"""The share of runs in which a likely range held."""

LITTLE = 1.25
"""What another batch size may cost: examples if it is larger, steps if it is smaller."""

MOST_DOUBLINGS = 3
"""Doublings or halvings to the farthest batch size that is suggested."""


@dataclass(frozen=True)
class Position:
    """The run's batch size B against the critical one, c.

    To the result of a run of S steps at batch sizes B_i, a constant batch size B' takes

        S(B')/S = (1 + c/B')·mean(1/(1 + c/B_i))      E(B')/E = B'/mean(B_i)·S(B')/S

    The uncertainty of c is that of two halves of log-normal distributions, which meet at the value
    and end at the bounds. If c has no upper bound, half of the probability lies somewhere above the
    value. If c has no value, its bounds alone decide.
    """

    batch_size: float
    """The run's batch size: the last one, if it changed along the run."""
    critical: Bounded
    """The value is NaN or infinite if the critical batch size is not resolved."""
    at_end: bool = False
    """Whether `critical` is of the run's end, as that of the whole run is not resolved."""
    course: Sequence[tuple[float, float]] = ()
    """The batch sizes of the run, each with its steps. Default: `batch_size` alone."""
    confidence: float = 0.95
    """The coverage of the bounds of `critical`."""
    scatter: float = 1.0
    """What is known of the errors of `critical`: their standard deviation in real runs, over the
    one that the bounds tell of."""
    young: bool = False
    """Whether the run is so young that a smaller batch size cannot be told to be better."""

    @property
    def resolved(self) -> bool:
        """Whether the critical batch size has a value and an upper bound."""
        return math.isfinite(self.critical.value) and math.isfinite(self.critical.high)

    @property
    def has_value(self) -> bool:
        """Whether the critical batch size has a value."""
        return math.isfinite(self.critical.value)

    def chance_above(self, batch_size: float) -> float:
        """Return the probability that the critical batch size is above one; NaN if not known."""
        low, value, high = self.critical.low, self.critical.value, self.critical.high
        if not self.has_value:
            return 1.0 if batch_size < low else 0.0 if batch_size >= high else math.nan
        if batch_size == value or (batch_size > value and math.isinf(high)):
            return 0.5
        if value == 0:
            return 0.0 if batch_size >= high else 0.5
        end = low if batch_size < value else high
        if end == value:
            return float(batch_size < value)
        if end == 0:
            return 0.5
        deviation = abs(math.log(end / value)) / norm.ppf((1 + self.confidence) / 2)
        return float(norm.sf(math.log(batch_size / value) / deviation))

    @property
    def verdict(self) -> Verdict:
        """What to do with the batch size, as far as the run can tell."""
        larger = self.chance_above(APART * self.batch_size)
        not_smaller = self.chance_above(self.batch_size / APART)
        if larger > ONE:
            return "larger"
        if 1 - not_smaller > ONE:
            return "keep_or_smaller" if self.young else "smaller"
        if not_smaller - larger > ONE:
            return "keep"
        best = max((not_smaller, "keep_or_larger"), (1 - larger, "keep_or_smaller"), key=_first)
        return best[1] if best[0] > PAIR else "unknown"  # type: ignore[return-value]  # one of both

    @property
    def suggested_size(self) -> float:
        """The batch size to train with: the run's own times a power of two.

        It is the largest that costs at most 1.25 times the examples, or the smallest that costs at
        most 1.25 times the steps.
        """
        own, verdict = self.batch_size, self.verdict
        if verdict not in ("larger", "smaller"):
            return own
        c = self.critical.value if self.has_value else self.critical.low
        if math.isnan(c) or (verdict == "smaller" and not self.has_value):
            c = self.critical.high
        doublings = range(1, MOST_DOUBLINGS + 1)
        if verdict == "larger":
            sizes = [own * 2.0**k for k in doublings]
            cheap = [size for size in sizes if size + c <= LITTLE * (own + c)]
        else:
            sizes = [own / 2.0**k for k in doublings]
            cheap = [size for size in sizes if 1 + c / size <= LITTLE * (1 + c / own)]
        return cheap[-1] if cheap else sizes[0]

    @property
    def likely(self) -> Bounded:
        """The range that the critical batch size is likely in: so it was in four of five runs."""
        low, value, high = self.critical.low, self.critical.value, self.critical.high
        if not self.has_value:
            return self.critical
        nominal = norm.ppf((1 + LIKELY) / 2) / norm.ppf((1 + self.confidence) / 2)
        share = self.scatter * float(nominal)
        if value == 0:
            return Bounded(0.0, 0.0, high * min(share, 1.0))
        return Bounded(value, value * (low / value) ** share, value * (high / value) ** share)

    def steps(self, batch_size: float, critical: Bounded | None = None) -> Bounded:
        """Return the steps at a batch size, divided by the run's.

        Args:
            batch_size: Any batch size.
            critical: The critical batch size; `likely` for the likely range. Default: with its
                bounds.
        """
        course = self.course or ((self.batch_size, 1.0),)
        taken = sum(steps for _, steps in course)

        def ratio(c: float) -> float:
            if math.isinf(c):
                return sum(steps * size for size, steps in course) / taken / batch_size
            return (1 + c / batch_size) * sum(n * size / (size + c) for size, n in course) / taken

        return _map(ratio, self.critical if critical is None else critical)

    def examples(self, batch_size: float, critical: Bounded | None = None) -> Bounded:
        """Return the examples at a batch size, divided by the run's."""
        course = self.course or ((self.batch_size, 1.0),)
        mean = sum(size * n for size, n in course) / sum(n for _, n in course)
        return self.steps(batch_size, critical) * (batch_size / mean)


def _first(pair: tuple[float, str]) -> float:
    return -math.inf if math.isnan(pair[0]) else pair[0]


def _map(of: Callable[[float], float], band: Bounded) -> Bounded:
    """Return the band of a monotonic function."""
    ends = of(band.low), of(band.high)
    value = of(band.value) if math.isfinite(band.value) else math.nan
    return Bounded(value, min(ends), max(ends))
