# SPDX-License-Identifier: Apache-2.0
"""Compare trials: when each reached its goal, which submission was first, and by how much."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from noisescale.bounded import UNKNOWN, Bounded
from noisescale.checks import check_confidence, refuse, require_choice
from noisescale.history.metrics import Goal
from noisescale.lab.compare.comparison import Comparison
from noisescale.lab.compare.doubts import Compared, doubts_of
from noisescale.lab.compare.measurements import CLOCKS, Trial
from noisescale.lab.compare.outcomes import Outcome, Standing, best_setting, middle, outcome_of
from noisescale.lab.compare.profiles import (
    PerformanceProfile,
    algoperf_score,
    performance_profile,
    speed_up,
    times_that_count,
)
from noisescale.lab.compare.speed_ups import speed_up_of
from noisescale.lab.compare.steps_to_result import check_budget
from noisescale.lab.compare.swept import sweep_of
from noisescale.refusal import Refusal


def compare_trials(
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

    A trial with a `fault`, or without an evaluation, is left out, and a warning names it.

    Args:
        trials: With their submissions, workloads and studies.
        goals: For all workloads, or from each workload to its goal. A goal without a side falls
            if most trials began above it.
        clock: What counts: "steps", "examples", "epochs" or "seconds". Default: seconds if they
            are known of every trial that reached its goal, else steps.
        budget: See `find_result`.
        reference: The submission that speed-ups are over. Default: that of the first trial.
        variants: From each held-out variant among the workloads to its workload.
        confidence: Coverage of bounds.

    Raises:
        ValueError: If there is no trial, no trial of a submission counts, a workload has no goal,
            a trial reached its goal after 0 steps, the clock is not known of a trial that reached
            its goal, or the reference is not among the submissions.

    Examples:
        >>> from noisescale.lab.compare.measurements import Measurements
        >>> slow = Trial("1", Measurements([100, 390, 400], [0.9, 0.3, 0.2]), "sgd")
        >>> fast = Trial("2", Measurements([100, 195, 200], [0.9, 0.3, 0.2]), "adam")
        >>> compare_trials([slow, fast], Goal.read("loss<=0.2")).standings[0].speed_up
        Bounded(value=2.0, low=1.28..., high=3.10...)

    References:
        Shallue et al. 2019, arXiv:1811.03600. Dahl et al. 2023, arXiv:2306.07179.
    """
    check_confidence(confidence)
    given = list(trials)
    if not given:
        refuse("trials", "have one trial at least", "none", "Give the trials to compare.")
    check_budget(budget or {})
    every, left_out = _divide_by_fault(given, goals)
    sided = _goals_with_sides(every, goals)
    outcomes, unknown = _outcomes_of(every, sided, budget)
    left_out += unknown
    _refuse_lost([outcome.trial for outcome in outcomes], left_out)
    outcomes, untimed = _divide_by_clock(outcomes, clock)
    left_out += untimed
    clock = _clock(outcomes, clock)
    submissions = list(dict.fromkeys(outcome.trial.submission for outcome in outcomes))
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
        sweep_of(submission, workload, each, confidence)
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
        left_out=left_out,
        warnings=tuple(
            doubts_of(Compared(outcomes, standings, sweeps, clock, budget or {}, left_out))
        ),
    )


def _divide_by_fault(
    trials: Sequence[Trial], goals: Goal | Mapping[str, Goal]
) -> tuple[list[Trial], tuple[Trial, ...]]:
    """Return the trials that count, and the others, each with its fault.

    A trial without an evaluation is at fault, too: it may have reached the goal. But one that
    failed by its own record missed the goal.

    Raises:
        ValueError: If no trial of a submission counts.
    """
    counting, left_out = [], []
    for trial in trials:
        fault = trial.fault
        if not fault and not len(trial.measurements) and trial.feasible:
            goal = goals if isinstance(goals, Goal) else goals.get(trial.workload)
            fault = f"It did not log {goal.metric if goal else 'a metric'}."
        if fault:
            left_out.append(replace(trial, fault=fault))
        else:
            counting.append(trial)
    _refuse_lost(counting, left_out)
    return counting, tuple(left_out)


def _refuse_lost(counting: Sequence[Trial], left_out: Sequence[Trial]) -> None:
    """Refuse a submission of which no trial counts."""
    whole = {trial.submission for trial in counting}
    for trial in left_out:
        if not whole or (trial.submission and trial.submission not in whole):
            of = sum(other.submission == trial.submission for other in left_out)
            refuse(
                "trials",
                f"have a run of {trial.submission} that counts"
                if trial.submission
                else "have a run that counts",
                f"{of} that do not, for example {trial.name}: {trial.fault.rstrip('.')}",
                "Correct the run, or leave the submission out.",
            )


def _outcomes_of(
    trials: Sequence[Trial], goals: Mapping[str, Goal], budget: Mapping[str, float] | None
) -> tuple[list[Outcome], tuple[Trial, ...]]:
    """Return the outcomes, and the trials that may have reached the goal within the budget or not.

    What never reached the goal missed it, whatever the budget allows.
    """
    outcomes, unknown = [], []
    for trial in trials:
        goal = goals[trial.workload]
        try:
            outcomes.append(outcome_of(trial, goal, budget))
        except Refusal as refused:
            if goal.is_reached_by(trial.measurements.values).any():
                unknown.append(replace(trial, fault=str(refused)))
            else:
                outcomes.append(outcome_of(trial, goal))
    return outcomes, tuple(unknown)


def _divide_by_clock(
    outcomes: list[Outcome], clock: str | None
) -> tuple[list[Outcome], tuple[Trial, ...]]:
    """Return the outcomes that count, and the trials of which nobody knows when they got there.

    All count where nothing else of a submission is left: `_clock` refuses the clock then.
    """
    if clock not in CLOCKS:
        return outcomes, ()
    timed = [each for each in outcomes if not math.isnan(each.at(clock))]
    untimed = [each.trial for each in outcomes if math.isnan(each.at(clock))]
    whole = {(each.trial.submission, each.trial.workload) for each in timed}
    if any((trial.submission, trial.workload) not in whole for trial in untimed):
        return outcomes, ()
    fault = f"Its {clock} are not known where it reached the goal."
    return timed, tuple(replace(trial, fault=fault) for trial in untimed)


class _AcrossWorkloads(NamedTuple):
    """The fields of `Comparison` that need several workloads and several submissions."""

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
        performance_profile(times_that_count(times, variants) if variants else counting),
        algoperf_score(times, variants=variants or None),
        {name: _overall_speed_up(of, over, budget) for name, of in counting.items()},
    )


def _check_variants(variants: Mapping[str, str], workloads: Iterable[str]) -> None:
    for name in (each for pair in variants.items() for each in pair):
        if name not in workloads:
            known = ", ".join(workloads) or "none"
            refuse("variants", f"name workloads among {known}", repr(name), "Check its name.")


def _overall_speed_up(
    times: Mapping[str, float], over: Mapping[str, float], budget: float
) -> float:
    """Return the geometric mean of speed-ups.

    It is NaN if a missed goal has no budget, or a time is missing.
    """
    missed = any(math.isinf(time) for of in (times, over) for time in of.values())
    if times.keys() != over.keys() or (missed and math.isnan(budget)):
        return math.nan
    return speed_up(times, over, dict.fromkeys(times, budget) if missed else None)


def _goals_with_sides(trials: Sequence[Trial], goals: Goal | Mapping[str, Goal]) -> dict[str, Goal]:
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
    counting = {submission: _counting_outcomes(of, clock) for submission, of in groups.items()}
    best = {submission: middle(of, clock) for submission, of in counting.items()}

    def speed_up_over_reference(submission: str) -> Bounded:
        if reference not in best:
            return UNKNOWN
        if submission == reference:
            return Bounded(1.0, 1.0, 1.0) if best[reference].reached else UNKNOWN
        return speed_up_of(counting[submission], counting[reference], clock, confidence)

    standings = [
        Standing(
            submission,
            workload,
            tuple(groups[submission]),
            tuple(counting[submission]),
            best[submission],
            speed_up_over_reference(submission),
        )
        for submission in groups
    ]
    return sorted(standings, key=lambda standing: standing.best.rank(clock))


def _counting_outcomes(outcomes: Sequence[Outcome], clock: str) -> list[Outcome]:
    studies: dict[str, list[Outcome]] = defaultdict(list)
    for outcome in outcomes:
        studies[outcome.trial.study].append(outcome)
    best = [best_setting(of, clock) for of in studies.values()]
    return best[0] if len(best) == 1 else [middle(repeated, clock) for repeated in best]
