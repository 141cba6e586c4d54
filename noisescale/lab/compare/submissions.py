# SPDX-License-Identifier: Apache-2.0
"""Which trials a comparison is about: what lies at its paths, by submission and workload."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from noisescale.history.metrics import Goal
from noisescale.lab.compare.measurements import Trial
from noisescale.lab.compare.reading import read_trials
from noisescale.refusal import Refusal


def read_submissions(runs: Sequence[Path], goals: Mapping[str, Goal]) -> list[Trial]:
    """Read the trials at all paths, and give each its submission and its workload.

    Each path is a submission, and the runs below it are its trials. At a single path each folder
    in it is a submission, or each run.

    Args:
        runs: Folders or files.
        goals: The goal of each workload, or one goal under "" for all of them. A trial belongs to
            the workload that its file or its path names.

    Raises:
        ValueError: If a path is given twice, there are no trials, no trial has the metric of a
            goal, or the workload of a trial is not known.
        OSError: If a path does not exist.
    """
    _refuse_repeated(runs)
    names = _names_of(runs)
    trials: list[Trial] = []
    for metric in dict.fromkeys(goal.metric for goal in goals.values()):
        found = [
            trial
            for run, name in zip(runs, names, strict=True)
            for trial in read_trials(run, metric, submission=name)
        ]
        if len(runs) == 1:
            found = _divide(found, names[0], runs[0], metric, goals)
        placed = [replace(trial, workload=_workload_of(trial, goals)) for trial in found]
        if len(runs) > 1:  # names are unique within one of them
            placed = [replace(t, name=f"{t.submission}/{t.name}") for t in placed]
        common = goals.get("")
        trials += [t for t in placed if (common or goals[t.workload]).metric == metric]
    return trials


def _refuse_repeated(runs: Sequence[Path]) -> None:
    """Refuse a path that is given twice.

    Its trials would count as repetitions, or as those of two submissions.
    """
    seen: dict[Path, Path] = {}
    for run in runs:
        before = seen.setdefault(run.resolve(), run)
        if before is not run:
            raise Refusal(
                "runs",
                "be different folders or files",
                f"{before} and {run}, which are the same",
                "Leave one of them out.",
            )


def _names_of(runs: Sequence[Path]) -> list[str]:
    """Return a name for each path: its last part, or all of it where that is not unique."""
    last = [run.resolve().name for run in runs]
    return [
        name if last.count(name) == 1 else str(run) for run, name in zip(runs, last, strict=True)
    ]


def _divide(
    trials: Sequence[Trial], name: str, path: Path, metric: str, workloads: Collection[str]
) -> list[Trial]:
    """Divide the trials at a single path among submissions: its folders, or its runs.

    Runs that lie beside each other at several batch sizes are one sweep, or one of each optimizer:
    runs of two optimizers are no repetitions.
    """
    if any(trial.submission != name for trial in trials):
        return list(trials)  # the file names them
    parts = [Path(trial.name).parts for trial in trials]
    apart = [tuple(part for part in each if part not in workloads) for each in parts]
    if path.is_dir() and apart != parts and all(apart):  # folders of workloads come first
        return [replace(t, submission=each[0]) for t, each in zip(trials, apart, strict=True)]
    if path.is_dir() and len({part[0] for part in parts}) > 1 and min(map(len, parts)) > 1:
        return [replace(t, submission=part[0]) for t, part in zip(trials, parts, strict=True)]
    sizes = {trial.batch_size for trial in trials}
    if len(sizes) > 1 and not any(map(math.isnan, sizes)):
        optimizers = [trial.submission for trial in read_trials(path, metric)]
        if len(set(optimizers)) < 2 or not all(optimizers):
            return list(trials)
        return [replace(t, submission=o) for t, o in zip(trials, optimizers, strict=True)]
    return [replace(trial, submission=trial.name) for trial in trials]


def _workload_of(trial: Trial, goals: Mapping[str, Goal]) -> str:
    """Return the workload that a trial's file, or its path, names."""
    if "" in goals or trial.workload in goals:
        return trial.workload
    if trial.workload:
        raise Refusal(
            "goal",
            f"have one for the workload {trial.workload!r} of {trial.name}",
            f"goals for {', '.join(goals)}",
            "Give its goal too.",
        )
    path = {trial.submission, *Path(trial.name).parts}
    found = [workload for workload in goals if workload in path]
    if len(found) == 1:
        return found[0]
    raise Refusal(
        "goal",
        "name the workload of each run",
        f"{', '.join(goals)} for {trial.name}",
        "Put its runs in a folder with the name of a workload, or give one goal for all.",
    )
