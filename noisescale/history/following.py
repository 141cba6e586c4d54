# SPDX-License-Identifier: Apache-2.0
"""Follow a run while it trains: its history so far, from its growing files."""

from __future__ import annotations

from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING

from noisescale.csv_lines import GrowingCsv
from noisescale.extras import need
from noisescale.history.history import History
from noisescale.history.metric_names import prefix_of
from noisescale.history.reading import CsvRows, history_of
from noisescale.history.run_error import RunError
from noisescale.history.run_files import files_of, runs_in
from noisescale.printable import printable

if TYPE_CHECKING:
    from noisescale.history.event_files import EventFile


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
        self._source: _Events | _Csv | None = None
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
        if not run.exists():
            raise FileNotFoundError(
                f"`{printable(run)}` must exist while it is watched, but was moved or deleted."
                " Start the command again with the new path of the run."
            )
        if not (files := files_of(run)):  # a CSVLogger deletes its file before it begins anew
            self._source = None
            return self._find() and self.read()
        try:
            source = self._source_of(files)
            added = source.read(files)
            self.unread = source.unread
        except FileNotFoundError:  # it was replaced between the look and the reading
            self._source = None
            return False
        if added:
            self._take(source)
        return added or (self._find() and self.read())

    def _find(self) -> bool:
        """Choose the newest run, if none is chosen yet or one has begun since the last call."""
        runs = runs_in(self.path)
        begun = [run for run in runs if run not in self._known and not self._has(run)]
        self._known |= set(runs)
        if not begun:
            return False
        self.run, self.of_runs = begun[-1], len(runs)
        self._source, self.history, self.others, self.last_row_at = None, None, [], None
        return True

    def _has(self, run: Path) -> bool:
        """Whether a folder lies within the run. TensorBoard's `add_scalars` makes such folders."""
        return self.run is not None and run.is_relative_to(self.run)

    def _source_of(self, files: list[Path]) -> _Events | _Csv:
        kind = _Csv if files[0].suffix == ".csv" else _Events
        if not isinstance(self._source, kind) or self._source.replaced(files):
            monitor, optimizer = self._asked
            self._source = kind(prefix_of(optimizer, monitor))
        return self._source

    def _take(self, source: _Events | _Csv) -> None:
        self.last_row_at = source.last_row_at
        self.history, self.others = None, [*source.rows.others]
        try:
            found = history_of(source.rows.columns(), printable(self.run), self._asked, self.others)
        except RunError as error:
            if error.word in NOT_YET:
                return
            raise
        found.source = self.run
        self.history = found


class _Events:
    """The event files of a run. A resumed run adds a file."""

    def __init__(self, prefix: str) -> None:
        need("tensorboard", "Reading event files")
        from noisescale.history.event_files import EventRows

        self.rows = EventRows(prefix)
        self._files: dict[Path, EventFile] = {}

    @property
    def last_row_at(self) -> float | None:
        return self.rows.last_row_at

    @property
    def unread(self) -> int:
        return sum(file.unread for file in self._files.values())

    def replaced(self, files: list[Path]) -> bool:
        """Return whether a file that was read is missing, or shorter than before."""
        known = self._files.items()
        return any(path not in files or file.unread < 0 for path, file in known)

    def read(self, files: list[Path]) -> bool:
        """Read what was added. Return whether there was anything new."""
        from noisescale.history.event_files import EventFile

        before = sum(file.whole for file in self._files.values())
        for path in files:
            if path not in self._files:
                self._files[path] = EventFile(path)
            self.rows.add_from(self._files[path])
        return sum(file.whole for file in self._files.values()) > before


class _Csv:
    """The file of a CSVLogger, or a similar file."""

    def __init__(self, prefix: str) -> None:
        self.rows = CsvRows(prefix)
        self.last_row_at: float | None = None
        self._file: GrowingCsv | None = None

    @property
    def unread(self) -> int:
        return self._file.unread if self._file else 0

    def replaced(self, files: list[Path]) -> bool:
        """Return whether the file was replaced."""
        return self._file is not None and (self._file.path not in files or self._file.replaced())

    def read(self, files: list[Path]) -> bool:
        """Read what was added. Return whether there was anything new."""
        (path,) = files
        if self._file is None:
            self._file = GrowingCsv(path)
        before = len(self.rows), len(self.rows.others)
        written = path.stat().st_mtime
        self.rows.add_from(path, self._file.added())
        if len(self.rows) > before[0]:
            self.last_row_at = written
        return (len(self.rows), len(self.rows.others)) != before
