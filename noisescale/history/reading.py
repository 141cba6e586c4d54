# SPDX-License-Identifier: Apache-2.0
"""Read a run back into a `History`: from TensorBoard's files, or from a CSVLogger's."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike, NDArray

from noisescale.csv_lines import csv_lines
from noisescale.extras import need
from noisescale.history.history import COLUMNS, History
from noisescale.history.increments import INCREMENTS
from noisescale.history.metric_names import ABOUT_RUN, ROOT, measured_in, name_in, prefix_of
from noisescale.history.optimizers import OptimizerKind
from noisescale.printable import printable

Array = NDArray[np.float64]

_COLUMN_OF = {
    "simple": "noise_scale",
    "simple_high": "high",
    "lower_bound": "low",
    **{name: name for name in COLUMNS if name not in ("noise_scale", "low", "high")},
}
"""From what is logged, without its prefix, to the history's column."""

_ALWAYS = ("step", "examples", "batch_size")
"""Columns without which a row says nothing."""

_FILES = ("events.out.tfevents.*", "metrics.csv")


def read_run(
    path: str | PathLike[str],
    *,
    optimizer: int = 0,
    monitor: str | None = None,
    allow_truncated: bool = False,
) -> History:
    """Read what `NoiseScaleMonitor` logged in one run.

    Where a run was resumed from a checkpoint, steps that were trained again count once, as they
    were trained last.

    Args:
        path: A folder with TensorBoard's event files or a CSVLogger's metrics.csv, one of those
            files, or a folder above that has a single such run in it.
        optimizer: Which one, where several were measured under manual optimization.
        monitor: Its name, where it was given one.
        allow_truncated: Take what is whole of an event file that ends within a record, as those
            of a run that is still being written do.

    Returns:
        The history as `monitor.history` has it, to the precision of the file (TensorBoard's is
        float32). Files do not tell the unit: it is "examples".

    Raises:
        ValueError: If nothing was logged, the file is damaged, or the folder has several runs.
        OSError: If it cannot be read.
        MissingExtraError: If there are event files, and TensorBoard is not installed.
    """
    path = _run_in(Path(path))
    prefix = prefix_of(optimizer, monitor)
    files = [path] if path.is_file() else sorted(path.glob(_FILES[0]))
    if files and files[0].suffix != ".csv":
        need("tensorboard", f"Reading the event files of {printable(path)}")
        from noisescale.history.event_files import read_event_files

        columns, others = read_event_files(files, prefix, allow_truncated=allow_truncated)
    else:
        columns, others = _read_csv(path if path.is_file() else path / _FILES[1], prefix)
    history = _history(columns, printable(path), (monitor or "", optimizer), others)
    history.source = path
    return history


def read_metric(path: str | PathLike[str], name: str) -> tuple[Array, Array]:
    """Read another metric of a run that the monitor logged too, for instance its loss.

    Args:
        path: See `read_run`.
        name: As it was logged; TensorBoard shows it.

    Returns:
        Optimizer steps, rising, and the values, without those that are not finite.

    Raises:
        ValueError: If there is no such metric, or nothing tells which steps it was logged at.
        OSError: If the run cannot be read.
    """
    path = _run_in(Path(path))
    files = [path] if path.is_file() else sorted(path.glob(_FILES[0]))
    if files and files[0].suffix != ".csv":
        need("tensorboard", f"Reading the event files of {printable(path)}")
        from noisescale.history.event_files import read_scalar

        steps, values, names = read_scalar(files, name)
        ours = next((n for n in sorted(names) if measured_in(n) is not None), "")
        clock = read_scalar(files, ours)[:2]
    else:
        file = path if path.is_file() else path / _FILES[1]
        (_, header), *lines = list(csv_lines(file)) or [(0, [])]
        names = set(header)
        ours = next((n for n in header if measured_in(n) is not None), "")
        steps, values = _column(header, lines, name)
        clock = _column(header, lines, ours)
    known = np.isfinite(values) if len(values) else np.array([], dtype=bool)
    if not known.any():
        others = ", ".join(sorted(n for n in names if _is_metric(n))[:20])
        raise ValueError(
            f"`goal` must name a metric of {printable(path)}, got {printable(name)!r}."
            f" There is {printable(others) or 'none'}."
        )
    if not len(clock[0]):
        raise ValueError(
            f"`{printable(path)}` must be a run with NoiseScaleMonitor, got no step of it. Add"
            " `NoiseScaleMonitor()` to the callbacks of the Trainer."
        )
    # Trainers log under the number of the step, or of the one before: our rows tell which, those
    # of a step that was measured.
    behind = float(np.subtract(clock[1], clock[0]).max().clip(0, 1))
    at, found = np.array(steps)[known] + behind, np.array(values)[known]
    # Of one step the last one counts, and what a resumed run trained again counts once.
    last = np.append(at[:-1] < np.minimum.accumulate(at[::-1])[::-1][1:], True)
    order = np.argsort(at[last], kind="stable")
    return at[last][order], found[last][order]


def _column(
    header: Sequence[str], lines: Sequence[tuple[int, Sequence[str]]], name: str
) -> tuple[list[float], list[float]]:
    """A metric's steps and values in a CSVLogger's file; none where it is not there."""
    if name not in header or "step" not in header:
        return [], []
    where, step = header.index(name), header.index("step")
    cells = [(line[step], line[where]) for _, line in lines if line[where]]
    return [float(at) for at, _ in cells], [float(value) for _, value in cells]


def _is_metric(name: str) -> bool:
    """Whether a tag or column is something that a run may reach."""
    kinds = ("custom_scalars__config__", "text_summary", "step", "epoch")
    return not name_in(name, ROOT) and not name.endswith(kinds)


def history_from_scalars(
    scalars: Mapping[str, tuple[ArrayLike, ArrayLike]],
    *,
    optimizer: int = 0,
    monitor: str | None = None,
    source: str = "run",
) -> History:
    """Return the history in scalars that were read elsewhere.

    Args:
        scalars: From tag to the steps it was logged at and its values. Rows are joined by step;
            those that lack what is always logged are left out.
        optimizer: See `read_run`.
        monitor: See `read_run`.
        source: What to call the run in errors.

    Raises:
        ValueError: If the monitor logged nothing.

    Example:
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
    return _history(columns, printable(source), (monitor or "", optimizer), list(scalars))


def _run_in(path: Path) -> Path:
    """The folder or file of the single run that there is at `path` or below it."""
    if path.is_file():
        return path
    if not path.is_dir():
        raise FileNotFoundError(
            f"`run` must be a folder or a file, got {printable(path)}, which is neither."
        )
    if any(True for pattern in _FILES for _ in path.glob(pattern)):
        return path
    runs = sorted({file.parent for pattern in _FILES for file in path.rglob(pattern)})
    if len(runs) == 1:
        return runs[0]
    if not runs:
        raise ValueError(
            f"`{printable(path)}` must hold a run, got no event file of TensorBoard and no"
            " metrics.csv in it."
            " Name the folder that the logger wrote to, such as lightning_logs/version_0."
        )
    shown = ", ".join(printable(run.relative_to(path)) for run in runs[:5])
    raise ValueError(
        f"`{printable(path)}` must hold one run, got {len(runs)}:"
        f" {shown}{', ...' if len(runs) > 5 else ''}."
        " Name one of them."
    )


def _read_csv(path: Path, prefix: str) -> tuple[dict[str, NDArray[np.float64]], list[str]]:
    lines = csv_lines(path)
    _, names = next(lines, (0, []))
    named = ((k, name_in(tag, prefix)) for k, tag in enumerate(names))
    ours = {k: name for k, name in named if name is not None}
    values: dict[str, list[float]] = {name: [] for name in ours.values()}
    if len(values) < len(ours):
        twice = next(name for name in values if list(ours.values()).count(name) > 1)
        alike = ", ".join(names[k] for k, name in ours.items() if name == twice)
        raise ValueError(
            f"`{printable(path)}` must have one column of each metric, got {printable(alike)}."
            " Remove those of another run."
        )
    for number, line in lines:
        if not any(line[k] for k in ours):
            continue  # another callback's metrics
        for k, name in ours.items():
            values[name].append(_cell(line[k], path, number, names[k]))
    columns = {name: np.array(column) for name, column in values.items()}
    return columns, [name for name in names if name_in(name, prefix) is None]


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
            " NoiseScaleMonitor never logs that: mend what wrote it."
        )
    return value


def _history(
    logged: Mapping[str, NDArray[np.float64]],
    source: str,
    asked: tuple[str, int],
    others: Sequence[str],
) -> History:
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
        _refuse_unmeasured(source, asked, [*(prefix + name for name in logged), *others])
        has = printable(", ".join(others[:5])) if others else "nothing else"
        raise ValueError(
            f"`{source}` must be a run with NoiseScaleMonitor, got no {prefix}{missing[0]} in it"
            f" (but {has}). Add `NoiseScaleMonitor()` to the callbacks of the Trainer."
        )
    complete = np.logical_and.reduce([np.isfinite(columns[name]) for name in _ALWAYS])
    columns = {name: values[complete] for name, values in columns.items()}
    if not complete.any():
        raise ValueError(
            f"`{source}` must have a whole row of NoiseScaleMonitor's metrics, got none."
            " Train until it has logged once."
        )
    # A run that was resumed trained some steps again: of each step the last one counts. Where no
    # step was measured since the row before it, a row says again what that one did, and lacks what
    # steps added.
    step = columns["step"]
    later = np.minimum.accumulate(step[::-1])[::-1]
    again = np.flatnonzero(step[1:] == step[:-1]) + 1
    for name in INCREMENTS & columns.keys():
        for row in again:
            if np.isnan(columns[name][row]):
                columns[name][row] = columns[name][row - 1]
    last = np.append(step[:-1] < later[1:], True)
    columns = {name: values[last] for name, values in columns.items()}
    unresolved = np.full(int(last.sum()), math.inf)
    high = columns.get("high", unresolved)
    columns["high"] = np.where(np.isnan(high), math.inf, high)
    return History.from_columns(
        columns,
        optimizer=OptimizerKind.logged_as(optimizers),
        parameters=float(parameters[-1]) if len(parameters) else math.nan,
    )


def _refuse_unmeasured(source: str, asked: tuple[str, int], tags: Sequence[str]) -> None:
    """Raise a ValueError if other monitors or optimizers than that have tags here."""
    found = {who for tag in tags if (who := measured_in(tag)) is not None}
    if not found or asked in found:
        return
    monitor, optimizer = asked
    if any(name == monitor for name, _ in found):
        raise ValueError(
            f"`optimizer` must be one that was measured in {source}, got {optimizer}."
            " Leave it out for the first."
        )
    names = ", ".join(sorted({repr(name) if name else "one without a name" for name, _ in found}))
    raise ValueError(
        f"`monitor` must be the name of one in {source}, got {monitor or None!r}. There is {names}."
    )
