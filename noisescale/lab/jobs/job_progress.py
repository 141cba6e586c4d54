# SPDX-License-Identifier: Apache-2.0
"""How far a job is, and who trains what."""

from __future__ import annotations

import math
import shlex
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from noisescale.lab.jobs.jobs import FAILED, Entry, Job, State, device_hours
from noisescale.lab.jobs.workers import Place
from noisescale.report.document import Cell, Line, Table
from noisescale.report.numbers import count, plural


@dataclass(frozen=True)
class JobProgress:
    """How far a job is, whatever its kind."""

    place: Place
    kind: str
    done: int
    """The number of trainings that are done or were given up."""
    failures: Mapping[str, str]
    """The reason of each training that was given up, by the key of its task."""
    running: tuple[Entry, ...]
    """The trainings under way, one for each busy worker."""
    device_hours: float
    """Spent so far, with the starts of processes and with evaluations."""
    finished: bool
    """Whether nothing is left to train."""

    def as_dict(self) -> dict[str, Any]:
        """Return the progress as JSON can hold it."""
        return {
            "name": self.place.name,
            "kind": self.kind,
            "done": self.done,
            "failures": dict(self.failures),
            "workers": [
                {"trains": each.key, "attempt": each.attempt, **each.worker}
                for each in self.running
            ],
        }

    @property
    def join(self) -> str:
        """A sentence that ends with the command by which further workers join."""
        return f"Further workers join with: {shlex.join(self.place.work_command)}"


def progress_of_job(
    job: Job, entries: Mapping[str, Entry], place: Place, *, finished: bool
) -> JobProgress:
    """Return how far a job is. `finished` says whether nothing is left to train."""
    ended = {key: each for key, each in entries.items() if each.result}
    return JobProgress(
        place=place,
        kind=job.kind,
        done=len(ended),
        failures={k: each.result[FAILED] for k, each in ended.items() if FAILED in each.result},
        running=tuple(each for each in entries.values() if each.state is State.RUNNING),
        device_hours=device_hours(entries),
        finished=finished,
    )


def workers_table(progress: JobProgress) -> Table:
    """Return a table of the workers that are training."""
    now = time.time()
    lines = [
        Line(
            [
                Cell(_worker_of(entry)),
                Cell(entry.key),
                Cell("" if math.isnan(entry.started) else duration(max(0.0, now - entry.started))),
                Cell(count(entry.attempt)),
            ]
        )
        for entry in progress.running
    ]
    title = f"{plural(len(lines), 'worker')} at work"
    return Table(title, ["worker", "trains", "for", "attempt"], lines)


def duration(seconds: float) -> str:
    """Write a time in the unit that suits it.

    Examples:
        >>> duration(42.0), duration(600.0), duration(9000.0)
        ('42 s', '10 min', '2.5 h')
    """
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def _worker_of(entry: Entry) -> str:
    worker = entry.worker
    name = f" ({worker['name']})" if worker.get("name") else ""
    return f"{worker.get('host', 'starting')}:{worker.get('process', '')}{name}"
