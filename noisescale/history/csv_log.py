# SPDX-License-Identifier: Apache-2.0
"""A run in one CSV file: of a CSVLogger, or a history that W&B or MLflow exported."""

from __future__ import annotations

import codecs
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from noisescale.csv_lines import valid_lines
from noisescale.history.growing_file import GrowingFile
from noisescale.history.log import PREFIXES, Array, Log, Metric, is_recorded
from noisescale.history.metric_names import ROOT, name_in
from noisescale.printable import printable
from noisescale.refusal import Refusal

OF_LIGHTNING_IN_WANDB, OF_WANDB = "trainer/global_step", "_step"

CLOCKS = ("step", OF_LIGHTNING_IN_WANDB, "train/global_step", OF_WANDB)
"""Columns of the step: CSVLogger and MLflow, W&B with Lightning, W&B with transformers, W&B."""

TIMES = ("_runtime", "_timestamp")
"""Columns of W&B with seconds: since the run began, since the epoch."""


class CsvLog(Log):
    """A CSV file with a line for each time of writing. It may still grow.

    A last line without its end is not read: the run that wrote the file was killed, or still
    writes.

    Args:
        path: The run, for errors.
        *names: Names of metrics that are wanted, besides the monitor's.
    """

    def __init__(self, path: Path, *names: str) -> None:
        super().__init__()
        self.path = path
        self.has_record = path.is_dir() or path.name == "metrics.csv"  # others are exports
        self.names: list[str] = []
        """The names of the columns."""
        self._wanted = {*names, *CLOCKS, *TIMES}
        self._columns: dict[int, str] = {}
        self._file = GrowingFile()

    @property
    def unread(self) -> int:
        """The bytes after the last whole line."""
        return self._file.unread

    def replaced(self, files: list[Path]) -> bool:
        """Return whether the file was replaced, or written again from its beginning.

        Raises:
            OSError: If the file does not exist any more.
        """
        return self.path not in files or self._file.replaced(self.path)

    def read(self, files: list[Path]) -> bool:
        """Read what was added. Return whether there was anything new.

        Raises:
            ValueError: If the file is damaged, or has other things in its columns than numbers.
            OSError: If the file cannot be read.
        """
        (self.path,) = files
        before = len(self), len(self.names)
        lines_before = self._file.lines
        lines = self._file.read(self.path)
        # Spreadsheets may begin a file with the mark that "-sig" is for.
        text = codecs.iterdecode(lines, "utf-8-sig" if not lines_before else "utf-8")
        for number, cells in valid_lines(self.path, text, len(self.names), lines_before):
            if not self.names:
                self._read_names(cells)
            elif self._add_line(number, cells):
                self.last_row_at = self._file.written
        return (len(self), len(self.names)) != before

    def check_endings(self, *, allow_truncated: bool = False) -> None:
        """Warn if the last line is not whole. It is left out, also with `allow_truncated`."""
        self._file.warn_of_rest(self.path)

    def other_names(self, prefix: str) -> list[str]:
        """Return the names of the other columns."""
        return [n for n in self.names if name_in(n, prefix) is None or not is_recorded(n)]

    def clock_of(self, name: str) -> str:
        """Return the column of steps that has numbers beside a metric; "" if there is none."""
        lines = self.parts_of(name)
        return next((c for c in CLOCKS if np.isin(lines, self.parts_of(c)).any()), "")

    def metric(self, name: str, like: str = "") -> Metric:
        """Return a metric. It is empty if it was not logged.

        Args:
            name: Of the metric.
            like: Another metric. Its column of steps is used, and lines without a step are left
                out.

        Raises:
            ValueError: If the step of a value is not known, and `like` is not given.
        """
        lines, values = self.parts_of(name), super().metric(name).values
        clock = self.clock_of(like or name)
        if len(lines) and not like and not clock:
            raise Refusal(
                self.path,
                f"have the step of each {name} in a column {', '.join(CLOCKS)}",
                ", ".join(self.names),
                "Export all columns.",
            )
        steps = self._values_beside(lines, clock)
        known = np.isfinite(steps)
        if not like and not known.all():
            raise Refusal(
                clock,
                f"be known of each {name}",
                "no number",
                "Write the step into it, or remove the line.",
                at=(self.path, int(lines[~known][0])),
            )
        time = next((name for name in TIMES if name in self.places), "")
        seconds = self._values_beside(lines, time)
        if time == TIMES[1]:
            seconds -= super().metric(time).values.min(initial=math.inf)
        return Metric(steps[known], values[known], seconds[known])

    def _values_beside(self, lines: NDArray[np.int64], name: str) -> Array:
        """Return the values of another column in these lines; NaN where it has none."""
        of_line = zip(self.parts_of(name).tolist(), super().metric(name).values, strict=True)
        known = dict(of_line)
        return np.array([known.get(line, math.nan) for line in lines.tolist()], dtype=np.float64)

    def _read_names(self, names: list[str]) -> None:
        self.names = names
        for place, name in enumerate(names):
            if is_recorded(name) or name in self._wanted:
                self._columns[place] = name
                self.places.setdefault(name, len(self.places))
        alike: dict[str, list[str]] = {}
        for name in filter(is_recorded, names):
            alike.setdefault(name[name.index(ROOT) :], []).append(name)
        if twice := next((found for found in alike.values() if len(found) > 1), None):
            raise Refusal(
                self.path,
                "have one column for each metric",
                ", ".join(twice),
                "Remove the columns of the other run.",
            )

    def _add_line(self, line: int, cells: Sequence[str]) -> bool:
        """Add the numbers of a line. Return whether it has any of a monitor."""
        of_monitor, where = False, f"in line {line} of {printable(self.path)}"
        for place, name in self._columns.items():
            if not (cell := cells[place]):
                continue
            ours = name.startswith(PREFIXES)
            try:
                value = float(cell)
            except ValueError:
                raise Refusal(
                    name,
                    "be a number",
                    repr(cell),
                    "Correct this cell, or remove the line.",
                    at=(self.path, line),
                ) from None
            self.add(name, value, where, step=0.0, seconds=math.nan, part=line)  # lines are rows
            of_monitor = of_monitor or ours
        return of_monitor
