# SPDX-License-Identifier: Apache-2.0
"""A sweep as it stands: how far it is, what it has found, and its files."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from noisescale.csv_lines import write_csv
from noisescale.lab.compare.compare_trials import compare_trials
from noisescale.lab.compare.comparison import ComparisonRecord
from noisescale.lab.compare.outcomes import middle
from noisescale.lab.jobs.jobs import FAILED, Entry, State, device_hours
from noisescale.lab.parameters import LEARNING_RATE
from noisescale.lab.sweep.results import DIVERGED, OUT_OF_STEPS, PRUNED, TrialResult
from noisescale.lab.sweep.settings import SweepJob, results_at

SWEEP, TRIALS = "sweep.csv", "trials.csv"
"""The files: the steps to the goal at each batch size, and all evaluations."""


@dataclass(frozen=True)
class SizeProgress:
    """How far a sweep is at one batch size."""

    batch_size: int
    done: int
    expected: int
    """Trainings, as far as is known."""
    reached: int
    diverged: int
    pruned: int
    out_of_steps: int
    failed: int
    steps: float
    """To the goal, by the middle repetition of the best point so far; NaN before it is known."""
    learning_rate: float
    """Of the best point; NaN before it is known."""
    finished: bool


@dataclass(frozen=True)
class SweepProgress:
    """How far a sweep is."""

    sizes: tuple[SizeProgress, ...]
    device_hours: float
    """Spent so far, with the starts of processes and with evaluations."""
    seconds_left: float
    """By the time that trainings took so far; NaN before one is done."""
    running: tuple[Entry, ...]

    @property
    def done(self) -> int:
        """Trainings that are done or given up."""
        return sum(size.done for size in self.sizes)

    @property
    def expected(self) -> int:
        """Trainings in all, as far as is known."""
        return sum(size.expected for size in self.sizes)

    @property
    def finished(self) -> bool:
        """Whether nothing is left to train."""
        return all(size.finished for size in self.sizes)


def sweep_progress(job: SweepJob, entries: Mapping[str, Entry]) -> SweepProgress:
    """Return how far a sweep is."""
    running = tuple(each for each in entries.values() if each.state is State.RUNNING)
    sizes = tuple(_of_size(job, size, entries) for size in job.batch_sizes)
    of_size = {size: _seconds(size, entries) for size in job.batch_sizes}
    usual = [mean for mean in of_size.values() if mean > 0]
    left = math.nan
    if usual:
        mean = sum(usual) / len(usual)
        work = sum((s.expected - s.done) * (of_size[s.batch_size] or mean) for s in sizes)
        left = work / job.devices / max(1, len(running))
    return SweepProgress(sizes, device_hours(entries), left, running)


def _seconds(size: int, entries: Mapping[str, Entry]) -> float:
    """Return the mean device-seconds of trainings at a batch size; 0 if none is done."""
    spent = [
        float(entry.result["device_seconds"])
        for entry in entries.values()
        if "device_seconds" in entry.result and entry.spec["batch_size"] == size
    ]
    return sum(spent) / len(spent) if spent else 0.0


def _of_size(job: SweepJob, size: int, entries: Mapping[str, Entry]) -> SizeProgress:
    found = results_at(size, entries)
    progress = job.progress(size, entries)
    ended = [result.ended for result in found]
    outcomes = [result.outcome(job.goal) for result in progress.best or found]
    reached = [outcome for outcome in outcomes if outcome.reached is not None]
    best = middle(outcomes if progress.best else reached, "steps") if reached else None
    known = best is not None and best.reached is not None
    return SizeProgress(
        size,
        len(found),
        max(progress.expected, len(found) + len(progress.missing)),
        sum(result.outcome(job.goal).reached is not None for result in found),
        ended.count(DIVERGED),
        ended.count(PRUNED),
        ended.count(OUT_OF_STEPS),
        ended.count(FAILED),
        best.at("steps") if best is not None and known else math.nan,
        best.trial.learning_rate if best is not None and known else math.nan,
        not progress.missing,
    )


def results_in(job: SweepJob, entries: Mapping[str, Entry]) -> list[TrialResult]:
    """Return all results, by batch size and then in the order in which they were wanted.

    The order does not depend on who trained what.
    """
    return [
        result
        for size in job.batch_sizes
        for result in sorted(
            results_at(size, entries),
            key=lambda r: (r.seed, tuple(r.hyperparameters.values())),
        )
    ]


def comparison_of(job: SweepJob, entries: Mapping[str, Entry]) -> ComparisonRecord:
    """Return what `noisescale compare` says of the sweep, by trainings with an evaluation."""
    trials = [result.trial() for result in results_in(job, entries) if len(result.steps)]
    return compare_trials(trials, job.goal, clock="steps")


def write_sweep(job: SweepJob, entries: Mapping[str, Entry], folder: Path) -> None:
    """Write the files of a sweep.

    `sweep.csv` has a line for each repetition of the best point that reached the goal, at each
    batch size whose search is done. A batch size has none if the middle repetition missed the goal:
    the others were lucky. It has none either if the best learning rate is still at the edge: a
    better one may lie beyond, and `compare` leaves it out of the law, too. `noisescale fit` and
    `predict --sweep` take it.

    `trials.csv` has all evaluations, for `noisescale compare`. Both are the same whoever trained
    what, except for the times of `trials.csv` and how far trainings without a chance were trained.
    """
    lines: list[Sequence[Any]] = [("batch_size", "steps", "learning_rate", "seed")]
    for size in job.batch_sizes:
        progress = job.progress(size, entries)
        outcomes = [result.outcome(job.goal) for result in progress.best]
        if progress.missing or not outcomes or middle(outcomes, "steps").reached is None:
            continue
        if _at_edge(progress.best[0], results_at(size, entries)):
            continue
        for result, outcome in zip(progress.best, outcomes, strict=True):
            if outcome.reached is not None:
                rate = f"{outcome.trial.learning_rate:g}"
                lines.append((size, f"{outcome.at('steps'):.15g}", rate, result.seed))
    write_csv(folder / SWEEP, lines)
    found = results_in(job, entries)
    names = list(dict.fromkeys(name for result in found for name in result.hyperparameters))
    every: list[Sequence[Any]] = [
        ("batch_size", *names, "seed", "step", "seconds", job.goal.metric, "ended")
    ]
    for result in found:
        which = (f"{result.batch_size:.15g}", *(f"{result.hyperparameters[n]:g}" for n in names))
        for step, seconds, value in zip(result.steps, result.seconds, result.values, strict=True):
            every.append((*which, result.seed, step, seconds, value, result.ended))
    write_csv(folder / TRIALS, every)


def alike_in(job: SweepJob, entries: Mapping[str, Entry]) -> list[int]:
    """Return the batch sizes at which all repetitions of the best point are the same training.

    Something in the module or its data ignores the seed. Their scatter would read as zero.
    """
    found = []
    for size in job.batch_sizes:
        best = job.progress(size, entries).best
        courses = {(tuple(each.steps), tuple(each.values)) for each in best}
        if len(best) > 1 and len(courses) == 1:
            found.append(size)
    return found


def _at_edge(best: TrialResult, tried: Sequence[TrialResult]) -> bool:
    """Whether no lower, or no higher, learning rate was evaluated than the best."""
    rates = {each.hyperparameters[LEARNING_RATE] for each in tried if len(each.steps)}
    return best.hyperparameters[LEARNING_RATE] in (min(rates), max(rates))


def failures_in(entries: Mapping[str, Entry]) -> dict[str, str]:
    """Return the reason of each task that was given up, by its key."""
    return {key: each.result[FAILED] for key, each in entries.items() if FAILED in each.result}
