# SPDX-License-Identifier: Apache-2.0
"""What a command shows while a job is under way."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

from noisescale.lab.jobs.worker_options import interruptible
from noisescale.made.targets import shorten_errors
from noisescale.refusal import rename_arguments
from noisescale.report.answer import Answer


@contextmanager
def in_sight(flags: Mapping[str, str], storage: str) -> Iterator[Callable[[Answer], None]]:
    """Have a job trained by a command: its errors are one line, and its progress is shown.

    Args:
        flags: The names of arguments on the command line.
        storage: Where the state is kept, for who stops the command.
    """
    with rename_arguments(flags), interruptible(storage), shorten_errors(), live() as progress:
        yield progress


@contextmanager
def live() -> Iterator[Callable[[Answer], None]]:
    """Yield a function that shows an answer on the error stream while it is under way.

    At first it prints how further workers join, and what makes the job doubtful. Then a terminal
    has the latest headline and tables. A file has a line after each training.
    """
    from rich.console import Console

    from noisescale.printable import printable
    from noisescale.report.text import text_of

    console = Console(stderr=True, highlight=False)
    shown: str | None = None
    with console.status("Starting...") as status:

        def show(answer: Answer) -> None:
            nonlocal shown
            document = answer.document()
            if document.status == "done":
                return
            first = shown is None
            if first:
                for text in (*document.next, *document.doubts):
                    console.print(printable(text), markup=False, soft_wrap=True)
            done = document.headline.partition(",")[0]
            if console.is_terminal:
                status.update(text_of(replace(document, answers=(), doubts=(), next=())))
            elif not first and done != shown:
                console.print(printable(document.headline), markup=False, soft_wrap=True)
            shown = done

        yield show
