# SPDX-License-Identifier: Apache-2.0
"""How much faster one submission was than another, with bounds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from scipy.special import log_ndtr, ndtri, stdtrit

from noisescale.bounded import UNKNOWN, Bounded
from noisescale.lab.compare.outcomes import Outcome, middle
from noisescale.tradeoff.profile import STEPS_SCATTER

OWN_SCATTER = 3
"""A submission with this many repetitions shows how much its times scatter."""


def speed_up_of(
    ours: Sequence[Outcome], theirs: Sequence[Outcome], clock: str, confidence: float
) -> Bounded:
    """Return how many times as fast ours is as theirs.

    The bounds come from the scatter of seeds and from the measurement before the one that reached
    the goal.
    """
    our, their = middle(ours, clock), middle(theirs, clock)
    margin = _margin(ours, theirs, clock, confidence)
    if our.reached is None and their.reached is None:
        return UNKNOWN
    if not (our.at(clock) and their.at(clock)):  # There is no ratio to a time of 0.
        return UNKNOWN
    our_least, their_least = (_middle_after(of, clock) for of in (ours, theirs))
    low = their_least / margin / our.at(clock)
    high = margin * their.at(clock) / our_least if our_least else math.inf
    both = our.reached is not None and their.reached is not None
    if not low and math.isinf(high):
        return UNKNOWN
    return Bounded(their.at(clock) / our.at(clock) if both else math.nan, low, high)


def _middle_after(outcomes: Sequence[Outcome], clock: str) -> float:
    """Return what the middle time is above: the middle of what each time is above, see `middle`.

    Repetitions that missed the goal need not have been trained equally far.
    """
    return sorted(outcome.after(clock) for outcome in outcomes)[len(outcomes) // 2]


def _margin(
    ours: Sequence[Outcome], theirs: Sequence[Outcome], clock: str, confidence: float
) -> float:
    """Return the factor by which seeds alone may change the ratio of two times.

    Trainings of one setting scatter by `STEPS_SCATTER`, or as the repetitions do if both
    submissions have `OWN_SCATTER` of them, or by the larger one if only one submission has. That
    holds, too, if some of them missed the goal, as these do not show all of their scatter.
    """
    sizes = [len(ours), len(theirs)]
    groups = [of for of in (ours, theirs) if len(of) >= OWN_SCATTER]
    own = [each for of in groups if (each := _scatter(of, clock)) is not None]
    missed = any(outcome.reached is None for of in groups for outcome in of)
    quantile, scatter = float(ndtri(0.5 + confidence / 2)), STEPS_SCATTER
    if own:
        squares, freedom = sum(each[0] for each in own), sum(each[1] for each in own)
        found, wider = math.sqrt(squares / freedom), float(stdtrit(freedom, 0.5 + confidence / 2))
        if (len(own) == 2 and not missed) or wider * found > quantile * scatter:
            quantile, scatter = wider, found
    means, variances = zip(*map(_normal_middle, sizes), strict=True)
    spread, shift = math.sqrt(sum(variances)), abs(means[0] - means[1])
    return math.exp(scatter * (quantile * spread + shift))


def _scatter(outcomes: Sequence[Outcome], clock: str) -> tuple[float, int] | None:
    """Return the sum of squares of the times' logarithms around their mean, and its freedom.

    Of n repetitions k reached the goal. What missed it counts with the time that it is above, which
    is too short: n/k of the squares make up for that. With the scatter of the k alone, or an
    assumed one, speed-ups of equal submissions would be sure in up to 57 % of comparisons (scatter
    0.8, 8 repetitions, a budget that 70 % reach) instead of 4 % at most. None if all missed it.
    """
    times = [outcome.at(clock) for outcome in outcomes]
    reached = sum(map(math.isfinite, times))
    known = [
        t if math.isfinite(t) else o.after(clock) for t, o in zip(times, outcomes, strict=True)
    ]
    logs = np.log([time for time in known if time > 0])
    if not reached or len(logs) < 2:
        return None
    squares = float(((logs - logs.mean()) ** 2).sum())
    return squares * len(outcomes) / reached, len(logs) - 1


@lru_cache
def _normal_middle(size: int) -> tuple[float, float]:
    """Return mean and variance of the `middle` of standard normal numbers.

    Of an even number it is the slower one in the middle, so its mean is above zero.
    """
    z, slower = np.linspace(-9, 9, 2001), size - size // 2 - 1
    logs = (size // 2) * log_ndtr(z) + slower * log_ndtr(-z) - z**2 / 2
    weights = np.exp(logs - logs.max())
    mean = float(np.average(z, weights=weights))
    return mean, float(np.average((z - mean) ** 2, weights=weights))
