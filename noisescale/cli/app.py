# SPDX-License-Identifier: Apache-2.0
"""The command line: `noisescale predict`, `watch`, `compare`, `sweep`, `tune`, `branch`, ...

A bad option, argument or file ends with one line that names it and its remedy, and exit code 2.
"""

from __future__ import annotations

import atexit
import os
import re
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, TextIO

import typer

from noisescale._version import __version__
from noisescale.cli import fit, horizon, measure, predict, profile, rescale, watch
from noisescale.extras import MissingExtraError
from noisescale.lab.branch import command as branch
from noisescale.lab.compare import command as compare
from noisescale.lab.jobs import work
from noisescale.lab.sweep import command as sweep
from noisescale.lab.tune import command as tune
from noisescale.printable import printable

PATIENCE = 10.0
"""Seconds that threads of the user's script have to end."""

app = typer.Typer(
    name="noisescale",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    epilog="Example: noisescale predict lightning_logs/version_0",
)
for group, commands in {
    "Measure while training": (
        ("watch", watch.watch_run, watch.EXAMPLE),
        ("measure", measure.measure_weights, measure.EXAMPLE),
        ("profile", profile.profile_steps, profile.EXAMPLE),
    ),
    "Predict": (
        ("predict", predict.predict_run, predict.EXAMPLE),
        ("fit", fit.fit_sweep, fit.EXAMPLE),
        ("rescale", rescale.show_rescale, rescale.EXAMPLE),
        ("horizon", horizon.show_horizon, horizon.EXAMPLE),
    ),
    "Try many": (
        ("sweep", sweep.sweep_batch_sizes, sweep.EXAMPLE),
        ("tune", tune.tune_parameters, tune.EXAMPLE),
        ("branch", branch.branch_run, branch.EXAMPLE),
        ("work", work.work_on, work.EXAMPLE),
        ("status", work.show_status, work.STATUS_EXAMPLE),
    ),
    "About runs": (("compare", compare.compare_runs, compare.EXAMPLE),),
}.items():
    for name, command, example in commands:
        app.command(name, epilog=f"Example: {example}", rich_help_panel=group)(command)


def _print_version(asked: bool) -> None:
    if asked:
        print(f"noisescale {__version__}")
        raise typer.Exit


@app.callback()
def _of_all_commands(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Show the version and exit."
        ),
    ] = False,
) -> None:
    """Find the batch size to use, how certain it is, and what more devices would gain."""


_UsageError: Any = typer.BadParameter.__base__
"""The base class of click's errors. Newer versions of typer have a copy and do not export it."""


def main() -> None:
    """Run the command line.

    An error about an option, value or file is one line and code 2. A warning of ours is one line.
    """
    threads = threading.enumerate()
    try:
        with _warnings_in_a_line():
            code = app(prog_name=app.info.name, standalone_mode=False)
    except _UsageError as error:
        if not sys.argv[1:]:
            error.show()  # the help
            sys.exit(2)
        command = error.ctx.command_path if error.ctx else app.info.name
        _refuse(f"{error.format_message().rstrip()} See `{command} --help`.")
    except (ValueError, OSError, MissingExtraError) as error:
        _refuse(str(error))
    except typer.Abort:
        _refuse("Aborted.", code=1)
    else:
        sys.exit(code if isinstance(code, int) else 0)
    finally:
        _end_threads(threads, sys.exc_info()[1])


def _end_threads(before: list[threading.Thread], end: BaseException | None) -> None:
    """Exit although threads of the user's script go on, once they had some seconds to end.

    Python waits for them for ever.
    """
    until = time.monotonic() + PATIENCE
    # Python ends those of executors by itself, as far as they have nothing left to do.
    of_executors = getattr(sys.modules.get("concurrent.futures.thread"), "_threads_queues", ())
    known = {*before, *of_executors}
    others = [each for each in threading.enumerate() if each not in known and not each.daemon]
    for thread in others:
        thread.join(max(until - time.monotonic(), 0))
    if isinstance(end, SystemExit) and any(thread.is_alive() for thread in others):
        atexit._run_exitfuncs()  # which `os._exit` leaves out
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(end.code if isinstance(end.code, int) else 0)


@contextmanager
def _warnings_in_a_line() -> Iterator[None]:
    """Print warnings of this package without the place in its sources."""
    with warnings.catch_warnings():
        show, package = warnings.showwarning, Path(__file__).parents[1]

        def show_ours(
            message: Warning | str,
            category: type[Warning],
            filename: str,
            lineno: int,
            file: TextIO | None = None,
            line: str | None = None,
        ) -> None:
            if category is UserWarning and Path(filename).is_relative_to(package):
                _print_line(str(message))
            else:
                show(message, category, filename, lineno, file, line)

        warnings.showwarning = show_ours
        yield


def _refuse(message: str, code: int = 2) -> None:
    """Exit with one line."""
    _print_line(message)
    sys.exit(code)


def _print_line(message: str) -> None:
    """Print one line. Line breaks in messages and in names of files are removed."""
    line = re.sub(r"\s*\n\s*", " ", message)
    print(f"noisescale: {printable(line)}", file=sys.stderr)
