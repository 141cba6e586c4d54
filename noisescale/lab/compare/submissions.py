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
            the workload that its file or its path names. One of another workload has a `fault`.

    Raises:
        ValueError: If a path is given twice, there are no trials, no trial has the metric of a
            goal, or no trial is of the workload of a goal.
        OSError: If a path does not exist.
    """
    _refuse_repeated(runs)
    names = _names_of(runs)
    trials: list[Trial] = []
    for metric in dict.fromkeys(goal.metric for goal in goals.values()):
        read = [
            read_trials(run, metric, submission=name) for run, name in zip(runs, names, strict=True)
        ]
        found = [trial for of_run in read for trial in of_run]
        if len(runs) == 1:
            found = _divide(found, names[0], runs[0], metric, goals)
        placed = [_place(trial, goals) for trial in found]
        if len(runs) > 1:  # names are unique within one of them
            of = [name for name, of_run in zip(names, read, strict=True) for _ in of_run]
            placed = [
                replace(t, name=f"{t.submission or name}/{t.name}")
                for t, name in zip(placed, of, strict=True)
            ]
        common, known = goals.get(""), {trial.name for trial in trials}
        trials += [
            t
            for t in placed
            if (t.fault and t.name not in known)
            or (not t.fault and (common or goals[t.workload]).metric == metric)
        ]
    if all(trial.fault for trial in trials):
        for trial in trials:
            _workload_of(trial, goals)
    without = [name for name in goals if name and not any(t.workload == name for t in trials)]
    if without:
        raise Refusal(
            "goal",
            "name workloads of runs",
            f"{without[0]!r}, which no run names",
            "Check its name, and the names of the folders or of the column `workload`.",
        )
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
    runs of two optimizers are no repetitions. The optimizers of a file are submissions, too. A run
    that does not count has the submission of its folder. If it lies beside others, it has none, and
    is left out, unless one other run is left.
    """
    whole = [trial for trial in trials if _counts(trial)]
    if any(trial.submission != name for trial in whole):
        return list(trials)  # the file names them
    broken = [replace(trial, submission="") for trial in trials if not _counts(trial)]
    nested = [*whole, *(trial for trial in broken if len(Path(trial.name).parts) > 1)]
    beside = [trial for trial in broken if trial not in nested]
    parts = [Path(trial.name).parts for trial in nested]
    apart = [tuple(part for part in each if part not in workloads) for each in parts]
    if path.is_dir() and apart != parts and all(apart):  # folders of workloads come first
        named = [replace(t, submission=each[0]) for t, each in zip(nested, apart, strict=True)]
        return [*named, *beside]
    if path.is_dir() and len({part[0] for part in parts}) > 1 and min(map(len, parts)) > 1:
        named = [replace(t, submission=part[0]) for t, part in zip(nested, parts, strict=True)]
        return [*named, *beside]
    sizes = {trial.batch_size for trial in whole}
    is_sweep = len(sizes) > 1 and not any(map(math.isnan, sizes))
    if is_sweep or path.is_file():
        optimizers = [each.submission for each in read_trials(path, metric) if _counts(each)]
        if len(set(optimizers)) > 1 and all(optimizers):
            named = [replace(t, submission=o) for t, o in zip(whole, optimizers, strict=True)]
            return [*named, *broken]
    if is_sweep:
        return [*whole, *broken]
    if len(whole) == 1:  # an empty folder has no submission, and is no other run
        return [replace(t, submission=t.name) if t.submission else t for t in trials]
    return [*(replace(trial, submission=trial.name) for trial in whole), *broken]


def _counts(trial: Trial) -> bool:
    """Return whether something was measured of a trial."""
    return not trial.fault and len(trial.measurements) > 0


def _place(trial: Trial, goals: Mapping[str, Goal]) -> Trial:
    """Return a trial with its workload, or with a fault if it has none of those with goals."""
    try:
        return replace(trial, workload=_workload_of(trial, goals))
    except Refusal as refused:
        return replace(trial, fault=trial.fault or str(refused))


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
