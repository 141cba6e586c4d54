# SPDX-License-Identifier: Apache-2.0
"""`status`: how far a job of any kind is, from its storage."""

from __future__ import annotations

from typing import Any

from noisescale.lab.jobs.job_progress import JobProgress, progress_of_job, progress_tables
from noisescale.lab.jobs.known_jobs import job_from
from noisescale.lab.jobs.ledger import Ledger
from noisescale.lab.jobs.workers import Place
from noisescale.lab.sweep import sweep
from noisescale.lab.sweep.settings import SweepJob
from noisescale.lab.tune import tune
from noisescale.lab.tune.tune_job import TuneJob
from noisescale.report.answer import Answer
from noisescale.report.document import Document
from noisescale.report.numbers import hours, plural


class JobStatus(JobProgress, Answer):
    """How far a job is whose answer is not in its storage, such as branches."""

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
            doubts=[f"Failed: {key}: {why}" for key, why in self.failures.items()],
            status="done" if self.finished else "under way",
            next=() if self.finished else [self.join],
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the progress in builtins."""
        return self.as_dict()


def status(storage: str, name: str | None = None) -> Answer:
    """Return what a job has found so far: a `Sweep`, a `Tune`, or the progress of another job.

    Args:
        storage: Where the state is kept: a journal file, the URL of a database, or
            grpc://host:port of Optuna's proxy.
        name: Name of the job. Default: the only one in the storage.

    Raises:
        ValueError: If the storage cannot be opened, or has no such job.
    """
    ledger = Ledger.open(storage, name)
    job, entries = job_from(ledger.job), ledger.entries()
    place = Place(ledger.name, storage)
    if isinstance(job, SweepJob):
        return sweep.answer_of(job, entries, place)
    if isinstance(job, TuneJob):
        return tune.answer_of(job, entries, place)
    return JobStatus(
        **vars(progress_of_job(job, entries, place, finished=job.is_finished(entries)))
    )
