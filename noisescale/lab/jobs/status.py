# SPDX-License-Identifier: Apache-2.0
"""`status`: how far the job of a storage is, for who looks at it from elsewhere."""

from __future__ import annotations

from noisescale.lab.jobs.job_progress import JobProgress
from noisescale.lab.jobs.known_jobs import job_from
from noisescale.lab.jobs.ledger import Ledger
from noisescale.lab.jobs.workers import Place
from noisescale.lab.sweep.answer import Sweep
from noisescale.lab.sweep.settings import SweepJob
from noisescale.lab.tune.answer import Tune
from noisescale.lab.tune.tune_job import TuneJob
from noisescale.report.answer import Answer


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
        return Sweep.of(job, entries, place)
    if isinstance(job, TuneJob):
        return Tune.of(job, entries, place)
    return JobProgress.of(job, entries, place, finished=job.is_finished(entries))
