# SPDX-License-Identifier: Apache-2.0
"""Read a run into a `History`, from TensorBoard's event files or a CSVLogger's file."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import NoReturn

import numpy as np
from numpy.typing import ArrayLike, NDArray

from noisescale.csv_lines import csv_lines
from noisescale.extras import need
from noisescale.history.history import COLUMNS, History
from noisescale.history.increments import MEASURED
from noisescale.history.metric_names import ABOUT_RUN, ROOT, measured_in, name_in, prefix_of
from noisescale.history.optimizers import OptimizerKind
from noisescale.history.run_error import RunError
from noisescale.history.run_files import files_of, only_run_in
from noisescale.history.trackers import refuse_chart
from noisescale.printable import printable

Array = NDArray[np.float64]

_COLUMN_OF = {
    "simple": "noise_scale",
    "simple_high": "high",
    "lower_bound": "low",
    **{name: name for name in COLUMNS if name not in ("noise_scale", "low", "high")},
}
"""From a metric's name, without its prefix, to the column of the history."""

_ALWAYS = ("step", "examples", "batch_size")
"""Columns that each row needs."""

CLOCKS = ("step", "trainer/global_step", "train/global_step")
"""Columns of the step: CSVLogger, W&B with Lightning, W&B with transformers."""


def read_run(
    path: str | PathLike[str],
    *,
    optimizer: int = 0,
    monitor: str | None = None,
    allow_truncated: bool = False,
) -> History:
    """Read the history that `NoiseScaleMonitor` logged in one run.

    If a run was resumed from a checkpoint, some steps were trained twice. These steps count once,
    with their last values.

    Args:
        path: A folder with TensorBoard's event files or with a CSVLogger's metrics.csv, one of
            these files, or a parent folder that contains a single such run.
        optimizer: The number of the optimizer, if several were measured (manual optimization).
        monitor: The name of the monitor, if it has a name.
        allow_truncated: Accept an event file that ends within a record, and read its whole records.
            The event files of a run that still trains may end like this.

    Returns:
        The same history as `monitor.history`, with the precision of the file (float32 in
        TensorBoard). The unit is "examples", as files do not contain the unit.

    Raises:
        ValueError: If nothing was logged, the file is damaged, or the folder has several runs.
        OSError: If the run cannot be read.
        MissingExtraError: If there are event files, and TensorBoard is not installed.
    """
    path = only_run_in(Path(path))
    prefix = prefix_of(optimizer, monitor)
    files = files_of(path)
    if files[0].suffix != ".csv":
        need("tensorboard", f"Reading the event files of {printable(path)}")
        from noisescale.history.event_files import read_event_files

        columns, others = read_event_files(files, prefix, allow_truncated=allow_truncated)
    else:
        rows = CsvRows(prefix)
        rows.add_from(files[0], csv_lines(files[0]))
        columns, others = rows.columns(), rows.others
    history = history_of(columns, printable(path), (monitor or "", optimizer), others)
    history.source = path
    return history


def read_metric(path: str | PathLike[str], name: str) -> tuple[Array, Array]:
    """Read another metric of a run with a monitor, for example the loss.

    Args:
        path: See `read_run`.
        name: The name of the metric in the log, as TensorBoard shows it.

    Returns:
        The optimizer steps, in rising order, and the values. Values that are not finite are left
        out.

    Raises:
        ValueError: If there is no such metric, or if the run has no monitor: without a monitor the
            optimizer steps are not known.
        OSError: If the run cannot be read.
    """
    path = only_run_in(Path(path))
    files = files_of(path)
    if files[0].suffix != ".csv":
        need("tensorboard", f"Reading the event files of {printable(path)}")
        from noisescale.history.event_files import read_scalars

        scalars = read_scalars(files).scalars
        names = set(scalars)
        ours = next((n for n in sorted(names) if measured_in(n) is not None), "")
        steps, values = scalars[name][:2] if name in scalars else ([], [])
        clock = scalars[ours][:2] if ours else ([], [])
    else:
        (_, header), *lines = list(csv_lines(files[0])) or [(0, [])]
        names = set(header)
        ours = next((n for n in header if measured_in(n) is not None), "")
        steps, values = _column(header, lines, name)
        clock = _column(header, lines, ours)
    known = np.isfinite(values) if len(values) else np.array([], dtype=bool)
    if not known.any():
        refuse_metric(path, name, names)
    if not len(clock[0]):
        raise ValueError(
            f"`{printable(path)}` must be a run with NoiseScaleMonitor, got no metrics of the"
            " monitor. Add `NoiseScaleMonitor()` to the callbacks of the Trainer."
        )
    at, found = np.array(steps)[known] + steps_behind(*clock), np.array(values)[known]
    last = last_logged(at)
    order = np.argsort(at[last], kind="stable")
    return at[last][order], found[last][order]


def refuse_metric(path: Path, name: str, names: Iterable[str]) -> NoReturn:
    """Raise the error of a metric that is not among the names of those that were logged."""
    others = ", ".join(sorted(n for n in names if _is_metric(n))[:20])
    raise ValueError(
        f"`goal` must name a metric of {printable(path)}, got {printable(name)!r}."
        f" Its metrics: {printable(others) or 'none'}."
    )


def steps_behind(logged_at: ArrayLike, steps: ArrayLike) -> float:
    """Return how many steps a trainer's log is behind the optimizer: 0 or 1.

    Trainers log under the number of the step, or of the step before. The monitor's rows of a step
    that was measured show which.

    Args:
        logged_at: The step under which each of the monitor's rows was logged.
        steps: The optimizer step that each of these rows contains.

    Examples:
        >>> steps_behind([9, 19], [10, 20]), steps_behind([10, 20], [10, 18])
        (1.0, 0.0)
    """
    return float(np.subtract(steps, logged_at).max().clip(0, 1))


def last_logged(steps: Array) -> NDArray[np.bool_]:
    """Mark the values that count, by their steps in the order of logging.

    Of one step the last value counts. What a resumed run trained again counts once.

    Examples:
        >>> last_logged(np.array([1.0, 2.0, 2.0, 5.0, 3.0, 4.0]))
        array([ True, False,  True, False,  True,  True])
    """
    earliest_after = np.minimum.accumulate(steps[::-1])[::-1][1:]
    return np.append(steps[:-1] < earliest_after, True)[: len(steps)]


def rows_that_count(columns: Mapping[str, Array]) -> NDArray[np.bool_]:
    """Mark the rows that the history of the run has, of the rows that were logged.

    Where no step was measured since the row before, a log step says that row again, without what
    steps added. Such a row does not count if the row that it says again is there. After a resume it
    tells where the run went on: what was measured behind that step was trained again. Of the steps
    that were trained again the last ones count, see `last_logged`.

    Args:
        columns: The rows in the order of logging, with the column `step`.
    """
    step = columns["step"]
    kept = np.ones(len(step), dtype=bool)
    units = columns.get(MEASURED, np.full(len(step), math.nan))
    for row in np.flatnonzero(np.isnan(units)) if np.isfinite(units).any() else ():
        if (step[:row][kept[:row]] == step[row]).any():
            kept[row] = False
            kept[:row] &= ~((step[:row] > step[row]) & (units[:row] > 0))
    where = np.flatnonzero(kept)
    kept[where] = last_logged(step[where])
    return kept


def _column(
    header: Sequence[str], lines: Sequence[tuple[int, Sequence[str]]], name: str
) -> tuple[list[float], list[float]]:
    """Return a metric's steps and values in a CSV file; empty if the metric is not there."""
    clock = next((clock for clock in CLOCKS if clock in header), "")
    if name not in header or not clock:
        return [], []
    where, step = header.index(name), header.index(clock)
    cells = [(line[step], line[where]) for _, line in lines if line[step] and line[where]]
    return [float(at) for at, _ in cells], [float(value) for _, value in cells]


def _is_metric(name: str) -> bool:
    """Whether a tag or column is a metric for which a goal makes sense."""
    kinds = ("custom_scalars__config__", "text_summary", "step", "epoch")
    return not name_in(name, ROOT) and not name.endswith(kinds)


def history_from_scalars(
    scalars: Mapping[str, tuple[ArrayLike, ArrayLike]],
    *,
    optimizer: int = 0,
    monitor: str | None = None,
    source: str = "run",
) -> History:
    """Return the history from scalars that were read in another way.

    Args:
        scalars: From a tag to its steps, or the numbers of its rows, and its values. Values of one
            step make a row; rows follow each other by rising step. Rows without one of the metrics
            that are always logged are left out.
        optimizer: See `read_run`.
        monitor: See `read_run`.
        source: The name of the run in error messages.

    Raises:
        ValueError: If the monitor logged nothing.

    Examples:
        >>> tags = {"step": 50, "examples": 1600, "batch_size": 32, "lower_bound": 12.5}
        >>> logged = {f"noise_scale/{tag}": ([49], [value]) for tag, value in tags.items()}
        >>> history_from_scalars(logged)["low"]
        array([12.5])
    """
    prefix = prefix_of(optimizer, monitor)
    ours = {
        name: (np.asarray(steps, np.float64), np.asarray(values, np.float64))
        for tag, (steps, values) in scalars.items()
        if (name := name_in(tag, prefix)) is not None
    }
    rows = np.unique(ours["step"][0]) if "step" in ours else np.array([])
    columns = {}
    for tag, (steps, values) in ours.items():
        columns[tag] = np.full(len(rows), math.nan)
        known = np.isin(steps, rows)
        columns[tag][np.searchsorted(rows, steps[known])] = values[known]
    return history_of(columns, printable(source), (monitor or "", optimizer), list(scalars))


class CsvRows:
    """The rows of one prefix in a CSV file, read line by line."""

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix
        self.others: list[str] = []
        """The names of the columns of other metrics."""
        self._names: list[str] = []
        self._ours: dict[int, str] = {}
        self._values: dict[str, list[float]] = {}

    def __len__(self) -> int:
        return max(map(len, self._values.values()), default=0)

    def add_from(self, path: Path, lines: Iterable[tuple[int, list[str]]]) -> None:
        """Add lines of a file. The very first line has the names of the columns.

        Raises:
            ValueError: If two columns have the same metric, or a cell is not a finite number.
        """
        for number, line in lines:
            if not self._names:
                self._read_names(path, line)
            elif any(line[k] for k in self._ours):  # else it is another callback's
                for k, name in self._ours.items():
                    self._values[name].append(_cell(line[k], path, number, self._names[k]))

    def columns(self) -> dict[str, Array]:
        """Return the values by metric, without the prefix. Missing values are NaN."""
        return {name: np.array(values) for name, values in self._values.items()}

    def _read_names(self, path: Path, names: list[str]) -> None:
        self._names = names
        named = ((k, name_in(tag, self.prefix)) for k, tag in enumerate(names))
        self._ours = {k: name for k, name in named if name is not None and is_logged_number(name)}
        self._values = {name: [] for name in self._ours.values()}
        self.others = [name for k, name in enumerate(names) if k not in self._ours]
        if len(self._values) < len(self._ours):
            of = [*self._ours.values()]
            twice = next(name for name in self._values if of.count(name) > 1)
            alike = ", ".join(names[k] for k, name in self._ours.items() if name == twice)
            raise ValueError(
                f"`{printable(path)}` must have one column for each metric, got"
                f" {printable(alike)}. Remove the columns of the other run."
            )


def is_logged_number(name: str) -> bool:
    """Whether the history has a metric of this name, without its prefix."""
    return name in _COLUMN_OF or name in ABOUT_RUN or name.startswith("group/")


def _cell(text: str, path: Path, line: int, name: str) -> float:
    if not text:
        return math.nan  # not logged
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise ValueError(
            f"`{printable(name)}` must be finite, got {text!r} in line {line} of {printable(path)}."
            " NoiseScaleMonitor only logs finite values: correct the program that wrote the file."
        )
    return value


def history_of(
    logged: Mapping[str, NDArray[np.float64]],
    source: str,
    asked: tuple[str, int],
    others: Sequence[str],
) -> History:
    """Return the history from its columns as they were logged.

    Args:
        logged: The columns by metric, without its prefix.
        source: The name of the run in error messages.
        asked: The monitor's name ("" if it has none) and the optimizer's number.
        others: The names of other metrics of the run.

    Raises:
        RunError: If the monitor logged nothing or no whole row, or if only another monitor did.
    """
    monitor, optimizer = asked
    prefix = prefix_of(optimizer, monitor)
    optimizers, parameters = (
        values[np.isfinite(values)] if (values := logged.get(name)) is not None else np.array([])
        for name in ABOUT_RUN
    )
    columns = {
        _COLUMN_OF.get(name, name): values
        for name, values in logged.items()
        if name in _COLUMN_OF or name.startswith("group/")
    }
    if missing := [name for name in _ALWAYS if name not in columns]:
        refuse_chart(source, others)
        _refuse_unmeasured(source, asked, [*(prefix + name for name in logged), *others])
        has = f"other metrics are {printable(', '.join(others[:5]))}" if others else "nothing else"
        raise RunError(
            "unmeasured",
            f"`{source}` must be a run with NoiseScaleMonitor, got no metric {prefix}{missing[0]}"
            f" ({has}). Add `NoiseScaleMonitor()` to the callbacks of the Trainer.",
        )
    complete = np.logical_and.reduce([np.isfinite(columns[name]) for name in _ALWAYS])
    columns = {name: values[complete] for name, values in columns.items()}
    if not complete.any():
        raise RunError(
            "empty",
            f"`{source}` must have a whole row of NoiseScaleMonitor's metrics, got none."
            " Train until the monitor has logged once.",
        )
    kept = rows_that_count(columns)
    columns = {name: values[kept] for name, values in columns.items()}
    unresolved = np.full(len(columns["step"]), math.inf)
    high = columns.get("high", unresolved)
    columns["high"] = np.where(np.isnan(high), math.inf, high)
    return History.from_columns(
        columns,
        optimizer=OptimizerKind.logged_as(optimizers),
        parameters=float(parameters[-1]) if len(parameters) else math.nan,
    )


def _refuse_unmeasured(source: str, asked: tuple[str, int], tags: Sequence[str]) -> None:
    """Raise a RunError if only other monitors or optimizers have tags here."""
    found = {who for tag in tags if (who := measured_in(tag)) is not None}
    if not found or asked in found:
        return
    monitor, optimizer = asked
    if any(name == monitor for name, _ in found):
        raise RunError(
            "absent",
            f"`optimizer` must be the number of an optimizer that was measured in {source}, got"
            f" {optimizer}. Leave it out for the first optimizer.",
        )
    names = ", ".join(sorted({repr(name) if name else "one without a name" for name, _ in found}))
    raise RunError(
        "absent",
        f"`monitor` must be the name of a monitor in {source}, got {monitor or None!r}. Its"
        f" monitors: {names}.",
    )
