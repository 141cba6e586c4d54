# SPDX-License-Identifier: Apache-2.0
"""What the commands of jobs share: options of workers, and what is shown under way."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from noisescale.cli.from_function import Given
from noisescale.lab.jobs.job_progress import JobAnswer, end_of
from noisescale.lab.jobs.storage import without_password
from noisescale.printable import printable
from noisescale.refusal import Refusal
from noisescale.report.numbers import plural
from noisescale.user_code.targets import is_first, shorten_errors

WORKERS = {
    "Workers and machines": "storage name workers launcher launcher_options lease cold per_device"
}


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


BY_WORKERS: dict[str, Given | str] = {
    "storage": Given(metavar="PLACE"),
    "launcher_options": Given(
        list[str],
        "Option of the launcher, as name=value. For slurm a parameter of submitit's AutoExecutor,"
        " such as slurm_partition=gpu; for ray an argument of ray.init, such as address=auto. May"
        " be repeated.",
        flag="--launcher-option",
        metavar="OPTION",
        read=launcher_options,
    ),
}
"""Texts of options that differ from those of the functions."""


@contextmanager
def interruptible(place: str | Path) -> Iterator[None]:
    """Treat SIGTERM as Ctrl-C. After either of them, print how to go on, and exit with code 1.

    Args:
        place: Where finished trainings are kept.
    """

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
    except (KeyboardInterrupt, SystemExit) as stopped:
        if isinstance(stopped, SystemExit) and stopped.code != 1:  # with 1 Lightning was stopped
            raise
        kept = printable(without_password(str(place)))
        if is_first():
            print(
                f"noisescale: stopped. Finished trainings are kept in {kept}. The same command"
                " goes on.",
                file=sys.stderr,
            )
        raise SystemExit(1) from None
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


@contextmanager
def in_sight(storage: str) -> Iterator[Callable[[JobAnswer], None]]:
    """Have a job trained by a command: its errors are one line, and its progress is shown.

    At first it prints how further workers join, and what makes the job doubtful. Then a terminal
    has the latest headline and tables. A file has a line for each training that has ended.

    Args:
        storage: Where the state is kept, for who stops the command.
    """
    from rich.console import Console

    from noisescale.report.text import text_of

    console = Console(stderr=True, highlight=False)
    told: set[str] | None = None
    with interruptible(storage), shorten_errors(), console.status("Starting...") as status:

        def show(answer: JobAnswer) -> None:
            nonlocal told
            document, ended = answer.document(), answer.progress.ended
            lines: list[str] = []
            if told is None:
                told = {each.key for each in ended}
                lines += [*document.next, *document.doubts] if document.status != "done" else []
            if console.is_terminal:
                status.update(text_of(replace(document, answers=(), doubts=(), next=())))
            else:
                new = [each for each in ended if each.key not in told]
                so_far = f"{plural(len(ended), 'training')} done"
                if document.status != "done":
                    so_far = document.headline.partition(", ")[0]
                lines += [
                    f"{end_of(each)}{f' ({so_far})' if each is new[-1] else ''}" for each in new
                ]
                told |= {each.key for each in new}
            for line in lines:
                console.print(printable(line), markup=False, soft_wrap=True)

        yield show
