# SPDX-License-Identifier: Apache-2.0
"""A search as it stands: how far it is, its front, and its files."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from noisescale.csv_lines import write_csv
from noisescale.lab.jobs.jobs import FAILED, Entry, State, device_hours
from noisescale.lab.parameters import LOG, POW2, Parameter
from noisescale.lab.tune.asking import cost_of
from noisescale.lab.tune.cost_front import CostFront, Searched, TunedTrial
from noisescale.lab.tune.tune_job import DONE, TuneJob

TRIALS, FRONT = "trials.csv", "front.csv"
"""The files: all trainings, and those of the front."""


@dataclass(frozen=True)
class TuneProgress:
    """How far a search is."""

    front: CostFront
    running: tuple[Entry, ...]
    device_hours: float
    """Spent so far, with the starts of processes and with evaluations."""
    budget: float | None
    most_trials: int | None
    finished: bool

    @property
    def done(self) -> int:
        """Trainings with a result."""
        return len(self.front.trials) - len(self.front.failed)


def tune_progress(job: TuneJob, entries: Mapping[str, Entry]) -> TuneProgress:
    """Return how far a search is."""
    return TuneProgress(
        front_of(job, entries),
        tuple(each for each in entries.values() if each.state is State.RUNNING),
        device_hours(entries),
        job.budget,
        job.trials,
        job.is_finished(entries),
    )


def front_of(job: TuneJob, entries: Mapping[str, Entry]) -> CostFront:
    """Return all trainings that have ended, with the front."""
    ended = [each for each in entries.values() if each.result]
    trials = tuple(_trial(each) for each in sorted(ended, key=lambda each: int(each.key)))
    return CostFront(job.metric, job.maximize, tuple(map(_searched, job.parameters)), trials)


def _searched(each: Parameter) -> Searched:
    log = each.kind in (LOG, POW2)
    return Searched(each.name, log, each.is_number, each.low, each.high)


def _trial(entry: Entry) -> TunedTrial:
    result, spec = entry.result, entry.spec
    reason = str(result.get(FAILED, ""))
    ended = FAILED if reason else str(result["ended"])
    return TunedTrial(
        int(entry.key),
        spec["parameters"],
        cost_of(result),
        float(result["value"]) if ended == DONE else math.nan,
        ended,
        reason,
        float(spec["batch_size"]),
        float(result.get("steps", math.nan)),
    )


def write_tuned(found: CostFront, folder: Path) -> None:
    """Write the trainings and the front as CSV files. Neither is ever left half-written."""
    names = [each.name for each in found.searched]
    every: list[Sequence[Any]] = [
        ("trial", *names, "examples_of_a_step", "steps", "device_seconds", found.metric, "ended")
    ]
    for trial in found.trials:
        values = [trial.parameters[name] for name in names]
        numbers = (trial.batch_size, trial.steps, trial.cost, trial.value)
        every.append((trial.number, *values, *map(_written, numbers), trial.ended))
    best: list[Sequence[Any]] = [
        ("device_seconds", found.metric, *names, "trainings", "first trial")
    ]
    for each in found.front:
        values = [each.first.parameters[name] for name in names]
        means = (each.cost, each.value)
        best.append((*map(_written, means), *values, len(each.trials), each.first.number))
    write_csv(folder / TRIALS, every)
    write_csv(folder / FRONT, best)


def _written(value: float) -> str:
    return "" if math.isnan(value) else f"{value:.10g}"
