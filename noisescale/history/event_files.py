# SPDX-License-Identifier: Apache-2.0
"""Scalars of one prefix in TensorBoard's event files, row by row as they were logged."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.util.tensor_util import make_ndarray

from noisescale.history.metric_names import name_in
from noisescale.printable import printable

FRAME = 16
"""Bytes around each record in a file: its length, and two checksums."""


def read_event_files(
    paths: list[Path], prefix: str, *, allow_truncated: bool
) -> tuple[dict[str, NDArray[np.float64]], list[str]]:
    """Read files of one run, the earliest first.

    Returns:
        By tag, without the prefix, a value for each row that was logged at once, in the order of
        writing; NaN where a row lacks it. And a few of the tags with another prefix.

    Raises:
        ValueError: If one is empty, or ends within a record and may not.
    """
    rows: list[int] = []
    values: dict[str, tuple[list[int], list[float]]] = {}
    current: set[str] = set()
    others: dict[str, None] = {}
    for path in paths:
        current.clear()
        for step, name, value in _scalars(path, prefix, others, allow_truncated):
            # A row's tags are written one after another; a tag that comes again starts the next.
            if not current or rows[-1] != step or name in current:
                rows.append(step)
                current.clear()
            current.add(name)
            where, what = values.setdefault(name, ([], []))
            where.append(len(rows) - 1)
            what.append(value)
    columns = {}
    for name, (where, what) in values.items():
        columns[name] = np.full(len(rows), np.nan)
        columns[name][where] = what
    return columns, list(others)


def read_scalar(paths: list[Path], tag: str) -> tuple[list[float], list[float], set[str]]:
    """Read one metric of one run, whatever logged it: steps as logged, values, and all tags."""
    steps: list[float] = []
    values: list[float] = []
    tags: set[str] = set()
    for path in paths:
        for record in _records(path):
            event = Event.FromString(record)
            for value in event.summary.value:
                tags.add(value.tag)
                if value.tag == tag:
                    steps.append(event.step)
                    values.append(_number_in(value))
    return steps, values, tags


def _scalars(
    path: Path, prefix: str, others: dict[str, None], allow_truncated: bool
) -> Iterator[tuple[int, str, float]]:
    whole, last_step = 0, 0
    size, marker = path.stat().st_size, prefix.encode()
    for record in _records(path):
        whole += len(record) + FRAME
        if marker in record:
            event = Event.FromString(record)
            last_step = event.step
            for value in event.summary.value:
                if (name := name_in(value.tag, prefix)) is not None:
                    yield event.step, name, _number(value, path, event.step)
        elif len(others) < 5 or b"/step" in record:  # which tells what else was measured
            others |= {value.tag: None for value in Event.FromString(record).summary.value}
    if not whole:
        raise ValueError(
            f"`{printable(path)}` must hold events, got {size} bytes without a whole one."
            " Name the folder of a run that was logged."
        )
    if whole < size and not allow_truncated:
        raise ValueError(
            f"`{printable(path)}` must end with a whole record, got {size - whole:,} bytes after"
            f" the last one that can be read (step {last_step}). If it is still being written, or"
            " what follows may be lost, read on with `allow_truncated=True`."
        )


def _records(path: Path) -> Iterator[bytes]:
    # TensorBoard's loader notes when it is made that there is no TensorFlow.
    logger = logging.getLogger("tensorboard")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        loader = RawEventFileLoader(str(path))
    finally:
        logger.setLevel(level)
    yield from loader.Load()


def _number(value: Summary.Value, path: Path, step: int) -> float:
    number = _number_in(value)
    if not np.isfinite(number):
        raise ValueError(
            f"`{printable(value.tag)}` must be finite, got {number} at step {step} of"
            f" {printable(path)}."
            " NoiseScaleMonitor never logs that: mend what wrote it."
        )
    return number


def _number_in(value: Summary.Value) -> float:
    if value.HasField("simple_value"):
        return float(value.simple_value)
    if not value.HasField("tensor"):
        return math.nan
    tensor = make_ndarray(value.tensor)
    return float(tensor) if tensor.size == 1 and tensor.dtype.kind in "fiu" else math.nan
