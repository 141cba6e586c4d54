# SPDX-License-Identifier: Apache-2.0
"""What `tune` returns: all trainings, how far the search is, and what both say."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from noisescale.csv_lines import write_csv
from noisescale.lab.jobs.job_progress import JobAnswer, JobProgress, progress_tables
from noisescale.lab.jobs.jobs import Entry
from noisescale.lab.jobs.workers import Place
from noisescale.lab.sweep.settings import doubts_about_module
from noisescale.lab.tune.cost_front import CostFront, Setting
from noisescale.lab.tune.tables import cost_unit, front_table, settings_of, tables_of
from noisescale.lab.tune.tune_job import TuneJob, values_of
from noisescale.report.document import Document, Figure, Statement
from noisescale.report.numbers import Duration, four_digits, hours, plural
from noisescale.report.records import fields_of, finite

TRIALS, FRONT = "trials.csv", "front.csv"
"""The files: all trainings, and those of the front."""

MOST_UNDER_WAY = 12
"""Lines of the front that are shown while the search goes on."""

_HOW_TO_READ = (
    "Cost is the time of training on one device, times the devices, without the start of the"
    " process and without evaluations. The front has the trainings that no cheaper one equals. A"
    " result may be lucky: repeat the setting that you choose with other seeds. A power of 0.5 says"
    " that a parameter doubles where the cost is four times as high; where its interval includes"
    " 0, the parameter may as well stay as it is."
)

SCHEDULED = (
    "The module has a learning-rate schedule ({}). Trainings differ in their steps: make it as long"
    " as each training is, by `trainer.estimated_stepping_batches`."
)

NOT_OWN = (
    "The first training, called your own settings, has {} = {} where your module and loader have"
    " {}: the search begins there, or its range leaves yours out."
)

RISES = "{} sounds like a metric that should rise, and is minimised. If so, add `--maximize`."

_RISING = ("acc", "accuracy", "f1", "auc", "auroc", "precision", "recall", "reward", "return")


@dataclass(frozen=True)
class Tune(JobAnswer):
    """What `tune` found, and the ways to show it."""

    front: CostFront
    budget: float | None = None
    """Device-hours; None for no limit."""
    most_trials: int | None = None
    """None for no limit."""
    doubts: tuple[str, ...] = ()
    """Reasons to doubt the search, whatever comes out of it."""

    @classmethod
    def of(cls, job: TuneJob, entries: Mapping[str, Entry], place: Place) -> Tune:
        """Return what the tasks of a search have found.

        Args:
            job: The search.
            entries: All tasks of its ledger, by their keys.
            place: The storage, the name of the search in it, and the folder of the results.
        """
        progress = JobProgress.of(job, entries, place, finished=job.is_finished(entries))
        front = CostFront.of(job, entries)
        return cls(progress, front, job.budget, job.trials, tuple(doubts_about(job)))

    def write_files(self, folder: Path) -> None:
        """Write the trainings and the front as CSV files. Neither is ever left half-written."""
        found = self.front
        names = [each.name for each in found.searched]
        every: list[Sequence[Any]] = [
            (
                "trial",
                *names,
                "examples_of_a_step",
                "steps",
                "device_seconds",
                found.metric,
                "ended",
            )
        ]
        for trial in found.trials:
            values = [trial.parameters[name] for name in names]
            numbers = (trial.batch_size, trial.steps, trial.cost, trial.value)
            every.append((trial.number, *values, *map(_number, numbers), trial.ended))
        best: list[Sequence[Any]] = [
            ("device_seconds", found.metric, *names, "trainings", "first trial")
        ]
        for each in found.front:
            values = [each.first.parameters[name] for name in names]
            means = (each.cost, each.value)
            best.append((*map(_number, means), *values, len(each.trials), each.first.number))
        write_csv(folder / TRIALS, every)
        write_csv(folder / FRONT, best)

    def document(self) -> Document:
        """Return what a search says. While it is under way, the front has its best lines alone."""
        front, place = self.front, self.progress.place

        def figures() -> Sequence[Figure]:
            from noisescale.lab.tune.figures import figures_of

            return figures_of(front)

        if not self.finished:
            shown = [front_table(front, MOST_UNDER_WAY)] if front.front else []
            return Document(
                title=f"Search for the best {front.metric}: under way",
                headline=progress_sentence(self),
                answers=list(statements_of(front)),
                tables=[*shown, *progress_tables(self.progress)],
                figures=figures,
                doubts=self.doubts,
                how_to_read=_HOW_TO_READ,
                status="under way",
                next=[self.progress.join],
            )
        headline = headline_of(front)
        written = [("Trainings", TRIALS), ("Front", FRONT)]
        return Document(
            title=f"{headline}: cost and result",
            headline=headline,
            answers=[*statements_of(front), Statement("Trainings", progress_sentence(self))],
            tables=[*tables_of(front), *progress_tables(self.progress)],
            figures=figures,
            doubts=self.doubts,
            how_to_read=_HOW_TO_READ,
            written=[f"{what}: {place.output / name}" for what, name in written if place.output],
            next=_next(self),
        )

    def to_dict(self) -> dict[str, Any]:
        """Return a search, finished or under way, in builtin types.

        | key | meaning |
        |---|---|
        | `name`, `kind` | the name of the search in its storage; "tune" |
        | `done`, `finished` | trainings that have ended, whether nothing is left to train |
        | `failures` | the reason of each training that was given up, by its number |
        | `workers` | what each busy worker trains |
        | `metric`, `maximize` | the result, and whether it is to rise |
        | `device_hours`, `budget`, `most_trials` | spent so far, the limits; None for no limit |
        | `trials` | parameters, cost and result of each training; None is unknown |
        | `front` | cost, result and parameters of the settings that are the best for their cost |
        | `scaling_laws` | the power of the cost of each parameter's growth; None without a law |
        """
        front = self.front
        record: dict[str, Any] = finite(
            {
                **self.progress.to_dict(),
                **fields_of(front, "metric", "maximize"),
                "finished": self.finished,
                "device_hours": round(self.progress.device_hours, 4),
                **fields_of(self, "budget", "most_trials"),
                "trials": [
                    {
                        "number": trial.number,
                        "parameters": dict(trial.parameters),
                        "device_seconds": trial.cost,
                        **fields_of(trial, "value", "ended", "steps"),
                    }
                    for trial in front.trials
                ],
                "front": [
                    {
                        "device_seconds": each.cost,
                        "value": each.value,
                        "parameters": dict(each.first.parameters),
                        "trials": [trial.number for trial in each.trials],
                    }
                    for each in front.front
                ],
                "scaling_laws": {
                    name: law and fields_of(law, "power", "low", "high", "resolved")
                    for name, law in front.laws.items()
                },
            }
        )
        return record


def headline_of(front: CostFront) -> str:
    """Return the answer of a finished search in one sentence."""
    trainings = plural(len(front.trials), "training")
    if front.best is None:
        return f"No training has a result, of {trainings}"
    return f"Best {front.metric} of {trainings}: {four_digits(front.best.value)}"


def _next(found: Tune) -> list[str]:
    """Return how to search on, if a training has a result."""
    if found.front.best is None:
        return []
    limits = [] if found.most_trials is None else [f"--trials {2 * found.most_trials}"]
    limits += [] if found.budget is None else [f"--budget {2 * found.budget:.3g}h"]
    return [f"Next: search on with the same command and {' '.join(limits)}"] if limits else []


def progress_sentence(found: Tune) -> str:
    """Return how far a search is, what it has cost, and the best result."""
    front, progress = found.front, found.progress
    failed = len(front.failures)
    done = len(front.trials) - failed
    parts = [f"{plural(done, 'training')} done"]
    if found.most_trials is not None and done <= found.most_trials:
        parts[0] = f"{done} of {plural(found.most_trials, 'training')} done"
    parts += [f"{failed} without a result"] if failed else []
    parts += [] if found.finished else [f"{len(progress.running)} under way"]
    of = f" of {hours(found.budget)}" if found.budget is not None else ""
    said = f"{', '.join(parts)}, {hours(progress.device_hours)}{of} device-hours spent"
    if found.finished or front.best is None:
        return said
    return f"{said}. Best {front.metric}: {_result(front.best, cost_unit(front))}"


def statements_of(front: CostFront) -> Iterator[Statement]:
    """Yield the best result, the result of the module's own settings, and what equals it."""
    best = front.best
    if best is None:
        yield Statement("Best", "no training has a result yet")
        return
    unit = cost_unit(front)

    def statement(label: str, said: str, setting: Setting) -> Statement:
        parts = [Statement("with", settings_of(front, setting))]
        return Statement(label, said, basis="measured", parts=parts)

    yield statement("Best", f"{front.metric} {_result(best, unit)}", best)
    own = next((each for each in front.settings if each.first.number == 0), None)
    if own is None:
        return
    said = f"{front.metric} {_result(own, unit)}"
    yield Statement("Your own settings", said, basis="measured")
    sign = -1.0 if front.maximize else 1.0
    as_good = next(each for each in front.front if sign * each.value <= sign * own.value)
    if as_good.cost < own.cost / 1.05:
        less = f"{own.cost / as_good.cost:.1f} times less cost: {_result(as_good, unit)}"
        yield statement("As good for less", less, as_good)


def _result(each: Setting, unit: Duration) -> str:
    return f"{four_digits(each.value)} for {unit(each.cost / 3600)} device-{unit.name}"


def doubts_about(job: TuneJob) -> list[str]:
    """Return what makes a search doubtful, whatever comes out of it."""
    found = []
    words = job.metric.lower().replace("/", "_").split("_")
    if not job.maximize and words[-1] in _RISING:
        found.append(RISES.format(job.metric))
    sized = [name for name in job.own.schedules if name != "ReduceLROnPlateau"]
    if sized and not job.own.schedules_fit:
        found.append(SCHEDULED.format(", ".join(sized)))
    known = values_of(job.own)
    for each in job.parameters:
        own, first = known.get(each.name), each.center
        if own is None or first is None or isinstance(first, str):
            continue
        if not math.isclose(own, first, rel_tol=1e-5):
            found.append(NOT_OWN.format(each.name, four_digits(first), four_digits(own)))
    return [*found, *doubts_about_module(job.own, job.metric)]


def _number(value: float) -> str:
    return "" if math.isnan(value) else f"{value:.10g}"
