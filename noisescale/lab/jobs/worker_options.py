# SPDX-License-Identifier: Apache-2.0
"""Options of the commands that have trainings done by workers."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated, Any

import typer

from noisescale.lab.jobs.storage import without_password
from noisescale.printable import printable
from noisescale.refusal import Refusal

WORKERS = "Workers and machines"

Storage = Annotated[
    str,
    typer.Option(
        metavar="PLACE",
        help="Where the state is kept: a journal file, also on a shared disk; the URL of a database"
        " (postgresql+psycopg://..., mysql+pymysql://..., sqlite:///...); or grpc://host:port of"
        " Optuna's proxy.",
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
Cold = Annotated[
    bool,
    typer.Option(
        "--cold",
        help="Have each training import its packages anew. Otherwise it is a fork of a process that"
        " has imported them, where that changes nothing.",
        rich_help_panel=WORKERS,
    ),
]
PerDevice = Annotated[
    int,
    typer.Option(
        help="Trainings side by side on each device, for small models. Their times are those of a"
        " device that they share.",
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


def launcher_options(texts: Sequence[str] | None) -> dict[str, Any]:
    """Return the options of a launcher from texts like "timeout_min=60".

    Raises:
        ValueError: If one is not written as name=value.

    Examples:
        >>> launcher_options(["timeout_min=60", "slurm_partition=gpu"])
        {'timeout_min': 60, 'slurm_partition': 'gpu'}
    """
    found: dict[str, Any] = {}
    for text in texts or ():
        name, sign, value = text.partition("=")
        if not (name and sign and value):
            raise Refusal(
                "--launcher-option",
                "be written as name=value",
                repr(text),
                "Write, for example, slurm_partition=gpu.",
            )
        number = value.lstrip("-").isdigit()
        found[name] = int(value) if number else {"true": True, "false": False}.get(value, value)
    return found


@contextmanager
def interruptible(place: str) -> Iterator[None]:
    """Treat SIGTERM as Ctrl-C. After either of them, print how to go on, and exit with code 1."""

    def interrupt(*_: Any) -> None:
        # Who ends a worker by Ctrl-C sends it this signal as well, and the worker is busy then.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise KeyboardInterrupt

    signals = [signal.SIGTERM]
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # else a shell has it ignored
        signals.append(signal.SIGINT)
    before = {each: signal.signal(each, interrupt) for each in signals}
    try:
        yield
    except KeyboardInterrupt:
        print(
            "noisescale: stopped. Finished trainings are kept in"
            f" {printable(without_password(place))}. The same command goes on.",
            file=sys.stderr,
        )
        raise SystemExit(1) from None
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
