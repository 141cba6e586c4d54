# SPDX-License-Identifier: Apache-2.0
"""What a sweep says: a document, for a sweep that is finished and for one under way."""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from dataclasses import replace

from noisescale.lab.compare.compare import compare
from noisescale.lab.compare.statements import statements_of_sweep
from noisescale.lab.jobs.job_progress import duration, progress_tables
from noisescale.lab.jobs.jobs import FAILED
from noisescale.lab.sweep.doubts import doubts_after, doubts_before
from noisescale.lab.sweep.files import SWEEP, TRIALS
from noisescale.lab.sweep.results import DIVERGED, OUT_OF_STEPS, PRUNED
from noisescale.lab.sweep.sweep_record import SweepRecord, SweptSize
from noisescale.report.document import Cell, Document, Figure, Line, Statement, Table
from noisescale.report.numbers import count, hours, number, plural

_HOW_TO_READ = (
    "Steps are those of the middle repetition of the best setting at each batch size. Below the"
    " critical batch size larger batches save steps at almost no cost in examples. Above it they"
    " save few steps. The critical batch size is that of the law S(B) = S_min (1 + (B_crit/B)^α)"
    "^(1/α), fitted to the steps of all repetitions."
)


def document_of(found: SweepRecord) -> Document:
    """Return what a sweep says. While it is under way, that is how far it is at each batch size."""
    if not found.finished:
        progress = progress_sentence(found)
        return Document(
            title=f"Sweep to {found.job.goal}: under way",
            headline=progress,
            answers=(),
            tables=[sizes_table(found), *progress_tables(found.progress)],
            doubts=doubts_before(found.job),
            status="under way",
            next=[found.progress.join],
        )

    def figures() -> Sequence[Figure]:
        from noisescale.lab.compare.figures import figures_of

        trials = [outcome.trial for outcome in found.outcomes]  # those that have an evaluation
        if not trials:
            return ()
        return figures_of(compare(trials, found.job.goal, by="steps"))

    statements = statements_of(found)
    headline = f"No training reached {found.job.goal}"
    if found.reached:
        critical = statements.pop(0) if statements else Statement("", "unknown")
        unit = " examples" if critical.bounds is not None else ""
        headline = f"Critical batch size for {found.job.goal}: {critical.sentence}{unit}"
    return Document(
        title=headline,
        headline=headline,
        answers=[*statements, Statement("Trainings", progress_sentence(found))],
        tables=[sizes_table(found), *progress_tables(found.progress)],
        figures=figures,
        doubts=[*doubts_before(found.job), *doubts_after(found)],
        how_to_read=_HOW_TO_READ,
        written=_files(found),
        next=_next(found),
    )


def statements_of(found: SweepRecord) -> list[Statement]:
    """Return what the batch sizes show: the critical one first, then the borders of the regimes."""
    statements = [] if found.law is None else statements_of_sweep(found.law)
    return [replace(each, label=each.label.capitalize()) for each in statements]


def progress_sentence(found: SweepRecord) -> str:
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


def sizes_table(found: SweepRecord) -> Table:
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
        number(size.steps) if known else "",
        f"{size.learning_rate:.3g}" if known else "",
        "done" if size.finished else "",
    ]
    return Line([Cell(text) for text in cells])


def _files(found: SweepRecord) -> list[str]:
    folder = found.progress.place.output
    if folder is None:
        return []
    return [f"Steps: {folder / SWEEP}", f"Evaluations: {folder / TRIALS}"]


def _next(found: SweepRecord) -> list[str]:
    """Return the commands that take the files of the sweep."""
    folder, goal = found.progress.place.output, found.job.goal
    if folder is None or not found.reached:
        return []
    reached = f"{goal.metric}{goal.side}{'' if goal.strict else '='}{goal.value!r}"
    compare = ["noisescale", "compare", str(folder / TRIALS), "--goal", reached]
    after = [f"Compare the trainings: {shlex.join([*compare, '--html', 'sweep.html'])}"]
    if found.law is not None and found.law.regimes is not None:
        fit = shlex.join(["noisescale", "fit", str(folder / SWEEP)])
        after.insert(0, f"See how well the law fits: {fit}")
    return after
