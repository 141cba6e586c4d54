# SPDX-License-Identifier: Apache-2.0
"""Start workers, wait until the job is done, and show how far it is."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from noisescale.lab.jobs.workers import WorkersToStart, work_command
from noisescale.printable import printable

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from noisescale.lab.jobs.jobs import Entry, Job
    from noisescale.lab.jobs.launchers import Workers
    from noisescale.lab.jobs.ledger import Ledger

    Shown = tuple[str, Iterable[RenderableType]]

SHOWN_EVERY = 2.0
"""Seconds between two looks at the ledger."""

LINE_EVERY = 300.0
"""Seconds between two lines of progress, where they go to a file."""


def train_in_sight(
    job: Job,
    place: str,
    name: str,
    output: Path,
    to_start: WorkersToStart,
    console: Console,
    doubts: Sequence[str],
    shown: Callable[[Mapping[str, Entry]], Shown],
) -> dict[str, Entry]:
    """Begin the job or go on with it, have it trained, and return the entries at its end.

    Args:
        job: The job.
        place: Of the storage.
        name: Of the job in the storage.
        output: Folder of the trainings.
        to_start: The workers.
        console: Where progress is shown: live on a terminal, now and then a line in a file.
        doubts: Printed before it starts.
        shown: Returns the line and the tables of the progress. Called at each look.

    Raises:
        ValueError: If every worker has stopped before the end.
    """
    from rich.console import Group
    from rich.text import Text

    from noisescale.lab.jobs.ledger import Ledger
    from noisescale.lab.jobs.storage import patiently

    ledger = Ledger.begin(place, name, job, to_start.lease)
    further = shlex.join(work_command(place, name))
    console.print(f"Further workers join with: {further}", markup=False, soft_wrap=True)
    for text in doubts:
        console.print(text, markup=False)
    said = time.monotonic()
    with console.status("Starting...") as status:

        def show(entries: Mapping[str, Entry]) -> None:
            nonlocal said
            line, tables = shown(entries)
            if console.is_terminal:
                status.update(Group(Text(line), *tables))
            elif time.monotonic() - said > LINE_EVERY:
                console.print(line, markup=False, soft_wrap=True)
                said = time.monotonic()

        train_by_workers(ledger, job, place, output, to_start, show)
    return patiently(ledger.entries)


def train_by_workers(
    ledger: Ledger,
    job: Job,
    place: str,
    output: Path,
    to_start: WorkersToStart,
    show: Callable[[Mapping[str, Entry]], None],
) -> None:
    """Start workers, and wait until the job is done, whoever does it.

    Args:
        ledger: Of the job.
        job: The job.
        place: Of the storage.
        output: Folder of the trainings.
        to_start: The workers.
        show: Called with the ledger's entries at each look.

    Raises:
        ValueError: If every worker has stopped before the end.
    """
    from noisescale.lab.jobs.launchers import launch
    from noisescale.lab.jobs.ledger import results_of
    from noisescale.lab.jobs.storage import patiently
    from noisescale.lab.jobs.trial_process import end_with_stdin

    end_with_stdin(gently=True)
    place = place if "://" in place else str(Path(place).absolute())
    command = [sys.executable, "-m", "noisescale", "work", "--storage", place]
    command += ["--name", ledger.name, "--output", str(output.absolute())]
    command += ["--lease", f"{ledger.lease:g}"]
    started: Workers | None = None
    known: set[str] | None = None
    finished = False
    try:
        while True:
            entries = patiently(ledger.entries)
            if known != (ended := results_of(entries).keys()):  # else nothing else is wanted
                known, finished = set(ended), job.is_finished(entries)
            show(entries)
            if finished:
                break
            if started is None and to_start.workers:
                folder = output / "workers"
                started = launch(
                    to_start.launcher,
                    command,
                    to_start.workers,
                    folder,
                    devices=job.devices,
                    accelerator=to_start.accelerator,
                    options=to_start.options,
                )
            elif started is not None and not started.running():
                _refuse_to_go_on(ledger, job, started)
            time.sleep(SHOWN_EVERY)
    finally:
        if started is not None:
            _until_they_end(started, patiently=not sys.exc_info()[0])


def _until_they_end(started: Workers, *, patiently: bool) -> None:
    """Let workers see that the job is done, and stop the workers that do not."""
    until = time.monotonic() + (10.0 if patiently else 0.0)
    while started.running() and time.monotonic() < until:
        time.sleep(0.2)
    started.stop()


def _refuse_to_go_on(ledger: Ledger, job: Job, started: Workers) -> None:
    from noisescale.lab.jobs.storage import patiently

    if job.is_finished(patiently(ledger.entries)):
        return
    printed = [line for line in started.last_output().splitlines() if line.strip()]
    ours = [line for line in printed if "noisescale: " in line]
    said = (ours or printed or ["a worker was killed"])[-1].rpartition("noisescale: ")[2]
    raise ValueError(
        f"{printable(said)} All workers have stopped. Finished trainings are kept: the same command"
        " goes on."
    )
