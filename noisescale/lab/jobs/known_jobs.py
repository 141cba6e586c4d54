# SPDX-License-Identifier: Apache-2.0
"""All kinds of jobs, by their names."""

from __future__ import annotations

from typing import Any

from noisescale.lab.branch.branch_job import BranchJob
from noisescale.lab.jobs.jobs import Job, Record
from noisescale.lab.sweep.settings import SweepJob
from noisescale.lab.tune.tune_job import TuneJob
from noisescale.refusal import Refusal

_KINDS: dict[str, Any] = {each.kind: each for each in (SweepJob, BranchJob, TuneJob)}


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
