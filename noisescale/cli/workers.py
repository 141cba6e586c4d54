# SPDX-License-Identifier: Apache-2.0
"""Options of the commands that have trainings done by workers, and what they share."""

from __future__ import annotations

import math
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from noisescale.printable import printable

if TYPE_CHECKING:
    from noisescale.tuning.jobs import Job
    from noisescale.tuning.launchers import Workers
    from noisescale.tuning.ledger import Entry, Ledger

WORKERS = "Workers and machines"

Storage = Annotated[
    str,
    typer.Option(
        metavar="PLACE",
        help="Where the state is kept: a journal file, also on a shared disk; the URL of a database"
        " (postgresql://..., mysql://..., sqlite:///...); or grpc://host:port of Optuna's proxy.",
        rich_help_panel=WORKERS,
    ),
]
StorageOrNone = Annotated[
    str | None,
    typer.Option(
        metavar="PLACE",
        help="Where the state is kept, as for `noisescale sweep`. Without it and without a launcher"
        " the branches are trained here, one after the other.",
        rich_help_panel=WORKERS,
    ),
]
WorkerCount = Annotated[
    int,
    typer.Option(
        help="Workers that this command starts. 0: it only watches, and the work is done by"
        " `noisescale work` elsewhere.",
        rich_help_panel=WORKERS,
    ),
]
Launcher = Annotated[
    str,
    typer.Option(
        help="Where the workers run: local, slurm (by submitit) or ray.", rich_help_panel=WORKERS
    ),
]
LauncherOrNone = Annotated[
    str | None,
    typer.Option(
        help="Have branches trained by workers: local, slurm (by submitit) or ray.",
        rich_help_panel=WORKERS,
    ),
]
LauncherOptions = Annotated[
    list[str] | None,
    typer.Option(
        "--launcher-option",
        metavar="OPTION",
        help="Option of the launcher, as name=value. For slurm a parameter of submitit's"
        " AutoExecutor, such as slurm_partition=gpu; for ray an argument of ray.init, such as"
        " address=auto. May be repeated.",
        rich_help_panel=WORKERS,
    ),
]
Lease = Annotated[
    float,
    typer.Option(
        help="Seconds of silence after which the workers of this command count as lost, and their"
        " trainings are put back.",
        rich_help_panel=WORKERS,
    ),
]
JobName = Annotated[
    str | None,
    typer.Option(
        "--name",
        help="Name of the job. Default: the only one in the storage.",
        rich_help_panel=WORKERS,
    ),
]

TOO_LARGE = (
    "`--max-device-batch-size` must fit in memory, got batches that do not. Give a smaller number:"
    " larger batches are then accumulated."
)

SHOWN_EVERY = 2.0
"""Seconds between two looks at the ledger."""


def check_workers(workers: int, lease: float) -> None:
    """Raise a ValueError if the number of workers, or their lease, is impossible."""
    if workers < 0:
        raise ValueError(f"`workers` must not be negative, got {workers}. Give 1.")
    if not 1 <= lease < math.inf:
        raise ValueError(f"`lease` must be at least 1 second, and finite, got {lease:g}. Give 60.")


def options_of(texts: Sequence[str] | None) -> dict[str, Any]:
    """Return the options of a launcher. Numbers become numbers.

    Raises:
        ValueError: If one is not written as name=value.

    Examples:
        >>> options_of(["timeout_min=60", "slurm_partition=gpu"])
        {'timeout_min': 60, 'slurm_partition': 'gpu'}
    """
    found: dict[str, Any] = {}
    for text in texts or ():
        name, sign, value = text.partition("=")
        if not (name and sign and value):
            raise ValueError(
                f"`--launcher-option` must be written as name=value, got {text!r}. Write, for"
                " example, slurm_partition=gpu."
            )
        number = value.lstrip("-").isdigit()
        found[name] = int(value) if number else {"true": True, "false": False}.get(value, value)
    return found


def trained_by_workers(
    ledger: Ledger,
    job: Job,
    place: str,
    output: Path,
    *,
    workers: int,
    launcher: str,
    options: dict[str, Any],
    accelerator: str = "auto",
    show: Callable[[Mapping[str, Entry]], None],
) -> None:
    """Start workers, and wait until the job is done, whoever does it.

    Args:
        ledger: Of the job.
        job: The job.
        place: Of the storage.
        output: Folder of the trainings.
        workers: How many are started.
        launcher: See `launch`.
        options: Of the launcher.
        accelerator: Of the trainings.
        show: Called with the ledger's entries at each look.

    Raises:
        ValueError: If every worker has stopped before the end.
    """
    from noisescale.tuning.launchers import launch
    from noisescale.tuning.ledger import results_of
    from noisescale.tuning.storage import patiently
    from noisescale.tuning.trial_process import end_with_stdin

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
            results = results_of(entries)
            if known != results.keys():  # else nothing else is wanted
                known, finished = set(results), job.finished(results, entries)
            show(entries)
            if finished:
                break
            if started is None and workers:
                folder = output / "workers"
                started = launch(
                    launcher,
                    command,
                    workers,
                    folder,
                    devices=job.devices,
                    accelerator=accelerator,
                    options=options,
                )
            elif started is not None and not started.running():
                _refuse_to_go_on(ledger, job, started)
            time.sleep(SHOWN_EVERY)
    finally:
        if started is not None:
            _until_they_end(started, patiently=not sys.exc_info()[0])


def _until_they_end(started: Workers, *, patiently: bool) -> None:
    """Let workers see that the job is done, and stop those that do not."""
    until = time.monotonic() + (10.0 if patiently else 0.0)
    while started.running() and time.monotonic() < until:
        time.sleep(0.2)
    started.stop()


def _refuse_to_go_on(ledger: Ledger, job: Job, started: Workers) -> None:
    from noisescale.tuning.ledger import results_of
    from noisescale.tuning.storage import patiently

    entries = patiently(ledger.entries)
    if job.finished(results_of(entries), entries):
        return
    printed = [line for line in started.printed().splitlines() if line.strip()]
    ours = [line for line in printed if "noisescale: " in line]
    said = (ours or printed or ["a worker was killed"])[-1].rpartition("noisescale: ")[2]
    raise ValueError(
        f"{printable(said)} All workers have stopped. Finished trainings are kept: the same command"
        " goes on."
    )


def made_folder(output: Path) -> None:
    """Make the folder of the results.

    Raises:
        ValueError: If it cannot be made.
    """
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(
            f"`output` must be a folder that can be written, got {printable(output)}:"
            f" {error.strerror}. Name another folder."
        ) from error


def work_command(place: str, name: str) -> list[str]:
    """Return the command by which further workers join."""
    from noisescale.tuning.storage import shown

    return ["noisescale", "work", "--storage", printable(shown(place)), "--name", printable(name)]


@contextmanager
def stopped(place: str) -> Iterator[None]:
    """Take SIGTERM for Ctrl-C, and say after either how to go on."""

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    except KeyboardInterrupt:
        from noisescale.tuning.storage import shown

        print(
            "noisescale: stopped. Finished trainings are kept in"
            f" {printable(shown(place))}. The same command goes on.",
            file=sys.stderr,
        )
        raise SystemExit(1) from None
    finally:
        signal.signal(signal.SIGTERM, before)


def own_name() -> str:
    """Return what the launcher calls this worker; "" without a launcher."""
    return os.environ.get("SLURM_JOB_ID", "")
