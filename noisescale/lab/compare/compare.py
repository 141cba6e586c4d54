# SPDX-License-Identifier: Apache-2.0
"""`compare`: when runs reached a result, and which was first."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from os import PathLike
from pathlib import Path

from noisescale.history.metrics import Goal
from noisescale.lab.compare.compare_trials import compare_trials
from noisescale.lab.compare.comparison import Comparison
from noisescale.lab.compare.measurements import Trial
from noisescale.lab.compare.submissions import read_submissions
from noisescale.refusal import Refusal, TypeRefusal, rename_arguments

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

    The time of a submission is the time of its best setting of hyperparameters. If this setting was
    trained several times, with other seeds, the middle repetition counts. Speed-ups have bounds
    from the scatter of repetitions and from the gaps between measurements, see `compare_trials`.

    Args:
        runs: Folders of TensorBoard or CSVLogger runs, W&B's or other CSV files, or sweeps, see
            `read_trials`. Each is a submission, and the runs below it are its trials. Of one path
            alone each folder in it, or each run, is a submission. Or trials that were read before.
        goal: The result to reach, for example "val_loss<=0.15", or from each workload to its goal.
            "<" and ">" leave the value itself out. A run belongs to the workload that its path or
            its file names.
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
        ValueError: If a path has no runs, no run logged the metric, an argument is out of its
            range, or what counts is not known of a run that reached its goal.
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
    goals, clock, limits = _goals_of(goal), _clock_of(by), _limits_of(budget or {})
    with rename_arguments({"trials": "runs", "goals": "goal", "clock": "by"}):
        return compare_trials(
            _trials_of(runs, goals),
            goals.get("", goals),
            clock=clock,
            budget=limits,
            reference=reference,
            variants=variants,
            confidence=confidence,
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
