# SPDX-License-Identifier: Apache-2.0
"""Follow a run while it trains: its history so far, from its growing record."""

from __future__ import annotations

import warnings
from os import PathLike
from pathlib import Path

from noisescale.history.history import History
from noisescale.history.reading import history_in, optimizers_in, read_document
from noisescale.history.record import RECORD
from noisescale.history.run_files import runs_in
from noisescale.refusal import FileRefusal, Refusal

NOT_YET = ("unmeasured", "empty", "unrecorded")
"""Words of the errors that may disappear as the run trains on."""


class FollowedRun:
    """A run whose record may grow, be replaced, or not exist yet. It is only read.

    If another run begins in the folder, that run is followed from then on.

    Args:
        path: See `read_run`. In a folder with several runs, the run that was written last is
            followed.
        optimizer: See `read_run`.
        monitor: See `read_run`.

    Raises:
        OSError: If the path does not exist.
    """

    def __init__(
        self, path: str | PathLike[str], *, optimizer: int = 0, monitor: str | None = None
    ) -> None:
        self.path = Path(path)
        self.run: Path | None = None
        """The folder of the run; None until a run is found."""
        self.of_runs = 0
        """The number of runs from which this run was chosen."""
        self.history: History | None = None
        """The history so far; None before the first whole row."""
        self.why_nothing = ""
        """Why there is no history, if that is known."""
        self.optimizers: tuple[int, ...] = ()
        """The numbers of the optimizers of which the record has something."""
        self.last_row_at: float | None = None
        """The time at which the last row was written, in seconds since the epoch."""
        self.optimizer = optimizer
        self._monitor = monitor or ""
        self._known: set[Path] = set()
        self._seen: tuple[int, int, int] | None = None
        self._find()

    def read(self) -> bool:
        """Read the record, if it has changed. Return whether there was anything new.

        Raises:
            ValueError: If the record is damaged.
            OSError: If the run does not exist any more.
        """
        if self.run is not None and not self.run.exists():
            raise FileRefusal(
                self.run,
                "exist while it is watched",
                "one that was moved or deleted",
                "Start the command again with the new path of the run.",
            )
        self._find()
        if self.run is None:
            return False
        file = self.run / RECORD
        try:
            now = file.stat()
        except FileNotFoundError:  # it is written again, with all rows
            return False
        seen = now.st_ino, now.st_size, now.st_mtime_ns
        if seen == self._seen:
            return False
        self._seen, self.last_row_at = seen, now.st_mtime
        self.history, self.why_nothing = None, ""
        try:
            with warnings.catch_warnings():  # the last line may be under way
                warnings.simplefilter("ignore")
                document = read_document(file)
                self.optimizers = optimizers_in(document, self._monitor)
                self.history = history_in(document, self.run, self._monitor, self.optimizer)
        except Refusal as error:
            if error.word not in NOT_YET:
                raise
            self.why_nothing = error.remedy if error.word == "unmeasured" else ""
        return True

    def _find(self) -> None:
        """Choose the newest run, if none is chosen yet or one has begun since the last call."""
        try:
            runs = runs_in(self.path)
        except Refusal as error:
            if error.word not in NOT_YET:
                raise
            return
        begun = [run for run in runs if run not in self._known]
        self._known |= set(runs)
        if begun:
            self.run, self.of_runs = begun[-1], len(runs)
            self.history, self.last_row_at, self._seen = None, None, None
