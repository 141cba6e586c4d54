# SPDX-License-Identifier: Apache-2.0
"""The metrics of a run in one CSV file: of a CSVLogger, or a history that a tracker exported."""

from __future__ import annotations

import math
import warnings
from pathlib import Path

from noisescale.csv_lines import table
from noisescale.history.log import Metric
from noisescale.printable import printable
from noisescale.refusal import Refusal

OF_LIGHTNING_IN_WANDB, OF_WANDB = "trainer/global_step", "_step"

CLOCKS = ("step", OF_LIGHTNING_IN_WANDB, "train/global_step", OF_WANDB)
"""Columns of the step: CSVLogger and MLflow, W&B with Lightning, W&B with transformers, W&B."""

TIMES = ("_runtime", "_timestamp")
"""Columns of W&B with seconds: since the run began, since the epoch."""


class CsvLog:
    """A CSV file with a line for each time of writing.

    A last line without its end is left out: the run that wrote the file was killed, or still
    writes.

    Args:
        file: The file.

    Raises:
        Refusal: If the file is damaged.
        OSError: If the file cannot be read.
    """

    def __init__(self, file: Path) -> None:
        self.path = file
        found = table(file, ends=True)
        self.names = found.names
        """The names of the columns."""
        self._lines = found.lines
        if found.cut is not None:
            warnings.warn(
                f"The last line of {printable(file)} is not whole, as if the run was killed while"
                " it wrote this line. The line is left out.",
                stacklevel=4,
            )

    def clock_of(self, name: str) -> str:
        """Return the column of steps that has numbers beside a metric; "" if there is none."""
        lines = self._column(name).keys()
        return next((clock for clock in CLOCKS if lines & self._column(clock).keys()), "")

    def metric(self, name: str, like: str = "") -> Metric:
        """Return a metric. It is empty if it was not logged.

        Args:
            name: Of the metric.
            like: Another metric. Its column of steps is used, and lines without a step are left
                out.

        Raises:
            ValueError: If the step of a value is not known, and `like` is not given.
        """
        values, clock = self._column(name), self.clock_of(like or name)
        if values and not like and not clock:
            raise Refusal(
                self.path,
                f"have the step of each {name} in a column {', '.join(CLOCKS)}",
                ", ".join(self.names),
                "Export all columns.",
            )
        steps = self._column(clock)
        unknown = [line for line in values if not math.isfinite(steps.get(line, math.nan))]
        if unknown and not like:
            raise Refusal(
                clock,
                f"be known of each {name}",
                "no number",
                "Write the step into it, or remove the line.",
                at=(self.path, unknown[0]),
            )
        time = next((name for name in TIMES if name in self.names), "")
        seconds = self._column(time)
        first = min(seconds.values(), default=0.0) if time == TIMES[1] else 0.0
        return Metric.of(
            [
                (steps[line], value, seconds.get(line, math.nan) - first)
                for line, value in values.items()
                if line not in unknown
            ]
        )

    def _column(self, name: str) -> dict[int, float]:
        """Return the numbers in a column, by the number of the line."""
        if name not in self.names:
            return {}
        place = self.names.index(name)
        return {
            line: _number(cells[place], name, self.path, line)
            for line, cells in self._lines
            if cells[place]
        }


def _number(cell: str, name: str, path: Path, line: int) -> float:
    try:
        return float(cell)
    except ValueError:
        raise Refusal(
            name,
            "be a number",
            repr(cell),
            "Correct this cell, or remove the line.",
            at=(path, line),
        ) from None
