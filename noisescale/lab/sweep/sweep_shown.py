# SPDX-License-Identifier: Apache-2.0
"""A sweep that is going on, in lines and tables of a terminal and in JSON."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from noisescale.printable import printable
from noisescale.report.document import Cell, Line, Table
from noisescale.report.numbers import count, hours, number, plural

if TYPE_CHECKING:
    from noisescale.history.metrics import Goal
    from noisescale.lab.jobs.jobs import Entry, Job
    from noisescale.lab.sweep.table import SizeProgress, SweepProgress


def progress_line(found: SweepProgress) -> str:
    """Return how far a sweep is."""
    running = plural(len(found.running), "training")
    spent = f"{hours(found.device_hours)} device-hours spent"
    if found.finished:
        return f"{plural(found.done, 'training')} done, {spent}."
    left = "" if math.isnan(found.seconds_left) else f", about {_span(found.seconds_left)} left"
    return (
        f"{found.done} of about {plural(found.expected, 'training')} done, {running} under way,"
        f" {spent}{left}."
    )


def sizes_table(goal: Goal, sizes: Sequence[SizeProgress]) -> Table:
    """Return the table as it stands: what was found at each batch size."""
    failed = any(size.failed for size in sizes)
    out = any(size.out_of_steps for size in sizes)
    headings = ["batch size", "trained", "reached", "diverged", "stopped early"]
    headings += [*(["out of steps"] if out else []), *(["failed"] if failed else [])]
    headings += ["steps", "learning rate", "search"]
    return Table(
        title=f"Steps to {goal}",
        headings=headings,
        lines=[_size_line(size, out=out, failed=failed) for size in sizes],
        notes=["Stopped early: trainings that took longer than the best one, and could not win."],
    )


def _size_line(size: SizeProgress, *, out: bool, failed: bool) -> Line:
    known = not math.isnan(size.steps)
    cells = [
        count(size.batch_size),
        f"{size.done} of {'' if size.finished else 'about '}{size.expected}",
        count(size.reached),
        count(size.diverged),
        count(size.pruned),
        *([count(size.out_of_steps)] if out else []),
        *([count(size.failed)] if failed else []),
        number(size.steps) if known else "",
        f"{size.learning_rate:.3g}" if known else "",
        "done" if size.finished else "",
    ]
    return Line([Cell(text) for text in cells], [])


def workers_table(entries: Mapping[str, Entry]) -> Table:
    """Return a table of the workers that are training."""
    from noisescale.lab.jobs.worker import workers_of

    now = time.time()
    lines = [
        Line(
            [
                Cell(printable(_worker(entry))),
                Cell(printable(entry.key)),
                Cell("" if math.isnan(entry.started) else _span(max(0.0, now - entry.started))),
                Cell(count(entry.attempt)),
            ],
            [],
        )
        for entry in workers_of(entries)
    ]
    return Table(
        title=f"{plural(len(lines), 'worker')} at work",
        headings=["worker", "trains", "for", "attempt"],
        lines=lines,
        notes=[],
    )


def status_as_dict(name: str, job: Job, entries: Mapping[str, Entry]) -> dict[str, Any]:
    """Return the state of a job as JSON can hold it."""
    from dataclasses import asdict

    from noisescale.lab.jobs.ledger import results_of
    from noisescale.lab.jobs.worker import workers_of
    from noisescale.lab.sweep.settings import SweepJob
    from noisescale.lab.sweep.table import failures_in, sweep_progress
    from noisescale.lab.tune.standing import tune_progress
    from noisescale.lab.tune.tune_job import TuneJob
    from noisescale.lab.tune.tune_shown import tuned_as_dict

    found: dict[str, Any] = {
        "name": name,
        "kind": job.kind,
        "done": len(results_of(entries)),
        "failures": failures_in(entries),
        "workers": [
            {"trains": each.key, "attempt": each.attempt, **each.worker}
            for each in workers_of(entries)
        ],
    }
    if isinstance(job, SweepJob):
        progress = sweep_progress(job, entries)
        found |= {
            "goal": str(job.goal),
            "expected": progress.expected,
            "finished": progress.finished,
            "device_hours": round(progress.device_hours, 4),
            "seconds_left": _known(progress.seconds_left),
            "batch_sizes": [
                {name: _known(value) for name, value in asdict(size).items()}
                for size in progress.sizes
            ],
        }
    if isinstance(job, TuneJob):
        found |= tuned_as_dict(job, tune_progress(job, entries))
    return found


def _known(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _worker(entry: Entry) -> str:
    worker = entry.worker
    named = f" ({worker['name']})" if worker.get("name") else ""
    return f"{worker.get('host', 'starting')}:{worker.get('process', '')}{named}"


def _span(seconds: float) -> str:
    """Write a time in the unit that suits it.

    Examples:
        >>> _span(42.0), _span(600.0), _span(9000.0)
        ('42 s', '10 min', '2.5 h')
    """
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
