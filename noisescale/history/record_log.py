# SPDX-License-Identifier: Apache-2.0
"""Read the record of a run, see `noisescale.history.record`."""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from noisescale.history.growing_file import GrowingFile
from noisescale.history.log import AFTER, Log, Metric
from noisescale.history.metric_names import name_in
from noisescale.history.record import BEHIND
from noisescale.printable import printable
from noisescale.refusal import Refusal

Array = NDArray[np.float64]

AT_ONCE = 1000
"""Lines that are parsed together."""


class RecordLog(Log):
    """The record of a run as a log. It may still grow.

    A line is a row, so rows are kept as they are, and not number by number.

    Args:
        path: The file.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path
        self._file = GrowingFile()
        self._tables: dict[str, _Table] = {}
        self.ended = False
        """Whether the training came to its end after the last row."""

    @property
    def unread(self) -> int:
        """The bytes after the last whole line."""
        return self._file.unread

    @property
    def steps_behind(self) -> float:
        """How many steps the trainer's logs are behind the optimizer: 0 or 1."""
        found = [self.metric(name).values for name in self.metrics if name.endswith(f"/{BEHIND}")]
        return float(max(values.max() for values in found).clip(0, 1)) if found else 0.0

    def replaced(self, files: list[Path]) -> bool:
        """Return whether the file was replaced, or written again from its beginning."""
        return self.path not in files or self._file.replaced(self.path)

    def read(self, files: list[Path]) -> bool:
        """Read what was added. Return whether there was anything new.

        Raises:
            ValueError: If a line is no row.
            OSError: If the file cannot be read.
        """
        before = self._file.lines
        lines = self._file.read(self.path)
        for number, row in enumerate(_parse(lines), start=before + 1):
            try:
                self._add_row(row, number)
            except (ValueError, TypeError, AttributeError, KeyError, IndexError):
                self._refuse(lines[number - before - 1], number)
        for prefix, table in self._tables.items():
            if (wrong := table.take_rows()) is not None:
                self._refuse(lines[wrong - before - 1], wrong)
            for name in table.names:
                self.places.setdefault(prefix + name, len(self.places))
        if lines:
            self.last_row_at = self._file.written
        return bool(lines)

    def check_endings(self, *, allow_truncated: bool = False) -> None:
        """Warn if the last line is not whole. It is left out, also with `allow_truncated`."""
        self._file.warn_of_rest(self.path)

    def __len__(self) -> int:
        return sum(np.isfinite(table.values).sum() for table in self._tables.values())

    @property
    def metrics(self) -> list[str]:
        """The names of all metrics that were read."""
        return [name for name in self.places if len(self.metric(name).values)]

    def metric(self, name: str, like: str = "") -> Metric:
        """Return a metric. It is empty if it was not recorded."""
        values = np.array([])
        for prefix, table in self._tables.items():
            if name.startswith(prefix) and name[len(prefix) :] in table.names:
                column = table.values[:, table.names.index(name[len(prefix) :])]
                values = column[np.isfinite(column)]
        return Metric(np.zeros_like(values), values, np.full_like(values, np.nan))

    def rows(self, prefix: str) -> dict[str, Array]:
        """Return the rows under a prefix, as columns by name. A value that a row lacks is NaN.

        Names of longer prefixes, such as those of another monitor, are there without values.
        """
        table = self._tables.get(prefix) or _Table()
        found = dict(zip(table.names, table.values.T, strict=True))
        others = (name for tag in self.places if (name := name_in(tag, prefix)) is not None)
        return found | {
            name: np.full(len(table.values), np.nan) for name in others if name not in found
        }

    def _add_row(self, row: dict[str, Any], number: int) -> None:
        prefix = row.pop("of")
        self.ended = row.pop("ended", False) is True
        if self.ended:
            return
        if (reason := row.pop("withheld", None)) is not None:
            self.withheld[prefix] = str(reason)
            return
        after, numbers = row.pop(AFTER, None), row.pop("row", None)
        if numbers is not None:
            self._tables[prefix].add_numbers(after, numbers, number)
        else:
            unit = row.pop("unit")
            self.about[prefix] = str(unit), float(row.pop("confidence")), str(row.pop("loop", ""))
            self._tables.setdefault(prefix, _Table()).add_named(after, row, number)
        if not after:  # a new run
            self.withheld.pop(prefix, None)

    def _refuse(self, line: bytes, number: int) -> NoReturn:
        raise Refusal(
            self.path,
            "have a row of a history in each line",
            printable(line[:60].decode(errors="replace")),
            "Remove the line, or copy the file again.",
            at=(self.path, number),
        ) from None


class _Table:
    """The rows of one history."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self._known: set[str] = set()
        self._values = array("d")
        self._rows: list[list[Any]] = []
        self._lines: list[int] = []
        self._named: list[str] = []
        self._last: list[Any] = []

    @property
    def values(self) -> Array:
        """The rows, by the names."""
        rows = len(self._values) // len(self.names) if self.names else 0
        return np.array(self._values).reshape(rows, len(self.names))

    def add_named(self, after: Any, row: dict[str, Any], line: int) -> None:
        """Add a row with names; `after` is the step of the row before."""
        if self._named != (named := [AFTER, *row]):
            if not self._known.issuperset(named):
                self._widen([name for name in named if name not in self._known])
            self._named = named
        self._add([after, *row.values()], line)

    def add_numbers(self, after: Any, numbers: list[Any], line: int) -> None:
        """Add a row by the last names; those at the end that are missing are as in the row before.

        Raises:
            IndexError: If there are more numbers than names.
        """
        if len(numbers) >= len(self._named):
            raise IndexError
        self._add([after, *numbers, *self._last[len(numbers) + 1 :]], line)

    def _add(self, row: list[Any], line: int) -> None:
        self._last = row
        if self._named != self.names:
            of = dict(zip(self._named, row, strict=True))
            row = [of.get(name) for name in self.names]
        self._rows.append(row)
        self._lines.append(line)

    def take_rows(self) -> int | None:
        """Take the rows that were added into the values. Return the line of one that is none."""
        rows, lines = self._rows, self._lines
        self._rows, self._lines = [], []
        try:
            values = np.array(rows, dtype=np.float64)
            if (infinite := np.isinf(values).any(axis=-1)).any():
                return lines[int(infinite.argmax())]
        except (ValueError, TypeError):
            return next(
                line for row, line in zip(rows, lines, strict=True) if not _are_numbers(row)
            )
        self._values.frombytes(values.tobytes())
        return None

    def _widen(self, names: list[str]) -> None:
        """Make a column for each of further names."""
        self._rows = [[*row, *(None for _ in names)] for row in self._rows]
        wider = np.full((len(self.values), len(self.names) + len(names)), np.nan)
        wider[:, : len(self.names)] = self.values if self.names else 0.0
        self.names = [*self.names, *names]
        self._known.update(names)
        self._values = array("d", wider.tobytes())


def _are_numbers(row: Sequence[Any]) -> bool:
    try:
        return np.array(row, dtype=np.float64).ndim == 1
    except (ValueError, TypeError):
        return False


def _parse(lines: Sequence[bytes]) -> Iterator[Any]:
    """Yield what is in each line; None where a line is not JSON."""
    decode = json.JSONDecoder(parse_constant=_refuse_constant).decode
    for start in range(0, len(lines), AT_ONCE):
        some = lines[start : start + AT_ONCE]
        try:
            rows = decode(f"[{b','.join(some).decode()}]")  # in half the time of one by one
        except ValueError:
            rows = []
        yield from rows if len(rows) == len(some) else map(_parse_line, some)


def _parse_line(line: bytes) -> Any:
    try:
        return json.JSONDecoder(parse_constant=_refuse_constant).decode(line.decode())
    except ValueError:
        return None


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(name)
