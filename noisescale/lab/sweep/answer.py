# SPDX-License-Identifier: Apache-2.0
"""What `sweep` returns: all batch sizes, how far the sweep is, and what both say."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from noisescale.csv_lines import write_csv
from noisescale.lab.compare.compare import compare
from noisescale.lab.compare.outcomes import Outcome
from noisescale.lab.compare.statements import statements_of_sweep
from noisescale.lab.compare.swept import Swept, sweep_of
from noisescale.lab.jobs.job_progress import JobAnswer, JobProgress, duration, progress_tables
from noisescale.lab.jobs.jobs import FAILED, Entry
from noisescale.lab.jobs.workers import Place
from noisescale.lab.sweep.results import DIVERGED, OUT_OF_STEPS, PRUNED
from noisescale.lab.sweep.settings import SweepJob, doubts_about_module
from noisescale.lab.sweep.swept_size import SweptSize
from noisescale.report.document import Cell, Document, Figure, Line, Statement, Table
from noisescale.report.numbers import count, hours, plural
from noisescale.report.records import finite

SWEEP, TRIALS = "sweep.csv", "trials.csv"
"""The files: the steps to the goal at each batch size, and all evaluations."""

SCHEDULED = (
    "The module has a learning-rate schedule ({}). It stays as it is at all batch sizes, with its"
    " peak at the searched learning rate. If the learning rate falls before the goal is reached,"
    " trainings take longer or miss the goal, and B_crit is wrong: for a sweep leave the decay out."
)

MET = (
    "A single step has met {}. Steps to it say nothing. Stop, and begin another sweep with a harder"
    " goal and another `--output`."
)

SEEDED = (
    "{} sets a seed: all repetitions begin with the same weights. So their steps scatter less than"
    " those of other weights would. For a sweep set no seed."
)

TOO_SHORT = (
    "Batch size {}: trainings ended before the goal, by `--epochs {:g}`. Begin another sweep with"
    " more epochs, or an easier goal, and another `--output`."
)
ALIKE = (
    "All repetitions at batch size {} are the same: weights and order of the data do not follow the"
    " seed. How much the steps scatter is not known. Set no seed, and give no seeded generator."
)

_HOW_TO_READ = (
    "Steps are those of the middle repetition of the best setting at each batch size. Below the"
    " critical batch size larger batches save steps at almost no cost in examples. Above it they"
    " save few steps. The critical batch size is that of the law S(B) = S_min (1 + (B_crit/B)^α)"
    "^(1/α), fitted to the steps of all repetitions."
)


@dataclass(frozen=True)
class Sweep(JobAnswer):
    """What `sweep` found, and the ways to show it."""

    job: SweepJob
    sizes: tuple[SweptSize, ...]
    """Each batch size, in rising order."""

    @classmethod
    def of(cls, job: SweepJob, entries: Mapping[str, Entry], place: Place) -> Sweep:
        """Return what the tasks of a sweep have found.

        Args:
            job: The sweep.
            entries: All tasks of its ledger, by their keys.
            place: The storage, the name of the sweep in it, and the folder of the results.
        """
        sizes = tuple(SweptSize.of(job, size, entries) for size in job.batch_sizes)
        finished = all(size.finished for size in sizes)
        return cls(JobProgress.of(job, entries, place, finished=finished), job, sizes)

    @property
    def reached(self) -> bool:
        """Whether any training reached the goal."""
        return any(size.reached for size in self.sizes)

    @property
    def expected_trainings(self) -> int:
        """The number of trainings in all, as far as is known."""
        return sum(size.expected_trainings for size in self.sizes)

    @property
    def seconds_left(self) -> float:
        """The time left, by the time that trainings took so far; NaN before one is done."""
        usual = [mean for size in self.sizes if (mean := size.mean_device_seconds)]
        if not usual:
            return math.nan
        mean = sum(usual) / len(usual)
        left = sum(
            (size.expected_trainings - len(size.results)) * (size.mean_device_seconds or mean)
            for size in self.sizes
        )
        return left / self.job.devices / (self.progress.devices_at_work or 1)

    @cached_property
    def law(self) -> Swept | None:
        """The law of steps against batch size; None if fewer than two batch sizes have trainings.

        It is what `noisescale compare` finds in the trainings that have an evaluation.
        """
        return sweep_of("", "", self.outcomes)

    @property
    def outcomes(self) -> list[Outcome]:
        """The outcomes of all trainings that have an evaluation."""
        every = [each for size in self.sizes for each in size.results]
        return [each.outcome for each in every if len(each.steps)]

    def write_files(self, folder: Path) -> None:
        """Write the files of a sweep.

        `sweep.csv` has a line for each repetition of the best point that reached the goal, at each
        batch size whose search is done. A batch size has none if the middle repetition missed the
        goal: the others were lucky. It has none either if the best learning rate is still at the
        edge: a better one may lie beyond, and `compare` leaves it out of the law, too.
        `noisescale fit` and `predict --sweep` take it.

        `trials.csv` has all evaluations, for `noisescale compare`. Both are the same whoever
        trained what, except for the times of `trials.csv` and how far trainings without a chance
        were trained.
        """
        write_csv(folder / SWEEP, _best(self.sizes))
        write_csv(folder / TRIALS, _evaluations(self.sizes, self.job.goal.metric))

    def document(self) -> Document:
        """Return what a sweep says; while it is under way, how far it is at each batch size."""
        tables = [sizes_table(self), *progress_tables(self.progress)]
        progress = progress_sentence(self)
        if not self.finished:
            return Document(
                title=f"Sweep to {self.job.goal}: under way",
                headline=progress,
                answers=(),
                tables=tables,
                doubts=doubts_before(self.job),
                status="under way",
                next=[self.progress.join],
            )

        def figures() -> Sequence[Figure]:
            from noisescale.lab.compare.figures import figures_of

            trials = [outcome.trial for outcome in self.outcomes]  # those that have an evaluation
            if not trials:
                return ()
            return figures_of(compare(trials, self.job.goal, by="steps"))

        shown = [] if self.law is None else statements_of_sweep(self.law)
        statements = [replace(each, label=each.label.capitalize()) for each in shown]
        headline = f"No training reached {self.job.goal}"
        if self.reached:
            critical = statements.pop(0) if statements else Statement("", "unknown")
            unit = " examples" if critical.bounds is not None else ""
            headline = f"Critical batch size for {self.job.goal}: {critical.sentence}{unit}"
        warnings = () if self.law is None else self.law.warnings
        doubts = [*doubts_before(self.job), *warnings, *doubts_about(self.sizes, self.job.epochs)]
        folder = self.progress.place.output
        files = {"Steps": SWEEP, "Evaluations": TRIALS} if folder is not None else {}
        return Document(
            title=headline,
            headline=headline,
            answers=[*statements, Statement("Trainings", progress)],
            tables=tables,
            figures=figures,
            doubts=[*doubts, *self.progress.doubts],
            how_to_read=_HOW_TO_READ,
            written=[f"{what}: {folder / name}" for what, name in files.items() if folder],
            next=_next(self),
        )

    def to_dict(self) -> dict[str, Any]:
        """Return a sweep, finished or under way, in builtin types.

        | key | meaning |
        |---|---|
        | `name`, `kind` | the name of the sweep in its storage; "sweep" |
        | `done`, `expected`, `finished` | trainings that have ended; all, as far as is known |
        | `failures` | the reason of each training that was given up, by its key |
        | `workers` | what each busy worker trains |
        | `goal`, `device_hours`, `seconds_left` | spent so far and the time left; None is unknown |
        | `batch_sizes` | trainings, steps to the goal and best learning rate of each batch size |
        """
        record: dict[str, Any] = finite(
            {
                **self.progress.to_dict(),
                "goal": str(self.job.goal),
                "expected": self.expected_trainings,
                "finished": self.finished,
                "device_hours": round(self.progress.device_hours, 4),
                "seconds_left": self.seconds_left,
                "batch_sizes": [size.as_dict() for size in self.sizes],
            }
        )
        return record


def progress_sentence(found: Sweep) -> str:
    """Return how far a sweep is, and what it has cost."""
    progress, left = found.progress, found.seconds_left
    spent = f"{hours(progress.device_hours)} device-hours spent"
    if found.finished:
        return f"{plural(len(progress.ended), 'training')} done, {spent}"
    time = "" if math.isnan(left) else f", about {duration(left)} left"
    return (
        f"{len(progress.ended)} of about {plural(found.expected_trainings, 'training')} done,"
        f" {plural(len(progress.running), 'training')} under way, {spent}{time}"
    )


def sizes_table(found: Sweep) -> Table:
    """Return the table of what was found at each batch size."""
    failed = any(size.count(FAILED) for size in found.sizes)
    out = any(size.count(OUT_OF_STEPS) for size in found.sizes)
    headings = ["batch size", "trained", "reached", "diverged", "stopped early"]
    headings += [*(["out of steps"] if out else []), *(["failed"] if failed else [])]
    return Table(
        title=f"Steps to {found.job.goal}",
        headings=[*headings, "steps", "learning rate", "search"],
        lines=[_line_of(size, out=out, failed=failed) for size in found.sizes],
        notes=["Stopped early: trainings that took longer than the best one, and could not win."],
    )


def _line_of(size: SweptSize, *, out: bool, failed: bool) -> Line:
    known, about = size.best is not None, "" if size.finished else "about "
    cells = [
        count(size.batch_size),
        f"{len(size.results)} of {about}{size.expected_trainings}",
        count(size.reached),
        count(size.count(DIVERGED)),
        count(size.count(PRUNED)),
        *([count(size.count(OUT_OF_STEPS))] if out else []),
        *([count(size.count(FAILED))] if failed else []),
        count(round(size.steps)) if known else "",
        f"{size.learning_rate:.3g}" if known else "",
        "done" if size.finished else "",
    ]
    return Line([Cell(text) for text in cells])


def _next(found: Sweep) -> list[str]:
    """Return the commands that take the files of the sweep."""
    folder, goal = found.progress.place.output, found.job.goal
    if folder is None or not found.reached:
        return []
    reached = f"{goal.metric}{goal.side}{'' if goal.strict else '='}{goal.value!r}"
    compare = ["noisescale", "compare", str(folder / TRIALS), "--goal", reached]
    after = [f"Compare the trainings:\n  {shlex.join([*compare, '--html', 'sweep.html'])}"]
    if found.law is not None and found.law.regimes is not None:
        fit = shlex.join(["noisescale", "fit", str(folder / SWEEP)])
        after.insert(0, f"See how well the law fits:\n  {fit}")
    return after


def _best(sizes: Sequence[SweptSize]) -> Iterator[Sequence[Any]]:
    yield "batch_size", "steps", "learning_rate", "seed"
    for size in sizes:
        if not size.finished or size.best is None or size.best_is_at_edge:
            continue
        for each in size.search.best:
            if each.reached:
                steps = f"{each.outcome.at('steps'):.15g}"
                yield size.batch_size, steps, f"{each.learning_rate:g}", each.seed


def _evaluations(sizes: Sequence[SweptSize], metric: str) -> Iterator[Sequence[Any]]:
    results = [each for size in sizes for each in size.results]
    names = list(dict.fromkeys(name for each in results for name in each.hyperparameters))
    yield "batch_size", *names, "seed", "step", "seconds", metric, "ended"
    for each in results:
        setting = f"{each.batch_size:.15g}", *(f"{each.hyperparameters[n]:g}" for n in names)
        for step, seconds, value in zip(each.steps, each.seconds, each.values, strict=True):
            yield *setting, each.seed, step, seconds, value, each.ended


def doubts_before(job: SweepJob) -> list[str]:
    """Return what makes a sweep doubtful before anything is trained."""
    found = []
    if job.own.schedules:
        found.append(SCHEDULED.format(", ".join(job.own.schedules)))
    if job.own.met:
        found.append(MET.format(job.goal))
    if job.own.seeded and job.search.repeats > 1:
        found.append(SEEDED.format(job.training.target))
    return [*found, *doubts_about_module(job.own, job.goal.metric)]


def doubts_about(sizes: Sequence[SweptSize], epochs: float) -> list[str]:
    """Return what the trainings of a sweep make doubtful."""
    doubts = []
    if alike := [size.batch_size for size in sizes if size.repetitions_are_alike]:
        doubts.append(ALIKE.format(_list(alike)))
    if short := [s.batch_size for s in sizes if s.count(OUT_OF_STEPS) and not s.reached]:
        doubts.append(TOO_SHORT.format(_list(short), epochs))
    return doubts


def _list(batch_sizes: list[int]) -> str:
    return ", ".join(f"{size:,}" for size in batch_sizes)
