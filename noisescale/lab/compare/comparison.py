# SPDX-License-Identifier: Apache-2.0
"""Submissions compared: who reached the goal, when, how much faster, and how sure that is."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
from scipy.special import log_ndtr, ndtri, stdtrit

from noisescale.bounded import UNKNOWN, Bounded
from noisescale.checks import check_confidence, refuse, require_choice
from noisescale.history.metrics import Goal
from noisescale.lab.compare.doubts import doubts_of
from noisescale.lab.compare.measurements import CLOCKS, Trial
from noisescale.lab.compare.outcomes import Outcome, Standing, best_setting, middle, outcome_of
from noisescale.lab.compare.profiles import (
    PerformanceProfile,
    algoperf_score,
    checked_by_variants,
    performance_profile,
    speed_up,
)
from noisescale.lab.compare.swept import Swept, swept
from noisescale.tradeoff.profile import STEPS_SCATTER

OWN_SCATTER = 3
"""A submission with this many repetitions shows how much its times scatter."""


@dataclass(frozen=True, eq=False)
class Comparison:
    """Submissions compared on one or more workloads, see `compare`."""

    goals: Mapping[str, Goal]
    """Of each workload."""
    clock: str
    """One of `CLOCKS`: what times and speed-ups are counted in."""
    reference: str
    """The submission that speed-ups are over."""
    standings: tuple[Standing, ...]
    """By workload, the fastest first."""
    sweeps: tuple[Swept, ...]
    """Submissions with several batch sizes."""
    profile: PerformanceProfile | None
    """If there are several workloads, and no goal was reached at a time of 0."""
    scores: Mapping[str, float] | None
    """AlgoPerf's, where there is a profile."""
    speed_ups: Mapping[str, float]
    """How many times as fast as the reference over all workloads, in the geometric mean; NaN where
    a goal was missed and no budget says what that costs. Empty where there is no profile."""
    confidence: float
    warnings: tuple[str, ...]

    @property
    def reached(self) -> bool:
        """Whether any trial reached its goal."""
        return any(standing.reached for standing in self.standings)

    @property
    def workloads(self) -> tuple[str, ...]:
        """Names of the workloads, in the order in which they were first met."""
        return tuple(dict.fromkeys(standing.workload for standing in self.standings))

    @property
    def submissions(self) -> tuple[str, ...]:
        """Names of the submissions, the reference first."""
        names = dict.fromkeys([self.reference, *(s.submission for s in self.standings)])
        return tuple(names)

    def standings_of(self, workload: str) -> list[Standing]:
        """Return the standings on a workload, the fastest first."""
        return [standing for standing in self.standings if standing.workload == workload]

    def outcomes_of(self, workload: str) -> list[Outcome]:
        """Return the outcomes of all trials on a workload."""
        return [each for standing in self.standings_of(workload) for each in standing.outcomes]


def compare(
    trials: Iterable[Trial],
    goals: Goal | Mapping[str, Goal],
    *,
    clock: str | None = None,
    budget: Mapping[str, float] | None = None,
    reference: str | None = None,
    variants: Mapping[str, str] | None = None,
    confidence: float = 0.95,
) -> Comparison:
    """Compare the trials of submissions: when each reached its goal.

    The time of a submission is that of its best setting of hyperparameters. A setting that was
    trained several times, with other seeds, has the middle of its times; of an even number the
    slower one of both in the middle counts. If a submission has several studies, its time is the
    middle over its studies.

    A speed-up is bounded by the scatter of the repetitions, or by `STEPS_SCATTER` where there are
    few, and by the measurement before the one that reached the goal.

    Args:
        trials: With their submissions, workloads and studies.
        goals: For all workloads, or from each workload to its goal. A goal without a side falls
            if most trials began above it.
        clock: What counts: "steps", "examples", "epochs" or "seconds". Default: seconds if they
            are known of every trial that reached its goal, else steps.
        budget: See `first_reached`.
        reference: The submission that speed-ups are over. Default: that of the first trial.
        variants: From each held-out variant among the workloads to its workload.
        confidence: Coverage of bounds.

    Raises:
        ValueError: If there is no trial, a workload has no goal, a trial reached its goal after 0
            steps, the clock is not known of a trial that reached its goal, or the reference is not
            among the submissions.

    Examples:
        >>> from noisescale.lab.compare.measurements import Measurements
        >>> slow = Trial("1", Measurements([100, 390, 400], [0.9, 0.3, 0.2]), "sgd")
        >>> fast = Trial("2", Measurements([100, 195, 200], [0.9, 0.3, 0.2]), "adam")
        >>> compare([slow, fast], Goal.read("loss<=0.2")).standings[0].speed_up
        Bounded(value=2.0, low=1.28..., high=3.10...)

    References:
        Shallue et al. 2019, arXiv:1811.03600. Dahl et al. 2023, arXiv:2306.07179.
    """
    check_confidence(confidence)
    every = list(trials)
    if not every:
        refuse("trials", "have one trial at least", "none", "Give the trials to compare.")
    sided = _sided(every, goals)
    outcomes = [outcome_of(trial, sided[trial.workload], budget) for trial in every]
    clock = _clock(outcomes, clock)
    submissions = list(dict.fromkeys(trial.submission for trial in every))
    reference = submissions[0] if reference is None else reference
    if reference not in submissions:
        names = ", ".join(submissions)
        refuse("reference", f"be one of {names}", repr(reference), "Check its name.")
    groups: dict[str, dict[str, list[Outcome]]] = defaultdict(lambda: defaultdict(list))
    for outcome in outcomes:
        groups[outcome.trial.workload][outcome.trial.submission].append(outcome)
    standings = [
        standing
        for workload, of in groups.items()
        for standing in _standings(workload, of, clock, reference, confidence)
    ]
    found = [
        swept(submission, workload, each, confidence)
        for workload, of in groups.items()
        for submission, each in of.items()
    ]
    sweeps = tuple(each for each in found if each is not None)
    across = _AcrossWorkloads()
    _check_variants(variants or {}, groups)
    timed = all(standing.best.at(clock) > 0 for standing in standings)
    if len(groups) > 1 and len(submissions) > 1 and timed:
        most = (budget or {}).get(clock, math.nan)
        across = _across_workloads(standings, clock, reference, most, variants or {})
    return Comparison(
        goals=sided,
        clock=clock,
        reference=reference,
        standings=tuple(standings),
        sweeps=sweeps,
        profile=across.profile,
        scores=across.scores,
        speed_ups=across.speed_ups,
        confidence=confidence,
        warnings=tuple(doubts_of(outcomes, standings, sweeps, clock)),
    )


class _AcrossWorkloads(NamedTuple):
    """What several workloads together say of several submissions, as in `Comparison`."""

    profile: PerformanceProfile | None = None
    scores: Mapping[str, float] | None = None
    speed_ups: Mapping[str, float] = MappingProxyType({})


def _across_workloads(
    standings: Sequence[Standing],
    clock: str,
    reference: str,
    budget: float,
    variants: Mapping[str, str],
) -> _AcrossWorkloads:
    times: dict[str, dict[str, float]] = defaultdict(dict)
    for standing in standings:
        times[standing.submission][standing.workload] = standing.best.at(clock)
    counting = {
        submission: {name: time for name, time in of.items() if name not in variants}
        for submission, of in times.items()
    }
    over = counting[reference]
    return _AcrossWorkloads(
        performance_profile(checked_by_variants(times, variants) if variants else counting),
        algoperf_score(times, variants=variants or None),
        {name: _overall(of, over, budget) for name, of in counting.items()},
    )


def _check_variants(variants: Mapping[str, str], workloads: Iterable[str]) -> None:
    for name in (each for pair in variants.items() for each in pair):
        if name not in workloads:
            known = ", ".join(workloads) or "none"
            refuse("variants", f"name workloads among {known}", repr(name), "Check its name.")


def _overall(times: Mapping[str, float], over: Mapping[str, float], budget: float) -> float:
    """The geometric mean of speed-ups; NaN if a missed goal has no budget, or a time is missing."""
    missed = any(math.isinf(time) for of in (times, over) for time in of.values())
    if times.keys() != over.keys() or (missed and math.isnan(budget)):
        return math.nan
    return speed_up(times, over, dict.fromkeys(times, budget) if missed else None)


def _sided(trials: Sequence[Trial], goals: Goal | Mapping[str, Goal]) -> dict[str, Goal]:
    """Return the goal of each workload, with its side."""
    workloads = dict.fromkeys(trial.workload for trial in trials)
    of = dict.fromkeys(workloads, goals) if isinstance(goals, Goal) else dict(goals)
    sided = {}
    for workload in workloads:
        if workload not in of:
            names = ", ".join(of) or "none"
            refuse(
                "goals",
                f"have one for the workload {workload!r}",
                f"goals for {names}",
                "Give its goal too, or leave its trials out.",
            )
        goal = of[workload]
        starts = [
            values[0]
            for trial in trials
            if trial.workload == workload
            and len(values := trial.measurements.values[np.isfinite(trial.measurements.values)])
        ]
        start = np.array([np.median(starts)]) if starts else np.array([math.inf])
        sided[workload] = goal.with_side(start)
    return sided


def _clock(outcomes: Sequence[Outcome], asked: str | None) -> str:
    known = {
        clock: all(not math.isnan(outcome.at(clock)) for outcome in outcomes) for clock in CLOCKS
    }
    if asked is None:
        timed = all(outcome.after("seconds") > 0 for outcome in outcomes)
        reached = any(outcome.reached is not None for outcome in outcomes)
        return "seconds" if known["seconds"] and (reached or timed) else "steps"
    require_choice("clock", asked, CLOCKS, "Steps are always known.")
    if not known[asked]:
        without = next(o.trial.name for o in outcomes if math.isnan(o.at(asked)))
        refuse(
            "clock",
            "be known of every trial that reached its goal",
            f"{'time' if asked == 'seconds' else asked}, which is not known of {without}",
            "Compare by steps, or log it.",
        )
    return asked


def _standings(
    workload: str,
    groups: Mapping[str, Sequence[Outcome]],
    clock: str,
    reference: str,
    confidence: float,
) -> list[Standing]:
    counting = {submission: _counting(of, clock) for submission, of in groups.items()}
    best = {submission: middle(of, clock) for submission, of in counting.items()}

    def over(submission: str) -> Bounded:
        if reference not in best:
            return UNKNOWN
        if submission == reference:
            return Bounded(1.0, 1.0, 1.0) if best[reference].reached else UNKNOWN
        return _speed_up(counting[submission], counting[reference], clock, confidence)

    standings = [
        Standing(
            submission,
            workload,
            tuple(groups[submission]),
            tuple(counting[submission]),
            best[submission],
            over(submission),
        )
        for submission in groups
    ]
    return sorted(standings, key=lambda standing: standing.best.rank(clock))


def _counting(outcomes: Sequence[Outcome], clock: str) -> list[Outcome]:
    studies: dict[str, list[Outcome]] = defaultdict(list)
    for outcome in outcomes:
        studies[outcome.trial.study].append(outcome)
    best = [best_setting(of, clock) for of in studies.values()]
    return best[0] if len(best) == 1 else [middle(repeated, clock) for repeated in best]


def _speed_up(
    ours: Sequence[Outcome], theirs: Sequence[Outcome], clock: str, confidence: float
) -> Bounded:
    """How many times as fast ours is; bounded by the scatter of seeds and the measurements."""
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
    """What the middle time is above: the middle of what each time is above, see `middle`.

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
