# SPDX-License-Identifier: Apache-2.0
"""The record of a run: every row of its histories, in one file beside the logger's files.

A logger gets what a person looks at. The record has all columns. It is a file with a JSON object in
each line, which is a row of one history. The first row of a writer, and then every 100th, has the
names of its numbers:

    {"of": "noise_scale/", "unit": "sequences", "loop": "lightning", "confidence": 0.95,
     "after": 50, "step": 100, "examples": 3200, ..., "batch_size": 32, "parameters": 85002}

The rows between have numbers alone, in the order of the last names. What stays as it is for many
rows has its place at the end, and numbers at the end that are those of the row before are left out:

    {"of": "noise_scale/", "after": 100, "row": [150, 4800, ...]}

`of` is the prefix of the metrics, so that several monitors share a file. Values that are not finite
are null. Whole numbers are exact, and others have the nine digits of single precision. `behind`
is the row's step minus the step of the trainer's logs. `after` is the step of the row before. A run
that goes on from a checkpoint writes on in the same file: what an earlier attempt wrote behind
`after` does not count. So every row tells by itself what it follows, and a new run in an old folder
(`after` is 0) replaces the old run. A training that comes to its end adds
`{"of": "noise_scale/", "ended": true}`. Where the noise scale is withheld from some row on, a line
`{"of": "noise_scale/", "withheld": "..."}` says why.

In records of earlier versions each row has names, and values that are not finite are left out.
"""

from __future__ import annotations

import json
import math
import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from noisescale.history.appending import append_whole, cut_half_line
from noisescale.history.history import History
from noisescale.history.log import AFTER
from noisescale.history.metric_names import ABOUT_RUN
from noisescale.history.trackers import RECORD
from noisescale.printable import printable

BEHIND = "behind"

NAMED_EVERY = 100
"""Every row of this number has names: what is lost with a damaged line comes again soon."""

MOST_KEPT = 4096
"""Rows that are kept while they cannot be written. If there are more, the history is written."""

_SELDOM = (
    *("increment_measured_steps", "increment_weight", "increment_sq_weight"),
    *("batch_size", "skipped_steps", "peak_memory", "accumulation", "devices"),
    *("device_memory", BEHIND, *ABOUT_RUN),
)
"""What stays as it is for many rows, what changes most often first."""


def digits(value: float, significant: int = 9) -> str:
    """Return a number as it is written in a record. Whole numbers are exact.

    Examples:
        >>> [digits(value) for value in (1e6, 2 / 3, 1e-05, math.inf)]
        ['1000000', '0.666666667', '1e-05', 'null']
    """
    if not math.isfinite(value):
        return "null"
    is_whole = value == int(value) and abs(value) < 1e15
    return f"{value:.0f}" if is_whole else f"{value:.{significant}g}"


def round_row(row: Mapping[str, float]) -> dict[str, float]:
    """Return a row as it is read back from a record.

    Examples:
        >>> round_row({"step": 16777217.0, "low": 2 / 3, "high": math.inf})
        {'step': 16777217.0, 'low': 0.666666667, 'high': inf}
    """
    return {name: float(digits(x)) if math.isfinite(x) else x for name, x in row.items()}


class Recorder:
    """Append the rows of one history to the record in a folder.

    If the record has no rows of this history, the rows before are written, too: a run that was
    resumed in a new folder has its whole history there. Rows that could not be written, as the disk
    was full or the folder was gone, are written with a later row, or at the end.

    Args:
        folder: The folder, which need not exist.
        prefix: Prefix of the names of the metrics.
    """

    def __init__(self, folder: Path, prefix: str) -> None:
        self.path = folder / RECORD
        self._prefix = prefix
        self._lines = _Lines(prefix)
        self._history: History | None = None
        self._unwritten: list[_Row] = []
        self._lost = False
        """Whether rows were dropped that are in the history, but not in the file."""
        self._file: os.stat_result | None = None
        """The file after the last line of this recorder; None before the first."""
        self._withheld = ""
        """The reason that is in the file."""
        self._behind = 0.0
        self._told = False

    def add(self, history: History, row: Mapping[str, float], behind: float) -> None:
        """Append a row, before it is appended to the history.

        Args:
            history: The history.
            row: Its next row.
            behind: The row's step minus the step of the trainer's logs.

        Raises:
            OSError: If the file cannot be written. The row is written later.
        """
        self._history, self._behind = history, behind
        self._unwritten.append(_Row.of(history, row, history.last_step, behind))
        if len(self._unwritten) > MOST_KEPT:
            self._lost, self._unwritten = True, self._unwritten[-1:]
        self._write()

    def end(self) -> None:
        """Note that the training has come to its end, once.

        Raises:
            OSError: If the file cannot be written.
        """
        if self._history is not None:
            self._write(ended=True)
            self._history, self._file = None, None

    def withhold(self, reason: str) -> None:
        """Note that the noise scale is withheld, and why.

        Raises:
            OSError: If the file cannot be written. It is noted with the next row.
        """
        self._write(withheld=reason)

    def _write(self, *, withheld: str = "", ended: bool = False) -> None:
        """Append what is not in the file yet: rows, why they are withheld, the end."""
        was_there = self._file is not None and self.path.exists()
        was_deleted = self._file is not None and not was_there
        if not (was_there and self._goes_on()):
            self._file, self._withheld, self._lines = None, "", _Lines(self._prefix)
            self._lost |= not self._begin()
        history, rows = self._history, self._unwritten
        if history is not None:
            rows = self._rows(history)
            withheld = withheld or history.withheld
        begins = any(not row.after for row in rows)  # a new run: what was withheld is forgotten
        notes: list[dict[str, str | bool]] = []
        if withheld and (begins or withheld != self._withheld):
            notes.append({"withheld": withheld})
        if ended:
            notes.append({"ended": True})
        lines = self._lines.copy()
        text = "".join(lines.row(history, row) for row in rows if history is not None)
        text += "".join(json.dumps({"of": self._prefix, **note}) + "\n" for note in notes)
        self._file = None  # names come again if this fails
        append_whole(self.path, text.encode())
        self._file, self._lines, self._withheld = self.path.stat(), lines, withheld
        self._unwritten, self._lost = [], self._lost and history is None
        if was_deleted:
            self._tell_of_deletion()

    def _rows(self, history: History) -> list[_Row]:
        """Return the rows that the file lacks."""
        if not self._lost:
            return self._unwritten
        columns = {name: values.tolist() for name, values in history.items()}
        rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
        steps = [0.0, *columns["step"]]
        every = [_Row.of(history, *each, self._behind) for each in zip(rows, steps, strict=False)]
        return [*every, *(row for row in self._unwritten if row.step > history.last_step)]

    def _tell_of_deletion(self) -> None:
        if not self._told:
            self._told = True
            warnings.warn(
                f"{printable(self.path)} was deleted while the run trained. It is written again,"
                " with all rows so far.",
                stacklevel=4,
            )

    def _goes_on(self) -> bool:
        """Return whether the file is still the one that the last line was written to, and whole."""
        if self._file is None:
            return False
        cut_half_line(self.path)
        now = self.path.stat()
        return os.path.samestat(now, self._file) and now.st_size >= self._file.st_size

    def _begin(self) -> bool:
        """Make the file ready for more lines. Return whether it has rows of this history."""
        if not self.path.exists():
            self.path.parent.mkdir(parents=True, exist_ok=True)
            return False
        cut_half_line(self.path)
        return self._lines.begin in self.path.read_bytes()


class _Row(NamedTuple):
    """A row on its way to the file."""

    numbers: dict[str, float]
    step: float
    after: float

    @classmethod
    def of(cls, history: History, row: Mapping[str, float], after: float, behind: float) -> _Row:
        numbers = {**row, "parameters": history.parameters, BEHIND: behind}
        numbers |= {} if history.optimizer is None else history.optimizer.numbers
        return cls(numbers, row["step"], after)


class _Lines:
    """The lines of rows, each as short as the one before it allows."""

    def __init__(self, prefix: str) -> None:
        self._of = json.dumps({"of": prefix}).removesuffix("}")
        self._about: tuple[str, float, str] | None = None
        self._names: list[str] = []
        self._last: list[str] = []
        self._since_names = 0

    @property
    def begin(self) -> bytes:
        """The beginning of a row with names."""
        return f'{self._of}, "unit": '.encode()

    def copy(self) -> _Lines:
        """Return a copy, which another line leaves as it is."""
        other = _Lines("")
        vars(other).update(vars(self))
        return other

    def row(self, history: History, row: _Row) -> str:
        """Return the next line."""
        names = sorted(row.numbers, key=lambda name: name in _SELDOM and 1 + _SELDOM.index(name))
        about = history.unit, history.confidence, history.loop
        texts = [digits(row.numbers[name], 17 if name in ABOUT_RUN else 9) for name in names]
        after = f'"{AFTER}": {digits(row.after)}'
        if (about, names) != (self._about, self._names) or self._since_names == NAMED_EVERY - 1:
            self._about, self._names, self._last, self._since_names = about, names, texts, 0
            unit, confidence, loop = about
            head = {"unit": unit, **({"loop": loop} if loop else {}), "confidence": confidence}
            said = ", ".join(f"{json.dumps(n)}: {t}" for n, t in zip(names, texts, strict=True))
            return f"{self._of}, {json.dumps(head)[1:-1]}, {after}, {said}}}\n"
        end = len(texts)
        while end and texts[end - 1] == self._last[end - 1]:
            end -= 1
        self._last = texts
        self._since_names += 1
        return f'{self._of}, {after}, "row": [{",".join(texts[:end])}]}}\n'
