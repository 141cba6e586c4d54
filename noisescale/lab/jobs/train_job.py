# SPDX-License-Identifier: Apache-2.0
"""Have a job trained: start workers, wait until the job is done, and report how far it is."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from noisescale.lab.jobs.jobs import Entry, Job, results_of
from noisescale.lab.jobs.launchers import Workers, launch
from noisescale.lab.jobs.storage import retry
from noisescale.lab.jobs.trial_process import end_with_stdin
from noisescale.lab.jobs.workers import Place, WorkersToStart
from noisescale.refusal import Refusal

if TYPE_CHECKING:
    from noisescale.lab.jobs.job_progress import JobAnswer
    from noisescale.lab.jobs.ledger import Ledger

Found = TypeVar("Found", bound="JobAnswer")

LOOK_EVERY = 2.0
"""Seconds between two looks at the ledger."""


def train_job(
    job: Job,
    place: Place,
    workers: WorkersToStart,
    found_in: Callable[[Mapping[str, Entry]], Found],
    progress: Callable[[Found], None] | None = None,
) -> Found:
    """Begin a job or go on with it, have it trained, and return what was found.

    Its files are written whenever there is a new result.

    Args:
        job: The job.
        place: The storage, the name of the job in it, and the folder of the results.
        workers: The workers to start.
        found_in: Returns what the tasks of the ledger have found so far.
        progress: Called every `LOOK_EVERY` seconds with what was found so far.

    Raises:
        ValueError: If the storage has another job of this name, the folder cannot be made, or every
            worker has stopped before the end.
    """
    from noisescale.lab.jobs.ledger import Ledger  # it needs Optuna

    output = place.output
    assert output is not None
    _make_folder(output)
    ledger = Ledger.begin(place.storage, place.name, job, workers.lease)
    written: set[str] | None = None

    def look(entries: Mapping[str, Entry]) -> None:
        nonlocal written
        found = found_in(entries)
        if written != (ended := set(results_of(entries))):
            found.write_files(output)
            written = ended
        if progress is not None:
            progress(found)

    train_by_workers(ledger, job, place.storage, output, workers, look)
    found = found_in(retry(ledger.entries))
    found.write_files(output)
    return found


def train_by_workers(
    ledger: Ledger,
    job: Job,
    storage: str,
    output: Path,
    workers: WorkersToStart,
    look: Callable[[Mapping[str, Entry]], None],
) -> None:
    """Start workers, and wait until the job is done, whoever does it.

    Args:
        ledger: The ledger of the job.
        job: The job.
        storage: Where the ledger is.
        output: The folder of the trainings.
        workers: The workers to start.
        look: Called with the ledger's entries every `LOOK_EVERY` seconds.

    Raises:
        ValueError: If every worker has stopped before the end.
    """
    end_with_stdin(gently=True)
    storage = storage if "://" in storage else str(Path(storage).absolute())
    command = [sys.executable, "-m", "noisescale", "work", "--storage", storage]
    command += ["--name", ledger.name, "--output", str(output.absolute())]
    command += workers.work_options
    started: Workers | None = None
    known: set[str] | None = None
    finished = False
    try:
        while True:
            entries = retry(ledger.entries)
            if known != (ended := set(results_of(entries))):  # else nothing else is wanted
                known, finished = ended, job.is_finished(entries)
            look(entries)
            if finished:
                break
            if started is None and workers.workers:
                started = launch(
                    workers.launcher,
                    command,
                    workers.workers,
                    output / "workers",
                    devices=job.devices,
                    accelerator=workers.accelerator,
                    options=workers.launcher_options,
                )
            elif started is not None and not started.running():
                _refuse_to_go_on(ledger, job, started)
            time.sleep(LOOK_EVERY)
    finally:
        if started is not None:
            _end(started, wait=not sys.exc_info()[0])


def _make_folder(output: Path) -> None:
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise Refusal(
            "output",
            "be a folder that can be written",
            f"{output}: {error.strerror}",
            "Name another folder.",
        ) from error


def _end(started: Workers, *, wait: bool) -> None:
    """Let workers see that the job is done, and stop those that do not."""
    until = time.monotonic() + (10.0 if wait else 0.0)
    while started.running() and time.monotonic() < until:
        time.sleep(0.2)
    started.stop()


def _refuse_to_go_on(ledger: Ledger, job: Job, started: Workers) -> None:
    if job.is_finished(retry(ledger.entries)):
        return
    printed = [line for line in started.last_output().splitlines() if line.strip()]
    ours = [line for line in printed if "noisescale: " in line]
    reason = (ours or printed or ["a worker was killed"])[-1].rpartition("noisescale: ")[2]
    raise ValueError(
        f"{reason} All workers have stopped. Finished trainings are kept: the same command goes on."
    )
