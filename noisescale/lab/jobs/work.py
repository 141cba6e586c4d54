# SPDX-License-Identifier: Apache-2.0
"""`noisescale work --storage PLACE` and `noisescale status --storage PLACE`."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import replace
from pathlib import Path

from noisescale.cli.from_function import Given, Values, command_from
from noisescale.cli.showing import Json, show
from noisescale.lab.jobs.live import BY_WORKERS, WORKERS, interruptible
from noisescale.lab.jobs.workers import WorkersToStart
from noisescale.printable import printable
from noisescale.refusal import rename_arguments
from noisescale.user_code.targets import refuse_if_not_here

SHARING = "NOISESCALE_PER_DEVICE"
"""The environment variable that tells a worker how many workers share its devices."""

EXAMPLE = "noisescale work --storage /shared/sweep.journal"
STATUS_EXAMPLE = "noisescale status --storage /shared/sweep.journal"


OF_A_JOB = {
    **BY_WORKERS,
    "storage": Given(
        str,
        "Where the state is kept: a journal file, also on a shared disk; the URL of a database"
        " (postgresql+psycopg://..., mysql+pymysql://..., sqlite:///...); or grpc://host:port of"
        " Optuna's proxy.",
        metavar="PLACE",
        default=...,
    ),
    "name": Given(help="Name of the job. Default: the only one in the storage.", default=None),
    "output": "Folder for the trainings of this worker.",
}


@command_from("sweep", OF_A_JOB, only="storage name output lease cold per_device", panels=WORKERS)
def work_on(values: Values) -> None:
    """Train for a sweep, a search or branches until all is done. Start it on any machine.

    Start it in the folder in which the command was started, or in a copy of it: the function that
    makes module and data must be there.
    """
    from noisescale.lab.jobs.ledger import Ledger
    from noisescale.lab.jobs.status import job_from
    from noisescale.lab.jobs.trial_process import end_with_stdin
    from noisescale.lab.jobs.worker import Worker

    storage, name, output, lease, cold, per_device = values.values()
    end_with_stdin(gently=True)
    with rename_arguments({"target": "TARGET"}), interruptible(storage):
        started = WorkersToStart(lease=lease, cold=cold, per_device=per_device)
        ledger = Ledger.open(storage, name, lease)
        job = job_from(ledger.job)
        for target in (job.training.target, job.training.data):
            refuse_if_not_here(target or "")
        if per_device > 1:
            command = ["--storage", storage, "--name", ledger.name, "--output", str(output)]
            command += replace(started, per_device=1).work_options
            _work_side_by_side(command, per_device, output / "workers")
            return
        Worker(
            ledger,
            job,
            output,
            name=os.environ.get("SLURM_JOB_ID", ""),
            cold=cold,
            device=_device_of_worker(job.training.accelerator),
            sharing=int(os.environ.get(SHARING, "1")),
            on_event=lambda line: print(printable(line), flush=True),
        ).work()
        print("Nothing is left to train.", flush=True)


def _work_side_by_side(options: list[str], count: int, folder: Path) -> None:
    """Start workers that share the devices of this one, and wait until all have ended."""
    from noisescale.lab.jobs.launchers import LocalWorkers

    command = [sys.executable, "-m", "noisescale", "work", *options]
    started = LocalWorkers(command, folder, [{SHARING: str(count)}] * count)
    try:
        while started.running():
            time.sleep(0.2)
    finally:
        started.stop()
    if failed := started.last_output():
        print(printable(failed), file=sys.stderr)
        raise SystemExit(2)
    print("Nothing is left to train.", flush=True)


def _device_of_worker(accelerator: str) -> str:
    """Return the name of the devices that a launcher gave to this worker; "" if it gave none."""
    if accelerator == "cpu":
        return "CPU"
    gpus = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    return f"GPU {gpus}" if gpus else ""


@command_from("sweep", OF_A_JOB, only="storage name", panels=WORKERS)
def show_status(values: Values, as_json: Json = False) -> None:
    """Show how far a sweep or a search is, and who is training what."""
    from noisescale.lab.jobs.status import status

    show(status(**values), as_json=as_json)
