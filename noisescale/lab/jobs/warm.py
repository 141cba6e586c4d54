# SPDX-License-Identifier: Apache-2.0
"""Start trainings from a process that has imported their packages already.

A process that imports torch and Lightning takes seconds before its first step. So the first
training of a worker is an ordinary process, and tells which packages it has imported. Then
`multiprocessing`'s fork server imports these packages once, and each training is a fork of it. A
fork begins with the packages and with nothing of other trainings. It loads the user's module itself
and its steps are those of an ordinary process.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Callable
from pathlib import Path

from noisescale.lab.jobs.forked import tell_why_not, train_forked
from noisescale.lab.jobs.trial_process import (
    IMPORTS,
    IMPORTS_WANTED,
    PRINTED,
    REPORT,
    ColdProcess,
    Running,
)

SERVER_ENDED = 255
"""The code that `multiprocessing` tells of a fork whose server has ended.

A script that exits with this code has its next trainings cold, too. That changes no result.
"""


class Starts:
    """Start trainings, each as a fork if that is known to change nothing.

    Args:
        devices: Of each training. Several have a process each, and are never forked.
        cold: Whether no training is forked.
        on_event: Called with a line about what happens.
    """

    def __init__(self, devices: int, *, cold: bool, on_event: Callable[[str], None]) -> None:
        self._devices, self._on_event = devices, on_event
        self._wants_report = not cold and devices == 1 and sys.platform == "linux"
        self._report: Path | None = None
        self._last: WarmProcess | None = None
        self._is_warm = False

    def start(self, folder: Path) -> Running:
        """Start the training whose task is in a folder."""
        if self._last is not None and self._last.code == SERVER_ENDED:
            self._give_up("the process from which they were forked was ended")
        if self._is_warm:
            try:
                self._last = WarmProcess(folder)
                return self._last
            except (OSError, EOFError) as error:  # the server was killed, or no process can start
                self._give_up(f"no fork was made ({type(error).__name__}: {error})")
        if not self._wants_report:
            return ColdProcess(folder, self._devices)
        self._report = folder
        return ColdProcess(folder, 1, {IMPORTS_WANTED: "1"})

    def prepare(self) -> None:
        """Import what the first training has reported. It takes as long as the imports do."""
        if not self._wants_report or self._report is None:
            return
        report = self._report / IMPORTS
        if not report.exists():  # it has failed: the next one may tell more
            return
        self._wants_report = False
        reason = begin_server(report)
        if reason:
            self._give_up(reason)
        else:
            self._is_warm = True

    def _give_up(self, reason: str) -> None:
        self._last, self._is_warm = None, False
        self._on_event(f"each training imports its packages anew: {reason}")


class WarmProcess:
    """A training that is a fork of the server. The training ends when this process ends.

    Args:
        folder: Of the training.
    """

    def __init__(self, folder: Path) -> None:
        (folder / PRINTED).write_bytes(b"")  # the fork may be killed before it opens the file
        context = multiprocessing.get_context("forkserver")
        self._process = context.Process(target=train_forked, args=(str(folder),))
        self._process.start()

    def wait(self, seconds: float) -> bool:
        """Wait for some seconds, and return whether the process has ended."""
        self._process.join(seconds)
        return self._process.exitcode is not None

    @property
    def code(self) -> int:
        """The code with which the process has ended, or minus the signal that ended it."""
        return int(self._process.exitcode or 0)

    def kill(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.join()


def begin_server(report: Path) -> str:
    """Have the server import what a training has reported.

    Returns:
        Why no training may be forked from it; "" if trainings may.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["noisescale.lab.jobs.preload"])
    os.environ[REPORT] = str(report)
    try:
        heard, told = context.Pipe(duplex=False)
        process = context.Process(target=tell_why_not, args=(told,))
        process.start()
        told.close()
        reason: str = heard.recv()
        process.join()
    except EOFError:
        return "the imports have ended their process"
    except OSError as error:
        return f"no process for the imports can be started ({error})"
    finally:
        del os.environ[REPORT]
    return reason
