# SPDX-License-Identifier: Apache-2.0
"""What a command shows while a job is under way."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from noisescale.lab.jobs.job_progress import JobAnswer, end_of
from noisescale.lab.jobs.storage import without_password
from noisescale.made.targets import is_first, shorten_errors
from noisescale.printable import printable
from noisescale.report.numbers import plural


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
