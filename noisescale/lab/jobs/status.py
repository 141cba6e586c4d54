# SPDX-License-Identifier: Apache-2.0
"""`status`: how far the job of a storage is, for who looks at it from elsewhere."""

from __future__ import annotations

from typing import Any

from noisescale.lab.branch.branch_job import BranchJob
from noisescale.lab.jobs.job_progress import JobProgress
from noisescale.lab.jobs.jobs import Job, Record
from noisescale.lab.jobs.ledger import Ledger
from noisescale.lab.jobs.workers import Place
from noisescale.lab.sweep.answer import Sweep
from noisescale.lab.sweep.settings import SweepJob
from noisescale.lab.tune.answer import Tune
from noisescale.lab.tune.tune_job import TuneJob
from noisescale.refusal import Refusal
from noisescale.report.answer import Answer

_KINDS: dict[str, Any] = {each.kind: each for each in (SweepJob, BranchJob, TuneJob)}


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


def job_from(record: Record) -> Job:
    """Return the job whose record a ledger has.

    Raises:
        ValueError: If the record is of a newer version of the package.
    """
    fields = dict(record)
    kind = fields.pop("kind")
    try:
        job: Job = _KINDS[kind].from_dict(fields)
    except (KeyError, TypeError) as error:
        raise Refusal(
            "storage",
            "have a job of this version of noisescale",
            f"{kind!r} with other settings ({error})",
            "Use the same version on all machines.",
        ) from error
    return job
