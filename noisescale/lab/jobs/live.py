# SPDX-License-Identifier: Apache-2.0
"""What a command shows while a job is under way."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from noisescale.lab.jobs.job_progress import JobAnswer, end_of
from noisescale.lab.jobs.worker_options import interruptible
from noisescale.made.targets import shorten_errors
from noisescale.report.numbers import plural


@contextmanager
def in_sight(storage: str) -> Iterator[Callable[[JobAnswer], None]]:
    """Have a job trained by a command: its errors are one line, and its progress is shown.

    Args:
        storage: Where the state is kept, for who stops the command.
    """
    with interruptible(storage), shorten_errors(), live() as progress:
        yield progress


@contextmanager
def live() -> Iterator[Callable[[JobAnswer], None]]:
    """Yield a function that shows an answer on the error stream while it is under way.

    At first it prints how further workers join, and what makes the job doubtful. Then a terminal
    has the latest headline and tables. A file has a line for each training that has ended.
    """
    from rich.console import Console

    from noisescale.printable import printable
    from noisescale.report.text import text_of

    console = Console(stderr=True, highlight=False)
    told: set[str] | None = None
    with console.status("Starting...") as status:

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
