# SPDX-License-Identifier: Apache-2.0
"""Read the scalars of one prefix from TensorBoard's event files, in rows."""

from __future__ import annotations

import logging
import math
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c
from tensorboard.plugins.hparams.metadata import SESSION_START_INFO_TAG
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData
from tensorboard.util.tensor_util import make_ndarray

from noisescale.history.metric_names import name_in
from noisescale.history.run_error import RunError
from noisescale.printable import printable

FRAME = 16
"""The number of bytes around each record in a file: its length and two checksums."""


class EventRows:
    """The rows of one prefix in the files of one run, in order. The files may still grow."""

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix
        self.others: dict[str, None] = {}
        """Some of the tags with another prefix, in the order of writing."""
        self.last_row_at: float | None = None
        """The time at which the last row was logged, in seconds since the epoch."""
        self._rows: list[int] = []
        self._values: dict[str, tuple[list[int], list[float]]] = {}
        self._current: set[str] = set()

    def add_from(self, file: EventFile) -> None:
        """Add the records that were written to a file since the last reading.

        Raises:
            ValueError: If a value is not finite.
        """
        if not file.whole:
            self._current.clear()  # a row is never spread over two files
        for event in file.events(self._concerns):
            for value in event.summary.value:
                if (name := name_in(value.tag, self.prefix)) is None:
                    self.others[value.tag] = None
                    continue
                self._add(event.step, name, _number(value, file.path, event.step))
                self.last_row_at = event.wall_time

    def columns(self) -> dict[str, NDArray[np.float64]]:
        """Return the columns by tag, without the prefix. Rows are in the order of writing.

        A row is what was logged at once. A value that a row lacks is NaN.
        """
        columns = {}
        for name, (where, what) in self._values.items():
            columns[name] = np.full(len(self._rows), np.nan)
            columns[name][where] = what
        return columns

    def _concerns(self, record: bytes) -> bool:
        """Whether a record has to be parsed: it is ours, or shows what other tags there are."""
        few = len(self.others) < 5 or b"/step" in record  # which names other monitors
        return few or self.prefix.encode() in record

    def _add(self, step: int, name: str, value: float) -> None:
        # A row's tags are written one after another; a tag that comes again starts the next.
        if not self._current or self._rows[-1] != step or name in self._current:
            self._rows.append(step)
            self._current.clear()
        self._current.add(name)
        where, what = self._values.setdefault(name, ([], []))
        where.append(len(self._rows) - 1)
        what.append(value)


class EventFile:
    """One event file. Each reading continues after the last whole record that was read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.whole = 0
        """The number of bytes in the records that were read."""
        self.last_step = 0
        self._loader = _loader(path)

    def events(self, wanted: Callable[[bytes], bool]) -> Iterator[Event]:
        """Yield the events that were added, if `wanted` returns true for their records."""
        for record in self._loader.Load():
            self.whole += len(record) + FRAME
            if wanted(record):
                event = Event.FromString(record)
                self.last_step = event.step
                yield event

    @property
    def unread(self) -> int:
        """The number of bytes after the last whole record. They are a partial record or damage."""
        return self.path.stat().st_size - self.whole


def read_event_files(
    paths: list[Path], prefix: str, *, allow_truncated: bool
) -> tuple[dict[str, NDArray[np.float64]], list[str]]:
    """Read the event files of one run, in order.

    Returns:
        The columns of `EventRows`, and some of the tags with another prefix.

    Raises:
        RunError: If a file is empty, or ends within a record without `allow_truncated`.
        ValueError: If a value is not finite.
    """
    rows = EventRows(prefix)
    for path in paths:
        file, size = EventFile(path), path.stat().st_size
        rows.add_from(file)
        _check_ending(file, size, allow_truncated=allow_truncated)
    return rows.columns(), list(rows.others)


class Scalar(NamedTuple):
    """The values of one tag, in the order of logging."""

    steps: array[float]
    values: array[float]
    seconds: array[float]
    """Time since the first event of the run, without the time between two event files."""


class Scalars(NamedTuple):
    """What the event files of one run contain."""

    scalars: dict[str, Scalar]
    """By tag."""
    hyperparameters: dict[str, float | str | bool]
    """Those that were logged for TensorBoard's page of hyperparameters."""


def read_scalars(
    paths: list[Path], wanted: Callable[[bytes], bool] = lambda record: True
) -> Scalars:
    """Return all scalars of one run.

    Args:
        paths: The event files of the run, in order. A file may end within a record.
        wanted: Whether a record may contain what is looked for. Other records are not parsed,
            which takes most of the time.

    Raises:
        ValueError: If a file is damaged before its end: what follows cannot be read.
    """
    found = Scalars({}, {})
    before = 0.0
    for path in paths:
        began, last, whole, size = None, b"", 0, path.stat().st_size
        for record in _loader(path).Load():
            last = record
            whole += len(record) + FRAME
            if began is not None and not wanted(record):
                continue
            event = Event.FromString(record)
            began = event.wall_time if began is None else began
            for value in event.summary.value:
                if value.tag == SESSION_START_INFO_TAG:
                    found.hyperparameters.update(_hyperparameters(value))
                elif (number := _scalar_in(value)) is not None:
                    of_tag = found.scalars.get(value.tag)
                    if of_tag is None:
                        of_tag = Scalar(array("d"), array("d"), array("d"))
                        found.scalars[value.tag] = of_tag
                    of_tag.steps.append(event.step)
                    of_tag.values.append(number)
                    of_tag.seconds.append(before + event.wall_time - began)
        if began is not None:
            before += max(0.0, Event.FromString(last).wall_time - began)
        _refuse_damage(path, whole, size)
    return found


def _hyperparameters(value: Summary.Value) -> Iterator[tuple[str, float | str | bool]]:
    logged = HParamsPluginData.FromString(value.metadata.plugin_data.content)
    for name, each in logged.session_start_info.hparams.items():
        if (kind := each.WhichOneof("kind")) in ("number_value", "string_value", "bool_value"):
            yield name, getattr(each, kind)


def _check_ending(file: EventFile, size: int, *, allow_truncated: bool) -> None:
    if not file.whole:
        raise RunError(
            "empty",
            f"`{printable(file.path)}` must contain events, got {size} bytes without a whole"
            " event. Name the folder of a run that was logged.",
        )
    if file.whole < size and not allow_truncated:
        raise RunError(
            "truncated",
            f"`{printable(file.path)}` must end with a whole record, got"
            f" {size - file.whole:,} bytes after the last whole record (step {file.last_step})."
            " If the file is still being written, or if you can do without these bytes, pass"
            " `allow_truncated=True`.",
        )


def _refuse_damage(path: Path, whole: int, size: int) -> None:
    """Refuse a file in which a whole record, but a damaged one, follows those that were read.

    A record that is not whole, or zeros, are what a run leaves that was killed.

    Args:
        path: The file.
        whole: The bytes of the records that were read.
        size: The bytes of the file before it was read: it may have grown since.
    """
    with path.open("rb") as file:
        file.seek(whole)
        begin = file.read(min(12, max(size - whole, 0)))
    if len(begin) < 12 or not any(begin):
        return
    length, checksum = begin[:8], int.from_bytes(begin[8:], "little")
    if (
        checksum != masked_crc32c(length)
        or whole + FRAME + int.from_bytes(length, "little") <= size
    ):
        raise ValueError(
            f"`{printable(path)}` must have whole events, got a damaged one after {whole:,} of"
            f" {size:,} bytes. What follows it cannot be read: copy the file again, or leave it"
            " out."
        )


def _loader(path: Path) -> RawEventFileLoader:
    # TensorBoard's loader notes when it is made that there is no TensorFlow.
    logger = logging.getLogger("tensorboard")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        return RawEventFileLoader(str(path))
    finally:
        logger.setLevel(level)


def _number(value: Summary.Value, path: Path, step: int) -> float:
    number = _number_in(value)
    if not np.isfinite(number):
        raise ValueError(
            f"`{printable(value.tag)}` must be finite, got {number} at step {step} of"
            f" {printable(path)}."
            " NoiseScaleMonitor only logs finite values: correct the program that wrote the file."
        )
    return number


def _number_in(value: Summary.Value) -> float:
    number = _scalar_in(value)
    return math.nan if number is None else number


def _scalar_in(value: Summary.Value) -> float | None:
    """Return the number of a value; None if it is something else than a scalar."""
    if value.HasField("simple_value"):
        return float(value.simple_value)
    if not value.HasField("tensor"):
        return None
    tensor = make_ndarray(value.tensor)
    return float(tensor.item()) if tensor.size == 1 and tensor.dtype.kind in "fiu" else None
