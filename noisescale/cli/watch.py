# SPDX-License-Identifier: Apache-2.0
"""`noisescale watch RUN`."""

from __future__ import annotations

import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from noisescale.checks import require_positive
from noisescale.cli.from_function import Given, Values, command_from

if TYPE_CHECKING:
    from noisescale.history.following import FollowedRun
    from noisescale.prediction.prediction import Prediction

TICK = 1.0
"""Seconds between two updates of the screen. Files are read every `--every` seconds."""

TERMINATED = 128 + signal.SIGTERM
"""The exit code of a command that this signal ended."""

HOW_TO_END = "Press Ctrl-C to end."

EXAMPLE = "noisescale watch lightning_logs"


@command_from(
    "predict",
    {
        "run": Given(Path, "Folder of a run that trains now. Of several runs the newest is shown."),
        "optimizer": Given(default=0, help="Number of the optimizer, if several were measured."),
    },
    positional="run",
    only="run optimizer monitor",
)
def watch_run(
    values: Values,
    every: Annotated[
        float, typer.Option(help="Seconds between two readings of the run's record.")
    ] = 5.0,
    once: Annotated[
        bool,
        typer.Option("--once", help="Print once and exit. Without a terminal this is the default."),
    ] = False,
) -> None:
    """Show the noise scale of a run while it trains, and the present advice."""
    with suppress(KeyboardInterrupt):  # Ctrl-C is how to end it
        require_positive("every", every, "Pass 5 to read the files every 5 seconds.")
        live = sys.stdout.isatty() and not once
        _watch(**values, every=every if live else None)


def _watch(run: Path, optimizer: int, monitor: str | None, every: float | None) -> None:
    """Show the state of a run again and again; once if `every` is None."""
    from rich.console import Console
    from rich.live import Live

    from noisescale.history.following import FollowedRun
    from noisescale.prediction.watching import state_of

    followed = FollowedRun(run, optimizer=optimizer, monitor=monitor)
    found = _look(followed, None)
    console = Console(highlight=False)
    if every is None:
        console.print(state_of(followed, found, time.time()))
        return
    # `Live` hides the cursor until it ends, so the signal has to end `Live` first.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(TERMINATED))
    with Live(console=console, auto_refresh=False) as live:
        looked = time.monotonic()
        try:
            while True:
                live.update(state_of(followed, found, time.time(), HOW_TO_END), refresh=True)
                time.sleep(min(TICK, every))
                if time.monotonic() - looked >= every:
                    found, looked = _look(followed, found), time.monotonic()
        finally:
            live.update(state_of(followed, found, time.time()), refresh=True)


def _look(
    followed: FollowedRun, found: Prediction | ValueError | None
) -> Prediction | ValueError | None:
    """Read what was added. Return the present prediction, or the reason why there is none."""
    from noisescale.prediction.predict import predict

    if not followed.read():
        return found
    if followed.history is None:
        return None
    try:
        return predict(followed.history)
    except ValueError as error:
        return error
