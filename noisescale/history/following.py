# SPDX-License-Identifier: Apache-2.0
"""Follow a run while it trains: its history so far, from its growing files."""

from __future__ import annotations

from os import PathLike
from pathlib import Path

from noisescale.history.history import History
from noisescale.history.log import Log
from noisescale.history.metric_names import prefix_of
from noisescale.history.reading import history_in, open_rows
from noisescale.history.run_files import files_of_rows, runs_in
from noisescale.history.trackers import RECORD
from noisescale.refusal import FileRefusal, Refusal

NOT_YET = ("unmeasured", "empty")
"""Words of the errors that may disappear as the run logs more."""


class FollowedRun:
    """A run whose files may grow, be replaced, or not exist yet. The files are only read.

    Each reading adds what was written since the last reading, up to the last whole record or line.
    If the files are replaced, as by a CSVLogger when a run is resumed, they are read from the
    beginning. If another run begins in the folder, that run is followed from then on.

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
        """The folder or file of the run; None until a run is found."""
        self.of_runs = 0
        """The number of runs from which this run was chosen."""
        self.history: History | None = None
        """The history so far; None before the first whole row."""
        self.others: list[str] = []
        """Names of other metrics in the files; perhaps not all."""
        self.last_row_at: float | None = None
        """The time at which the last row was logged, in seconds since the epoch."""
        self.unread = 0
        """The number of bytes after the last whole record or line."""
        self._asked = monitor or "", optimizer
        self._known: set[Path] = set()
        self._log: Log | None = None
        self._find()

    def read(self) -> bool:
        """Read what was added. Return whether there was anything new.

        Raises:
            ValueError: If the files are damaged, or contain another monitor than the one asked for.
            OSError: If the run does not exist any more.
        """
        if self.run is None:
            self._find()
        if (run := self.run) is None:
            return False
        if not (run.exists() or run.parent.is_file()):  # a run in a database
            raise FileRefusal(
                run,
                "exist while it is watched",
                "one that was moved or deleted",
                "Start the command again with the new path of the run.",
            )
        if not (files := files_of_rows(run)):  # a CSVLogger deletes its file before it begins anew
            self._log = None
            return self._find() and self.read()
        try:
            if self._log is None or self._log.replaced(files):
                self._log = open_rows(run, files)
            added = self._log.read(files)
        except FileNotFoundError:  # it was replaced between the look and the reading
            self._log = None
            return False
        self.unread = self._log.unread
        if added:
            self._take(self._log, run)
        return added or (self._find() and self.read())

    def _find(self) -> bool:
        """Choose the newest run, if none is chosen yet or one has begun since the last call."""
        runs = runs_in(self.path)
        begun = [run for run in runs if run not in self._known and not self._has(run)]
        self._known |= set(runs)
        if not begun:
            return False
        self.run, self.of_runs = begun[-1], len(runs)
        self._log, self.history, self.others, self.last_row_at = None, None, [], None
        return True

    def _has(self, run: Path) -> bool:
        """Return whether a folder is in the run. TensorBoard's `add_scalars` makes such folders."""
        return self.run is not None and run.is_relative_to(self.run)

    def _take(self, log: Log, run: Path) -> None:
        monitor, optimizer = self._asked
        self.last_row_at = log.last_row_at
        self.history, self.others = None, log.other_names(prefix_of(optimizer, monitor))
        try:
            self.history = history_in(log, run, monitor, optimizer)
        except Refusal as error:
            # The record may have appeared since the files were looked for: it is read next time.
            begun = error.word == "unrecorded" and files_of_rows(run)[0].name == RECORD
            if error.word not in NOT_YET and not begun:
                raise
