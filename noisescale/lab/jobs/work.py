# SPDX-License-Identifier: Apache-2.0
"""`noisescale work --storage PLACE` and `noisescale status --storage PLACE`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from noisescale.cli.values import flags_of
from noisescale.lab.jobs.workers import (
    JobName,
    Lease,
    Storage,
    check_workers,
    interruptible,
    own_name,
)
from noisescale.made.targets import refuse_if_not_here
from noisescale.printable import printable, printable_json
from noisescale.refusal import rename_arguments

EXAMPLE = "noisescale work --storage /shared/sweep.journal"
STATUS_EXAMPLE = "noisescale status --storage /shared/sweep.journal"


def work_on(
    storage: Storage,
    name: JobName = None,
    output: Annotated[Path, typer.Option(help="Folder for the trainings of this worker.")] = Path(
        "sweep"
    ),
    lease: Lease = 60.0,
) -> None:
    """Train for a sweep, a search or branches until all is done. Start it on any machine.

    Start it in the folder in which the command was started, or in a copy of it: the function that
    makes module and data must be there.
    """
    from noisescale.lab.jobs.known_jobs import job_from
    from noisescale.lab.jobs.ledger import Ledger
    from noisescale.lab.jobs.trial_process import end_with_stdin
    from noisescale.lab.jobs.worker import Worker

    end_with_stdin(gently=True)
    with (
        rename_arguments(flags_of(work_on) | {"storage": "--storage", "target": "TARGET"}),
        interruptible(storage),
    ):
        check_workers(1, lease)
        ledger = Ledger.open(storage, name, lease)
        job = job_from(ledger.job)
        for target in ("target", "data"):
            refuse_if_not_here(ledger.job["training"][target] or "")
        Worker(
            ledger,
            job,
            output,
            name=own_name(),
            on_event=lambda line: print(printable(line), flush=True),
        ).work()
        print("Nothing is left to train.", flush=True)


def show_status(
    storage: Storage,
    name: JobName = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Show how far a sweep or a search is, and who is training what."""
    from rich.console import Console

    from noisescale.lab.jobs.known_jobs import job_from
    from noisescale.lab.jobs.ledger import Ledger
    from noisescale.lab.sweep.settings import SweepJob
    from noisescale.lab.sweep.table import sweep_progress
    from noisescale.lab.tune.standing import tune_progress
    from noisescale.lab.tune.tune_job import TuneJob
    from noisescale.report.text import Section

    with rename_arguments(flags_of(show_status) | {"storage": "--storage"}):
        ledger = Ledger.open(storage, name)
        job, entries = job_from(ledger.job), ledger.entries()
    from noisescale.lab.sweep import sweep_shown
    from noisescale.lab.tune import tune_shown
    from noisescale.lab.tune.tuned_tables import front_tables

    if as_json:
        record = sweep_shown.status_as_dict(ledger.name, job, entries)
        print(printable_json(json.dumps(record, indent=2, ensure_ascii=False)))
        return
    console = Console(highlight=False)
    if isinstance(job, SweepJob):
        progress = sweep_progress(job, entries)
        console.print(sweep_shown.progress_line(progress), markup=False)
        console.print(Section(sweep_shown.sizes_table(job.goal, progress.sizes)))
    if isinstance(job, TuneJob):
        tuned = tune_progress(job, entries)
        console.print(tune_shown.progress_line(tuned), markup=False)
        console.print(*map(Section, front_tables(tuned.front)), sep="\n")
    console.print(Section(sweep_shown.workers_table(entries)))
