# SPDX-License-Identifier: Apache-2.0
"""`compare`: when runs reached a result, and which was first."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from os import PathLike
from pathlib import Path

from noisescale.bounded import UNKNOWN, Bounded
from noisescale.checks import check_confidence, refuse
from noisescale.history.metrics import Goal
from noisescale.lab.compare.comparison import Comparison
from noisescale.lab.compare.counting import count_trials
from noisescale.lab.compare.measurements import CLOCKS, Trial
from noisescale.lab.compare.outcomes import Outcome, Standing, best_setting, middle
from noisescale.lab.compare.profiles import (
    PerformanceProfile,
    algoperf_score,
    performance_profile,
    speed_up,
    times_that_count,
)
from noisescale.lab.compare.speed_ups import speed_up_of
from noisescale.lab.compare.steps_to_result import check_budget
from noisescale.lab.compare.submissions import read_submissions
from noisescale.lab.compare.swept import sweep_of
from noisescale.refusal import Refusal, TypeRefusal

UNITS = ("steps", "examples", "epochs", "hours")
"""What may count. Hours may be given as seconds, too."""


def compare(
    runs: str | PathLike[str] | Iterable[str | PathLike[str] | Trial],
    goal: str | Goal | Mapping[str, str | Goal],
    *,
    by: str | None = None,
    budget: Mapping[str, float] | None = None,
    reference: str | None = None,
    variants: Mapping[str, str] | None = None,
    confidence: float = 0.95,
) -> Comparison:
    """Compare when runs reached a result: in steps, examples and hours.

    The time of a submission is that of its best setting of hyperparameters. A setting that was
    trained several times, with other seeds, has the middle of its times; of an even number the
    slower one of both in the middle counts. If a submission has several studies, its time is the
    middle over its studies.

    A speed-up is bounded by the scatter of the repetitions, or by `STEPS_SCATTER` where there are
    few, and by the measurement before the one that reached the goal.

    A trial with a `fault`, or without an evaluation, is left out, and a warning names it.

    Args:
        runs: Folders of TensorBoard or CSVLogger runs, W&B's or other CSV files, or sweeps, see
            `read_trials`. Each is a submission, and the runs below it are its trials. Of one path
            alone each folder in it, or each run, is a submission. Or trials that were read before.
        goal: The result to reach, for example "val_loss<=0.15", or from each workload to its goal.
            "<" and ">" leave the value itself out. A goal without a side falls if most trials began
            above it. A run belongs to the workload that its path or its file names.
        by: What counts: "steps", "examples", "epochs" or "hours". Default: hours if they are known
            of every run that reached its goal, else steps.
        budget: What a run may take at most, for example `{"epochs": 10, "hours": 2}`.
        reference: The submission that the others are compared with. Default: the first.
        variants: From each held-out variant among the workloads to the workload that it checks.
        confidence: Coverage of the bounds.

    Returns:
        The standings of the submissions on each workload, with speed-ups, regimes of batch sizes
        where there are several, and scores where there are several workloads.

    Raises:
        ValueError: If a path has no runs, no run of a submission counts, no run logged the metric,
            a workload has no goal, an argument is out of its range, or what counts is not known of
            a run that reached its goal.
        OSError: If a path cannot be read.

    Examples:
        >>> from noisescale.lab.compare.measurements import Measurements, Trial
        >>> slow = Trial("1", Measurements([100, 390, 400], [0.9, 0.3, 0.2]), "sgd")
        >>> fast = Trial("2", Measurements([100, 195, 200], [0.9, 0.3, 0.2]), "adam")
        >>> compare([slow, fast], "loss<=0.2").document().headline
        'adam reached loss <= 0.2 first'

    References:
        Shallue et al. 2019, arXiv:1811.03600. Dahl et al. 2023, arXiv:2306.07179.
    """
    check_confidence(confidence)
    goals, clock, limits = _goals_of(goal), _clock_of(by), _limits_of(budget or {})
    check_budget(limits)
    given = _trials_of(runs, goals)
    if not given:
        refuse("runs", "have one trial at least", "none", "Give the trials to compare.")
    outcomes, sided, left_out = count_trials(given, goals, clock, limits)
    clock = _counting_clock(outcomes, clock)
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
    most = limits.get(clock, math.nan)
    profile, scores, speed_ups = _across_workloads(
        standings, clock, reference, most, variants or {}
    )
    return Comparison(
        goals=sided,
        clock=clock,
        reference=reference,
        standings=tuple(standings),
        sweeps=sweeps,
        profile=profile,
        scores=scores,
        speed_ups=speed_ups,
        confidence=confidence,
        budget=limits,
        left_out=left_out,
    )


def _goals_of(given: str | Goal | Mapping[str, str | Goal]) -> dict[str, Goal]:
    """Return the goal of each workload, or one goal under "" for all of them."""
    of = dict(given) if isinstance(given, Mapping) else {"": given}
    goals = {name: Goal.read(g) if isinstance(g, str) else g for name, g in of.items()}
    for one in goals.values():
        if not isinstance(one, Goal):
            raise TypeRefusal("goal", "be a text or a `Goal`", repr(one), "Give val_loss<=0.2.")
    if not goals:
        raise Refusal("goal", "have one goal at least", "none", "Give, for example, val_loss<=0.2.")
    if "" in goals and len(goals) > 1:
        raise Refusal(
            "goal",
            f"name a workload in each of {len(goals)} goals",
            f"one without, for {goals['']}",
            'Write it as "workload: metric<=value".',
        )
    return goals


def _clock_of(by: str | None) -> str | None:
    """Return the clock of `by`. Hours are measured in seconds."""
    if by not in (None, "seconds", *UNITS):
        raise Refusal("by", "be steps, examples, epochs or hours", repr(by), "Choose one of these.")
    return "seconds" if by == "hours" else by


def _limits_of(budget: Mapping[str, float]) -> dict[str, float]:
    """Return the budget of each clock. A limit in hours is one in seconds."""
    limits = dict(budget)
    if "hours" in limits:
        if "seconds" in limits:
            raise Refusal(
                "budget", "be given once for each unit", "hours and seconds", "Leave one out."
            )
        limits["seconds"] = limits.pop("hours") * 3600
    return limits


def _trials_of(
    runs: str | PathLike[str] | Iterable[str | PathLike[str] | Trial], goals: Mapping[str, Goal]
) -> list[Trial]:
    """Return trials as they are, or read them at paths."""
    given = [runs] if isinstance(runs, str | PathLike) else list(runs)
    trials = [each for each in given if isinstance(each, Trial)]
    paths = [Path(each) for each in given if not isinstance(each, Trial)]
    if trials and paths:
        raise TypeRefusal(
            "runs",
            "be paths or trials",
            f"{len(paths)} of one kind and {len(trials)} of the other",
            "Read the trials at the paths with `read_trials`.",
        )
    return trials or read_submissions(paths, goals)


def _across_workloads(
    standings: Sequence[Standing],
    clock: str,
    reference: str,
    budget: float,
    variants: Mapping[str, str],
) -> tuple[PerformanceProfile | None, dict[str, float] | None, dict[str, float]]:
    """Return profile, scores and speed-ups over several workloads of several submissions.

    There are none where a goal was reached at a time of 0.
    """
    workloads = list(dict.fromkeys(standing.workload for standing in standings))
    for name in (each for pair in variants.items() for each in pair):
        if name not in workloads:
            known = ", ".join(workloads) or "none"
            refuse("variants", f"name workloads among {known}", repr(name), "Check its name.")
    several = len(workloads) > 1 and len({each.submission for each in standings}) > 1
    if not several or any(standing.best.at(clock) <= 0 for standing in standings):
        return None, None, {}
    times: dict[str, dict[str, float]] = defaultdict(dict)
    for standing in standings:
        times[standing.submission][standing.workload] = standing.best.at(clock)
    counting = {
        submission: {name: time for name, time in of.items() if name not in variants}
        for submission, of in times.items()
    }
    over = counting[reference]
    return (
        performance_profile(times_that_count(times, variants) if variants else counting),
        algoperf_score(times, variants=variants or None),
        {name: _overall_speed_up(of, over, budget) for name, of in counting.items()},
    )


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


def _counting_clock(outcomes: Sequence[Outcome], asked: str | None) -> str:
    """Return what counts. By default that is time, if it is known of all that reached a goal."""
    without = {
        clock: [o.trial.name for o in outcomes if math.isnan(o.at(clock))] for clock in CLOCKS
    }
    if asked is None:
        timed = all(outcome.after("seconds") > 0 for outcome in outcomes)
        reached = any(outcome.reached is not None for outcome in outcomes)
        return "seconds" if not without["seconds"] and (reached or timed) else "steps"
    if without[asked]:
        refuse(
            "by",
            "be known of every trial that reached its goal",
            f"{'time' if asked == 'seconds' else asked}, which is not known of {without[asked][0]}",
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
