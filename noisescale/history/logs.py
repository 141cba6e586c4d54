# SPDX-License-Identifier: Apache-2.0
"""What a logger wrote about a run besides the monitor's rows: event files, or one CSV file."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from noisescale.csv_lines import table
from noisescale.extras import need
from noisescale.printable import printable
from noisescale.refusal import Refusal

Array = NDArray[np.float64]

OF_LIGHTNING_IN_WANDB, OF_WANDB = "trainer/global_step", "_step"

CLOCKS = ("step", OF_LIGHTNING_IN_WANDB, "train/global_step", OF_WANDB)
"""Columns of the step: CSVLogger and MLflow, W&B with Lightning, W&B with transformers, W&B."""

TIMES = ("_runtime", "_timestamp")
"""Columns of W&B with seconds: since the run began, since the epoch."""

HYPERPARAMETERS = "_hparams_/"
"""The beginning of the tags of TensorBoard's page of hyperparameters."""

_HEAD_AND_TAIL = 8 + 4 + 4
"""Bytes of an event's length and of the two checksums."""


class Metric(NamedTuple):
    """The values of one metric, in the order of writing."""

    steps: Array
    """The steps under which the values were logged; NaN if not known."""
    values: Array
    seconds: Array
    """Seconds since the run's first value, without the time between two files; NaN if not known."""

    @classmethod
    def of(cls, rows: list[tuple[float, float, float]]) -> Metric:
        """Return the metric of steps, values and seconds, one row for each value."""
        return cls(*np.array(rows, dtype=np.float64).reshape(-1, 3).T)


class EventLog:
    """The event files of a run, in order. A resumed run adds a file.

    A file may end within an event, as that of a run that was killed or still trains.

    Args:
        path: The run, for errors.
        files: Its files.

    Raises:
        MissingExtraError: If TensorBoard is not installed.
        Refusal: If a file is damaged.
        OSError: If a file cannot be read.
    """

    def __init__(self, path: Path, files: Iterable[Path]) -> None:
        need("tensorboard", f"Reading the event files of {printable(path)}")
        self.hyperparameters: dict[str, float | str | bool] = {}
        """The hyperparameters that were logged for TensorBoard's page of them."""
        self._rows: dict[str, list[tuple[float, float, float]]] = {}
        before = 0.0
        for file in files:
            began, so_far = None, 0.0
            for event in events_in(file):
                began = event.wall_time if began is None else began
                so_far = event.wall_time - began
                for value in event.summary.value:
                    self._add(value, float(event.step), before + so_far)
            before += max(0.0, so_far)

    @property
    def names(self) -> list[str]:
        """The names of all metrics."""
        return list(self._rows)

    def metric(self, name: str) -> Metric:
        """Return a metric. It is empty if it was not logged."""
        return Metric.of(self._rows.get(name, []))

    def _add(self, value: Any, step: float, seconds: float) -> None:
        if value.tag.startswith(HYPERPARAMETERS):
            self.hyperparameters.update(_hyperparameters(value))
        elif (number := _number_in(value)) is not None:
            self._rows.setdefault(value.tag, []).append((step, number, seconds))


def events_in(file: Path) -> Iterator[Any]:
    """Yield the events of a file, by TensorBoard's reader.

    TensorBoard itself stops at a damaged event without a word.

    Raises:
        Refusal: If an event is damaged. One that ends too early is left out.
    """
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.tensorflow_stub.errors import DataLossError, OutOfRangeError
    from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import PyRecordReader_New

    reader, whole, end = PyRecordReader_New(str(file)), 0, 0
    while True:
        try:
            reader.GetNext()
        except OutOfRangeError:
            return
        except DataLossError as error:
            if "truncated" in str(error) or not any(file.read_bytes()[end:]):  # of a killed run
                return
            raise Refusal(
                printable(file),
                "have whole events",
                f"a damaged one after {whole:,} events",
                "What follows it cannot be read: copy the file again, or leave it out.",
            ) from None
        record = reader.record()
        whole, end = whole + 1, end + _HEAD_AND_TAIL + len(record)
        yield Event.FromString(record)


def _hyperparameters(value: Any) -> Iterator[tuple[str, float | str | bool]]:
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    logged = HParamsPluginData.FromString(value.metadata.plugin_data.content)
    for name, each in logged.session_start_info.hparams.items():
        if (kind := each.WhichOneof("kind")) in ("number_value", "string_value", "bool_value"):
            yield name, getattr(each, kind)


def _number_in(value: Any) -> float | None:
    """Return the number of a value; None if it is something else than a scalar."""
    from tensorboard.util.tensor_util import make_ndarray

    if value.HasField("simple_value"):
        return float(value.simple_value)
    if not value.HasField("tensor"):
        return None
    tensor = make_ndarray(value.tensor)
    return float(tensor.item()) if tensor.size == 1 and tensor.dtype.kind in "fiu" else None


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
