# SPDX-License-Identifier: Apache-2.0
"""Write the document of a run, while it trains, into a file beside the logger's files.

A logger gets what a person looks at. The record has all columns, see `noisescale.history.document`.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from uuid import uuid4

from noisescale.history.document import Line, Lines
from noisescale.history.history import History
from noisescale.printable import printable

RECORD = "noise_scale.jsonl"
"""The name of the file."""


class Recorder:
    """Append what is new of a history to the record in a folder.

    A run that was resumed in a new folder has its whole history there. What could not be written,
    as the disk was full or the folder was gone, is written with a later row, or at the end.

    Args:
        folder: The folder, which need not exist.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / RECORD
        self._lines: Lines | None = None
        """The lines in the file; None if they begin again with a header."""
        self._step: float | None = None
        """The last step that is in the file, as far as is known; None before the first line."""
        self._file: os.stat_result | None = None
        """The file after the last line of this recorder; None before the first."""
        self._ended = self._told = False
        self._writer = uuid4().hex[:2]
        """Tells two trainings apart that go on from one checkpoint at once."""

    def add(self, history: History, row: Mapping[str, float]) -> None:
        """Append a row, before it is appended to the history.

        Raises:
            OSError: If the file cannot be written. The row is written later.
        """
        self._write(history, row)

    def note(self, history: History) -> None:
        """Append what has become known of the whole run: for example, why nothing is measured.

        Raises:
            OSError: If the file cannot be written. It is noted with the next row.
        """
        self._write(history)

    def end(self, history: History) -> None:
        """Note that the training has come to its end.

        Raises:
            OSError: If the file cannot be written.
        """
        if not self._ended and (self._lines is not None or history):
            self._write(history, ended=True)

    def _write(
        self, history: History, row: Mapping[str, float] | None = None, *, ended: bool = False
    ) -> None:
        was_deleted = self._file is not None and not self.path.exists()
        lines, goes_on = self._lines, self._goes_on()
        if lines is None or not goes_on:
            lines = Lines(history, self._writer)
            was_replaced = self._file is not None and not goes_on
            if not self._has(history) or was_replaced:
                self._step = 0.0
            elif self._step is None:  # it goes on from a checkpoint
                self._step = history.last_step
            lines.step = self._step
        new = [*lines.header(history), *lines.rows(history)]
        if row is not None:
            new.append(lines.row(row))
        if ended:
            new.append(lines.note(ended=True))
        self._lines = None  # a header comes again if this fails
        if new:
            append_whole(self.path, _text(new).encode())
        self._lines, self._step, self._file = lines, lines.step, self.path.stat()
        self._ended = ended
        if was_deleted and not self._told:
            self._told = True
            warnings.warn(
                f"{printable(self.path)} was deleted while the run trained. It is written again,"
                " with all rows so far.",
                stacklevel=4,
            )

    def _goes_on(self) -> bool:
        """Return whether the file is still the one that the last line was written to, and whole."""
        if self._file is None or not self.path.exists():
            return False
        cut_half_line(self.path)
        now = self.path.stat()
        return os.path.samestat(now, self._file) and now.st_size >= self._file.st_size

    def _has(self, history: History) -> bool:
        """Make the file ready for more lines. Return whether it has rows of this history."""
        if not self.path.exists():
            self.path.parent.mkdir(parents=True, exist_ok=True)
            return False
        cut_half_line(self.path)
        begin = _text([{"of": history.prefix, "run": f"{history.run}."}])[:-3]
        return begin.encode() in self.path.read_bytes()


def _text(lines: Iterable[Line]) -> str:
    return "".join(f"{json.dumps(line, separators=(',', ':'))}\n" for line in lines)


def append_whole(path: Path, content: bytes) -> None:
    """Append to a file, which need not exist; its folder must.

    If that fails, the file is as long as before: a smaller file needs no room on the disk.

    Args:
        path: The file.
        content: What is appended.

    Raises:
        OSError: If not all of it could be written.
    """
    with path.open("ab", buffering=0) as file:  # a buffer would be tried again when it is closed
        before, rest = file.tell(), memoryview(content)
        try:
            while rest:
                rest = rest[file.write(rest) :]
        except OSError:
            with suppress(OSError):
                file.truncate(before)
            raise


def cut_half_line(path: Path) -> None:
    """Cut off what follows the last line end: half a line, which a killed run left.

    Raises:
        OSError: If the file cannot be read or cut.
    """
    with path.open("r+b") as file:
        size = file.seek(0, 2)
        if not size:
            return
        file.seek(size - 1)
        if file.read() != b"\n":
            file.seek(0)
            file.truncate(file.read().rfind(b"\n") + 1)
