# SPDX-License-Identifier: Apache-2.0
"""What the readers of all formats share."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike

from noisescale.lab.compare.measurements import Measurements, Trial
from noisescale.printable import printable
from noisescale.refusal import Refusal


@dataclass(frozen=True)
class Found:
    """The trials of one path."""

    trials: list[Trial]
    metrics: Callable[[], Iterable[str]]
    """Names the metrics that there are. Finding these names may take longer than the trials."""
    errors: Sequence[Exception] = ()
    """The errors of the trials that could not be read, each of which has a `fault`."""


def broken_trial(name: str, error: Exception, submission: str | None = None) -> Trial:
    """Return the trial of a run that could not be read, with the reason."""
    return Trial(name, Measurements([], []), submission or "", fault=str(error))


def number(text: str, path: Path, line: int, column: str) -> float:
    """Return the number in a cell. "nan" and "inf" are numbers.

    Raises:
        ValueError: If the cell has something else.
    """
    try:
        return float(text)
    except ValueError:
        raise Refusal(
            column,
            "be a number",
            repr(text),
            "Correct this cell, or remove the line.",
            at=(path, line),
        ) from None


def is_number(text: str) -> bool:
    """Return whether a cell has a number."""
    try:
        float(text)
    except ValueError:
        return False
    return True


def measurements_of(
    where: str,
    steps: ArrayLike,
    values: ArrayLike,
    *,
    batch_size: float = math.nan,
    examples: ArrayLike | None = None,
    epochs: ArrayLike | None = None,
    seconds: ArrayLike | None = None,
) -> Measurements:
    """Return the evaluations of a trial. The batch size gives the examples, if these are not known.

    Raises:
        ValueError: If the batch size is not positive, or see `Measurements`. The message says where
            the evaluations are from.
    """
    if batch_size <= 0 or math.isinf(batch_size):
        raise Refusal(
            "batch_size",
            "be positive and finite",
            f"{batch_size:g} for {where}",
            "Correct it, or leave it out.",
        )
    clocks = [examples, epochs, seconds]  # an empty column is none
    examples, epochs, seconds = (
        None if c is None or np.isnan(np.asarray(c, np.float64)).all() else c for c in clocks
    )
    if examples is None and math.isfinite(batch_size):
        examples = batch_size * np.asarray(steps, np.float64)
    try:
        return Measurements(steps, values, examples, epochs, seconds)
    except ValueError as error:
        raise ValueError(f"{error} The evaluations are those of {printable(where)}.") from error


def natural_key(path: Path) -> list[tuple[int, str]]:
    """Return a key that sorts version_2 before version_10."""
    parts = re.split(r"(\d+)", str(path))
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in parts]


def name_of_run(path: Path, below: Path) -> str:
    """Return the name of a run: its path below the given one, or the name of the path itself."""
    if path != below:
        return path.relative_to(below).as_posix()
    path = path.resolve()
    if path.name == "metrics.csv" or is_event_file(path.name):
        path = path.parent
    return path.name if path.is_dir() else path.stem


def is_event_file(name: str) -> bool:
    """Return whether a file's name is that of an event file of TensorBoard."""
    return name.startswith("events.out.tfevents.")
