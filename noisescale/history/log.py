# SPDX-License-Identifier: Apache-2.0
"""What a logger wrote about a run: numbers by name and step, in the order of writing."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from array import array
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from noisescale.history.history import COLUMNS
from noisescale.history.metric_names import ABOUT_RUN, ROOT, TRAINER_PREFIXES, name_in
from noisescale.refusal import Refusal

Array = NDArray[np.float64]

PREFIXES = tuple(before + ROOT for before in TRAINER_PREFIXES)
"""The beginnings of the names of the monitor's metrics, as logs have them."""

COLUMN_OF = {
    "simple": "noise_scale",
    "simple_high": "high",
    "lower_bound": "low",
    **{name: name for name in COLUMNS},
}
"""The column of the history for each metric's name, without the name's prefix."""

AFTER = "after"
"""The column of a record with the step of the row before, see `noisescale.history.record`."""


def is_recorded(name: str) -> bool:
    """Return whether a history, of any monitor, is made of the metric with this name.

    Examples:
        >>> is_recorded("noise_scale/wide/optimizer_1/step"), is_recorded("noise_scale/report")
        (True, False)
    """
    last = name.rpartition("/")[2]
    known = last in COLUMN_OF or last in ABOUT_RUN or "/group/" in name
    return known and name.startswith(PREFIXES)


class Metric(NamedTuple):
    """The values of one metric, in the order of writing."""

    steps: Array
    """The steps under which the values were logged; NaN if not known."""
    values: Array
    seconds: Array
    """Seconds since the run's first value, without the time between two files; NaN if not known."""


class Log(ABC):
    """The numbers that a logger wrote, in the order of writing. The files may still grow.

    A subclass reads one format, and adds each number by `add`. Everybody else asks for metrics, or
    for the rows of a monitor.
    """

    has_record = True
    """Whether the monitor's record of the run is beside what the log is read from."""

    def __init__(self) -> None:
        self.places: dict[str, int] = {}
        """The number of each name, in the order in which the names were found."""
        self.last_row_at: float | None = None
        """The time at which a monitor's metric was last written, in seconds since the epoch."""
        self.about: dict[str, tuple[str, float, str]] = {}
        """Unit, confidence and `loop` of each monitor's history, by prefix, where known."""
        self.withheld: dict[str, str] = {}
        """Why the noise scale of a monitor is withheld, by prefix, where it is."""
        self._of = array("l")
        self._parts = array("l")
        self._steps, self._values, self._seconds = array("d"), array("d"), array("d")

    @property
    @abstractmethod
    def unread(self) -> int:
        """The number of bytes at the end that are no whole record or line yet."""

    @abstractmethod
    def replaced(self, files: list[Path]) -> bool:
        """Return whether the files are no longer those that were read: read all of them anew."""

    @abstractmethod
    def read(self, files: list[Path]) -> bool:
        """Read what was written to the files since the last call; return whether there was any.

        Raises:
            ValueError: If a file is damaged.
            OSError: If a file cannot be read.
        """

    @abstractmethod
    def check_endings(self, *, allow_truncated: bool = False) -> None:
        """Raise an error, or warn, if a file ends in the middle of a record or a line."""

    def __len__(self) -> int:
        return len(self._of)

    @property
    def metrics(self) -> list[str]:
        """The names of all metrics that were read."""
        known = set(self._of)
        return [name for name, place in self.places.items() if place in known]

    def other_names(self, prefix: str) -> list[str]:
        """Return the names without a prefix, including the names of pictures and texts."""
        return [name for name in self.places if name_in(name, prefix) is None]

    def add(
        self, name: str, value: float, where: str, *, step: float, seconds: float, part: int
    ) -> None:
        """Add a number.

        Args:
            name: The metric.
            value: Its value.
            where: The place in the file, for an error.
            step: The step under which it was logged; 0 in a file whose lines are rows.
            seconds: See `Metric`.
            part: The number of the file or line. A row is never spread over two parts.

        Raises:
            ValueError: If a metric of a monitor is not finite.
        """
        if not math.isfinite(value) and name.startswith(PREFIXES):
            raise Refusal(
                name,
                "be finite",
                f"{value} {where}",
                "NoiseScaleMonitor only logs finite values: correct the program that wrote"
                " the file.",
            )
        self._of.append(self.places.setdefault(name, len(self.places)))
        self._steps.append(step)
        self._values.append(value)
        self._seconds.append(seconds)
        self._parts.append(part)

    def metric(self, name: str, like: str = "") -> Metric:
        """Return a metric. It is empty if it was not logged. `like` matters in a CSV file."""
        chosen = np.array(self._of) == self.places.get(name, -1)
        columns = self._steps, self._values, self._seconds
        return Metric(*(np.array(column)[chosen] for column in columns))

    def parts_of(self, name: str) -> NDArray[np.int64]:
        """Return the number of the file or line of each value of a metric."""
        chosen = np.array(self._of) == self.places.get(name, -1)
        return np.asarray(np.array(self._parts)[chosen], dtype=np.int64)

    def steps_as_logged(self, prefix: str, batch_size: Array) -> dict[str, Array]:
        """Return steps and examples of rows, from the steps under which these were logged.

        Args:
            prefix: See `rows`.
            batch_size: Of each row; NaN where it was not logged.
        """
        tag = next(name for name in self.places if name_in(name, prefix) == "batch_size")
        known = np.flatnonzero(np.isfinite(batch_size))
        step, examples = np.full_like(batch_size, math.nan), np.full_like(batch_size, math.nan)
        step[known] = self.metric(tag).steps
        # A resumed run logs some steps again: its examples go on from the row before these.
        last: list[int] = []
        for row in known.tolist():
            while last and step[last[-1]] >= step[row]:
                last.pop()
            at, so_far = (step[last[-1]], examples[last[-1]]) if last else (0.0, 0.0)
            examples[row] = so_far + batch_size[row] * (step[row] - at)
            last.append(row)
        return {"step": step, "examples": examples}

    def rows(self, prefix: str) -> dict[str, Array]:
        """Return what was logged under a prefix, as columns by name without the prefix.

        The metrics of a row are written one after another, under one step. So a metric that comes
        again starts the next row. A value that a row lacks is NaN.
        """
        ours = {
            place: name
            for tag, place in self.places.items()
            if (name := name_in(tag, prefix)) is not None
        }
        names = list(dict.fromkeys(ours.values()))
        column_of = np.full(len(self.places), -1)
        for place, name in ours.items():
            column_of[place] = names.index(name)
        of = column_of[np.array(self._of)] if self._of else np.array([], dtype=np.int64)
        chosen = np.flatnonzero(of >= 0)
        of = of[chosen]
        steps, parts = np.array(self._steps)[chosen], np.array(self._parts)[chosen]
        begins = np.append(True, (np.diff(steps) != 0) | (np.diff(parts) != 0))[: len(of)]
        at_once = np.cumsum(begins) - 1  # what was written under one step
        again = np.bincount(at_once * len(names) + of) > 1
        for one in np.unique(np.flatnonzero(again) // max(len(names), 1)):
            seen: set[int] = set()
            for k in range(*np.searchsorted(at_once, [one, one + 1])):
                if of[k] in seen:
                    begins[k] = True
                    seen.clear()
                seen.add(int(of[k]))
        rows = np.cumsum(begins) - 1
        table = np.full((len(names), int(rows[-1]) + 1 if len(rows) else 0), math.nan)
        table[of, rows] = np.array(self._values)[chosen]
        return dict(zip(names, table, strict=True))
