# SPDX-License-Identifier: Apache-2.0
"""How far a job is, and who trains what."""

from __future__ import annotations

import math
import shlex
import time
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from noisescale.lab.jobs.jobs import FAILED, Entry, Job, State, device_hours
from noisescale.lab.jobs.workers import Place
from noisescale.report.answer import Answer
from noisescale.report.document import Cell, Document, Line, Table
from noisescale.report.numbers import count, hours, plural


@dataclass(frozen=True)
class JobProgress(Answer):
    """How far a job is, whatever its kind. For branches it is all that the storage says."""

    place: Place
    kind: str
    ended: tuple[Entry, ...]
    """The trainings that are done or were given up."""
    running: tuple[Entry, ...]
    """The trainings under way, one for each busy worker."""
    device_hours: float
    """Spent so far, with the starts of processes and with evaluations."""
    finished: bool
    """Whether nothing is left to train."""

    @classmethod
    def of(
        cls, job: Job, entries: Mapping[str, Entry], place: Place, *, finished: bool
    ) -> JobProgress:
        """Return how far a job is. `finished` says whether nothing is left to train."""
        return cls(
            place=place,
            kind=job.kind,
            ended=tuple(each for each in entries.values() if each.result),
            running=tuple(each for each in entries.values() if each.state is State.RUNNING),
            device_hours=device_hours(entries.values()),
            finished=finished,
        )

    @property
    def failures(self) -> dict[str, str]:
        """The reason of each training that was given up, by the key of its task."""
        return {each.key: each.result[FAILED] for each in self.ended if FAILED in each.result}

    def document(self) -> Document:
        """Return how far the job is, and who trains what."""
        done = f"{plural(len(self.ended), 'training')} done"
        running = "" if self.finished else f", {plural(len(self.running), 'training')} under way"
        headline = f"{done}{running}, {hours(self.device_hours)} device-hours spent"
        return Document(
            title=headline,
            headline=headline,
            answers=(),
            tables=progress_tables(self),
            doubts=self.doubts,
            status="done" if self.finished else "under way",
            next=() if self.finished else [self.join],
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the progress in builtins."""
        return {
            "name": self.place.name,
            "kind": self.kind,
            "done": len(self.ended),
            "failures": self.failures,
            "workers": [
                {"trains": each.key, "attempt": each.attempt, **each.worker}
                for each in self.running
            ],
            "devices": [
                {
                    "device": device,
                    "workers": len({each.worker.get("process") for each in ended}),
                    "trainings": len(ended),
                    "failures": sum(FAILED in each.result for each in ended),
                    "device_hours": device_hours(ended),
                }
                for device, ended in self.by_device.items()
            ],
        }

    @property
    def doubts(self) -> list[str]:
        """A sentence for each training that was given up."""
        return [f"Failed: {key}: {why}" for key, why in self.failures.items()]

    @property
    def devices_at_work(self) -> float:
        """The devices under way, in those of one training: two that share one count half each."""
        return sum(1 / _sharing_of(each) for each in self.running)

    @property
    def by_device(self) -> dict[str, list[Entry]]:
        """The trainings that have ended, by the host and the device on which they ran."""
        found: dict[str, list[Entry]] = {}
        for each in self.ended:
            if host := each.worker.get("host"):
                device = each.worker.get("device")
                found.setdefault(f"{host}, {device}" if device else host, []).append(each)
        return dict(sorted(found.items()))

    @property
    def join(self) -> str:
        """A sentence that ends with the command by which further workers join."""
        return f"Further workers join with: {shlex.join(self.place.work_command)}"


@dataclass(frozen=True)
class JobAnswer(Answer):
    """The answer of a job of trainings, finished or under way."""

    progress: JobProgress

    @property
    def finished(self) -> bool:
        """Whether nothing is left to train."""
        return self.progress.finished

    @abstractmethod
    def write_files(self, folder: Path) -> None:
        """Write the files of the results. None is ever left half-written."""


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


def progress_tables(progress: JobProgress) -> list[Table]:
    """Return what each device has done and, before the end, what each worker trains."""
    tables = [devices_table(progress)] if progress.by_device else []
    return tables if progress.finished else [*tables, workers_table(progress)]


def devices_table(progress: JobProgress) -> Table:
    """Return a table of what each device has done."""
    lines = [
        Line(
            [
                Cell(each["device"]),
                Cell(count(each["workers"])),
                Cell(count(each["trainings"])),
                Cell(count(each["failures"])),
                Cell(hours(each["device_hours"])),
            ]
        )
        for each in progress.to_dict()["devices"]
    ]
    headings = ["device", "workers", "trainings", "failed", "device-hours"]
    return Table("What each device did", headings, lines)


def end_of(entry: Entry) -> str:
    """Return how a training has ended, after which time, and on which worker."""
    spent = entry.result.get("device_seconds")
    after = (
        ""
        if spent is None
        else f", {duration(_sharing_of(entry) * spent / entry.result['devices'])}"
    )
    how = entry.result.get("ended", "done")
    how = f"failed: {entry.result[FAILED]}" if FAILED in entry.result else how
    return f"{entry.key}: {how}{after}, on {_worker_of(entry)}"


def duration(seconds: float) -> str:
    """Write a time in the unit that suits it.

    Examples:
        >>> duration(42.0), duration(600.0), duration(9000.0)
        ('42 s', '10 min', '2.5 h')
    """
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def _sharing_of(entry: Entry) -> int:
    return int(entry.worker.get("sharing", 1))


def _worker_of(entry: Entry) -> str:
    worker = entry.worker
    name = f" ({worker['name']})" if worker.get("name") else ""
    return f"{worker.get('host', 'starting')}:{worker.get('process', '')}{name}"
