# SPDX-License-Identifier: Apache-2.0
"""Which trials count in a comparison, and when each of these reached its goal."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from noisescale.checks import refuse
from noisescale.history.metrics import Goal
from noisescale.lab.compare.measurements import Trial
from noisescale.lab.compare.outcomes import Outcome, outcome_of
from noisescale.refusal import Refusal


class Counted(NamedTuple):
    """What counts."""

    outcomes: list[Outcome]
    goals: dict[str, Goal]
    """The goal of each workload, with its side."""
    left_out: tuple[Trial, ...]
    """The trials that do not count, each with its fault."""


def count_trials(
    trials: Sequence[Trial],
    goals: Mapping[str, Goal],
    clock: str | None,
    budget: Mapping[str, float],
) -> Counted:
    """Return when each trial reached its goal, and the trials that do not count.

    A trial without an evaluation does not count: it may have reached the goal. But one that failed
    by its own record missed the goal. What reached the goal does not count if the budget, or the
    clock, is not known of it; what never reached the goal missed it, whatever the budget allows.

    Args:
        trials: All of them.
        goals: The goal of each workload, or one goal under "" for all of them.
        clock: What is to count; None for what is known.
        budget: See `find_result`.

    Raises:
        ValueError: If a workload has no goal, or no trial of a submission counts.
    """
    faults = [trial.fault or _fault_of(trial, goals) for trial in trials]
    left_out = [replace(t, fault=fault) for t, fault in zip(trials, faults, strict=True) if fault]
    whole = [trial for trial, fault in zip(trials, faults, strict=True) if not fault]
    sided = _goals_with_sides(whole, goals)
    outcomes = []
    for trial in whole:
        goal = sided[trial.workload]
        try:
            outcomes.append(outcome_of(trial, goal, budget))
        except Refusal as refused:
            if goal.is_reached_by(trial.measurements.values).any():
                left_out.append(replace(trial, fault=str(refused)))
            else:
                outcomes.append(outcome_of(trial, goal))
    _refuse_lost([outcome.trial for outcome in outcomes], left_out)
    if clock is not None:
        outcomes, untimed = _divide_by_clock(outcomes, clock)
        left_out += untimed
    return Counted(outcomes, sided, tuple(left_out))


def _fault_of(trial: Trial, goals: Mapping[str, Goal]) -> str:
    """Return that a trial has no evaluation; "" if it has."""
    if len(trial.measurements) or not trial.feasible:
        return ""
    goal = goals.get(trial.workload, goals.get(""))
    return f"It did not log {goal.metric if goal else 'a metric'}."


def _refuse_lost(counting: Sequence[Trial], left_out: Sequence[Trial]) -> None:
    """Refuse a submission of which no trial counts."""
    whole = {trial.submission for trial in counting}
    for trial in left_out:
        if not whole or (trial.submission and trial.submission not in whole):
            of = sum(other.submission == trial.submission for other in left_out)
            refuse(
                "runs",
                f"have a run of {trial.submission} that counts"
                if trial.submission
                else "have a run that counts",
                f"{of} that do not, for example {trial.name}: {trial.fault.rstrip('.')}",
                "Correct the run, or leave the submission out.",
            )


def _divide_by_clock(outcomes: list[Outcome], clock: str) -> tuple[list[Outcome], list[Trial]]:
    """Return the outcomes that count, and the trials of which nobody knows when they got there.

    All count where nothing else of a submission is left: then the clock is refused.
    """
    timed = [each for each in outcomes if not math.isnan(each.at(clock))]
    untimed = [each.trial for each in outcomes if math.isnan(each.at(clock))]
    whole = {(each.trial.submission, each.trial.workload) for each in timed}
    if any((trial.submission, trial.workload) not in whole for trial in untimed):
        return outcomes, []
    fault = f"Its {clock} are not known where it reached the goal."
    return timed, [replace(trial, fault=fault) for trial in untimed]


def _goals_with_sides(trials: Sequence[Trial], goals: Mapping[str, Goal]) -> dict[str, Goal]:
    """Return the goal of each workload, with its side."""
    sided = {}
    for workload in dict.fromkeys(trial.workload for trial in trials):
        goal = goals.get(workload, goals.get(""))
        if goal is None:
            refuse(
                "goal",
                f"have one for the workload {workload!r}",
                f"goals for {', '.join(goals)}",
                "Give its goal too, or leave its trials out.",
            )
        starts = [
            values[0]
            for trial in trials
            if trial.workload == workload
            and len(values := trial.measurements.values[np.isfinite(trial.measurements.values)])
        ]
        start = np.array([np.median(starts)]) if starts else np.array([math.inf])
        sided[workload] = goal.with_side(start)
    return sided
