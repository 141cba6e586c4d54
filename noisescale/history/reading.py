# SPDX-License-Identifier: Apache-2.0
"""Read a run into a `History`, from its record, and its other metrics from its logger's files."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Iterable, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import NoReturn

import numpy as np
from numpy.typing import ArrayLike, NDArray

from noisescale.history.checkpoints import history_in_checkpoint, is_checkpoint
from noisescale.history.csv_log import CsvLog
from noisescale.history.event_log import EventLog
from noisescale.history.history import History
from noisescale.history.increments import MEASURED
from noisescale.history.log import AFTER, COLUMN_OF, Log
from noisescale.history.metric_names import ROOT, monitor_of, name_in, prefix_of
from noisescale.history.mlflow_log import MlflowLog, files_of_run, is_database
from noisescale.history.optimizers import OptimizerMix
from noisescale.history.record_log import RecordLog
from noisescale.history.run_files import files_of, files_of_rows, only_run_in
from noisescale.history.trackers import RECORD, refuse_chart
from noisescale.printable import printable
from noisescale.refusal import Refusal

Array = NDArray[np.float64]

_ALWAYS = ("step", "examples", "batch_size")
"""Columns that each row needs."""


def read_run(
    path: str | PathLike[str],
    *,
    optimizer: int = 0,
    monitor: str | None = None,
    allow_truncated: bool = False,
) -> History:
    """Read the history that `NoiseScaleMonitor` recorded in one run.

    It is in the file noise_scale.jsonl in the run's folder. Runs of earlier versions have it in
    TensorBoard's event files or a CSVLogger's metrics.csv, which are read if there is no record. A
    checkpoint has it, too. MLflow's database and folders, and CSV files that W&B or MLflow
    exported, have what the logger shows: then steps and examples are those as logged, and a warning
    says so.

    If a run was resumed from a checkpoint, some steps were trained twice. These steps count once,
    with their last values.

    Args:
        path: The folder of a run, one of its files, a checkpoint, a database of MLflow (with the
            id of a run behind it, if it has several), or a parent folder that contains a single
            run.
        optimizer: The number of the optimizer, if several were measured (manual optimization).
        monitor: The name of the monitor, if it has a name.
        allow_truncated: Accept an event file that ends within a record, and read its whole records.
            The event files of a run that still trains may end like this.

    Returns:
        The same history as `monitor.history`, with all rows. From a file of an earlier version it
        has the precision of this file (float32 in TensorBoard), and the unit is "examples".

    Raises:
        ValueError: If nothing was logged, the file is damaged, or the folder has several runs.
        OSError: If the run cannot be read.
        MissingExtraError: If there are event files, and TensorBoard is not installed.
    """
    path = only_run_in(Path(path))
    if is_checkpoint(path):
        return history_in_checkpoint(path, monitor or "", optimizer)
    files = files_of_rows(path)
    log = _read_whole(open_rows(path, files), files, allow_truncated=allow_truncated)
    return history_in(log, path, monitor or "", optimizer)


def open_rows(path: Path, files: Sequence[Path]) -> Log:
    """Return the log with a run's rows, of which nothing has been read yet.

    Args:
        path: The run.
        files: Its `files_of_rows`.

    Raises:
        MissingExtraError: If there is no record but event files, and TensorBoard is not installed.
    """
    return RecordLog(files[0]) if files[0].name == RECORD else open_log(path)


def open_log(path: Path, *names: str) -> Log:
    """Return the logger's log of a run, of which nothing has been read yet.

    Args:
        path: The run's folder or file.
        *names: Names of metrics that are wanted, besides the monitor's.

    Raises:
        MissingExtraError: If there are event files, and TensorBoard is not installed.
    """
    if is_checkpoint(path):
        raise Refusal(
            path,
            "be the files of a logger",
            "a checkpoint, which has the history alone",
            "Run `noisescale predict` with it, or name the folder that the logger wrote to.",
        )
    files = files_of(path)
    if is_database(path.parent) or files_of_run(path):
        return MlflowLog(path)
    return (CsvLog if any(file.suffix == ".csv" for file in files) else EventLog)(path, *names)


def read_log(path: Path, *names: str, allow_truncated: bool = False) -> Log:
    """Return the whole log of a run, see `open_log`.

    Raises:
        ValueError: If a file is damaged, or ends within a record.
        OSError: If the run cannot be read.
    """
    return _read_whole(open_log(path, *names), files_of(path), allow_truncated=allow_truncated)


def _read_whole(log: Log, files: list[Path], *, allow_truncated: bool) -> Log:
    log.read(files)
    log.check_endings(allow_truncated=allow_truncated)
    return log


def history_in(log: Log, path: Path, monitor: str, optimizer: int) -> History:
    """Return what a monitor ("" is one without a name) logged of an optimizer.

    Raises:
        Refusal: If it logged nothing, or no whole row.
    """
    prefix = prefix_of(optimizer, monitor)
    rows = log.rows(prefix)
    if not log.has_record and "batch_size" in rows and "step" not in rows:
        rows |= log.steps_as_logged(prefix, rows["batch_size"])
        warnings.warn(
            f"{printable(path)} has only what a logger shows, not {RECORD}. Steps and examples are"
            " those under which it was logged, and what was measured between its rows is not known."
            f" If the run's folder has {RECORD}, name that folder.",
            stacklevel=2,
        )
    found = history_of(rows, printable(path), (monitor, optimizer), log.other_names(prefix))
    found.unit, found.confidence, found.loop = log.about.get(
        prefix, (found.unit, found.confidence, found.loop)
    )
    if reason := log.withheld.get(prefix):
        found.withhold(reason)
    found.source = path
    found.under_way = isinstance(log, RecordLog) and is_written(log, found)
    return found


PATIENCE = 60.0
"""Seconds without a new row before it is late, however fast rows have come."""

GAPS = 4.0
"""Usual gaps between two rows that may pass before the next one is late."""


def usual_gap(history: Mapping[str, Array]) -> float:
    """Return the seconds after which a new row of a run that trains is late."""
    gaps = np.diff(history["step"], prepend=0)[-10:] * history["seconds_per_step"][-10:]
    known = gaps[np.isfinite(gaps)]
    return max(PATIENCE, GAPS * float(np.median(known))) if len(known) else PATIENCE


def is_written(record: RecordLog, history: Mapping[str, Array]) -> bool:
    """Return whether a run still trains: it has not ended, and no row is late."""
    if record.ended or record.last_row_at is None:
        return False
    return time.time() - record.last_row_at <= usual_gap(history)


def read_monitor(log: Log, path: Path, metric: str) -> tuple[Log, tuple[str, int], float] | None:
    """Return what a monitor measured in a run of which another metric was read.

    Args:
        log: The logger's log.
        path: The run.
        metric: The other metric.

    Returns:
        The log with the monitor's rows, the names of the monitor and the optimizer, and how many
        steps the logger's log is behind the optimizer. None if there is no monitor.
    """
    files = files_of_rows(path)
    record = open_rows(path, files)
    rows = record if isinstance(record, RecordLog) else log
    if rows is record:
        rows.read(files)
    who = min((who for name in rows.metrics if (who := monitor_of(name))), default=("", 0))
    if isinstance(rows, RecordLog):
        return rows, who, rows.steps_behind
    prefix = prefix_of(who[1], who[0])
    clock = next((name for name in rows.metrics if name_in(name, prefix) == "step"), "")
    at, steps, _ = rows.metric(clock, like=metric)
    return (rows, who, steps_behind(at, steps)) if len(at) else None


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
    log = read_log(path, name, allow_truncated=True)
    steps, values, _ = log.metric(name)
    known = np.isfinite(values)
    if not known.any():
        refuse_metric(path, name, metrics_of(path))
    measured = read_monitor(log, path, name)
    as_logged = not log.has_record and any(monitor_of(each) for each in log.metrics)
    if measured is None and not as_logged:
        raise Refusal(
            path,
            "be a run with NoiseScaleMonitor",
            "no metrics of the monitor",
            "Add `NoiseScaleMonitor()` to the callbacks of the Trainer.",
        )
    at, found = steps[known] + (measured[2] if measured else 0.0), values[known]
    last = mark_last(at)
    order = np.argsort(at[last], kind="stable")
    return at[last][order], found[last][order]


def metrics_of(path: Path) -> list[str]:
    """Return the names of all metrics of a run."""
    log = read_log(path, allow_truncated=True)
    if not isinstance(log, EventLog):
        return log.names if isinstance(log, CsvLog) else log.metrics
    every = EventLog(path, every=True)
    every.read(files_of(path))
    return every.metrics


def refuse_metric(path: Path, name: str, names: Iterable[str]) -> NoReturn:
    """Raise the error of a metric that was not logged."""
    others = ", ".join(sorted(n for n in names if _is_metric(n))[:20])
    raise Refusal(
        "goal",
        f"name a metric of {path}",
        repr(name),
        f"Its metrics: {others or 'none'}.",
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


def mark_last(steps: Array) -> NDArray[np.bool_]:
    """Mark the values that count, by their steps in the order of logging.

    Of one step the last value counts. What a resumed run trained again counts once.

    Examples:
        >>> mark_last(np.array([1.0, 2.0, 2.0, 5.0, 3.0, 4.0]))
        array([ True, False,  True, False,  True,  True])
    """
    earliest_after = np.minimum.accumulate(steps[::-1])[::-1][1:]
    return np.append(steps[:-1] < earliest_after, True)[: len(steps)]


def rows_that_count(columns: Mapping[str, Array]) -> NDArray[np.bool_]:
    """Mark the rows that the history of the run has, of the rows that were logged.

    Where no step was measured since the row before, a log step says that row again, without what
    steps added. Such a row does not count if the row that it says again is there. After a resume it
    tells where the run went on: what was measured behind that step was trained again. Of the steps
    that were trained again the last ones count, see `mark_last`.

    Args:
        columns: The rows in the order of logging, with the column `step`.
    """
    step = columns["step"]
    if AFTER in columns:  # a record says what each row follows
        goes_on_at = np.minimum.accumulate(columns[AFTER][::-1])[::-1][1:]
        return np.append(step[:-1] <= goes_on_at, True)[: len(step)]
    kept = np.ones(len(step), dtype=bool)
    units = columns.get(MEASURED, np.full(len(step), math.nan))
    for row in np.flatnonzero(np.isnan(units)) if np.isfinite(units).any() else ():
        if (step[:row][kept[:row]] == step[row]).any():
            kept[row] = False
            kept[:row] &= ~((step[:row] > step[row]) & (units[:row] > 0))
    where = np.flatnonzero(kept)
    kept[where] = mark_last(step[where])
    return kept


def _is_metric(name: str) -> bool:
    """Return whether a tag or column is a metric for which a goal makes sense."""
    kinds = ("custom_scalars__config__", "text_summary", "step", "epoch")
    return not name_in(name, ROOT) and not name.endswith(kinds)


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
        Refusal: If the monitor logged nothing or no whole row, or if only another monitor did.
    """
    monitor, optimizer = asked
    prefix = prefix_of(optimizer, monitor)
    parameters = np.asarray(logged.get("parameters", ()))
    parameters = parameters[np.isfinite(parameters)]
    columns = {
        COLUMN_OF.get(name, name): values
        for name, values in logged.items()
        if name in (*COLUMN_OF, AFTER) or name.startswith("group/")
    }
    if missing := [name for name in _ALWAYS if name not in columns]:
        refuse_chart(source, others)
        _refuse_unmeasured(source, asked, [*(prefix + name for name in logged), *others])
        if not (logged or others):
            raise Refusal(
                source,
                "be a run that was logged",
                "a log without metrics",
                "Name the folder that the logger wrote to, or wait until it has written.",
                word="empty",
            )
        if "step" in missing and logged:
            raise Refusal(
                source,
                f"have the file {RECORD} beside the logger's files",
                "the logger's files alone",
                f"NoiseScaleMonitor writes {RECORD} into the run's folder: copy it, too.",
                word="unrecorded",
            )
        has = f"other metrics are {printable(', '.join(others[:5]))}" if others else "nothing else"
        raise Refusal(
            source,
            "be a run with NoiseScaleMonitor",
            f"no metric {prefix}{missing[0]} ({has})",
            "Add `NoiseScaleMonitor()` to the callbacks of the Trainer.",
            word="unmeasured",
        )
    complete = np.logical_and.reduce([np.isfinite(columns[name]) for name in _ALWAYS])
    columns = {name: values[complete] for name, values in columns.items()}
    if not complete.any():
        raise Refusal(
            source,
            "have a whole row of NoiseScaleMonitor's metrics",
            "none",
            "Train until the monitor has logged once.",
            word="empty",
        )
    kept = rows_that_count(columns)
    columns = {name: values[kept] for name, values in columns.items() if name != AFTER}
    unresolved = np.full(len(columns["step"]), math.inf)
    high = columns.get("high", unresolved)
    columns["high"] = np.where(np.isnan(high), math.inf, high)
    return History.from_columns(
        columns,
        optimizer=OptimizerMix.from_log(logged),
        parameters=float(parameters[-1]) if len(parameters) else math.nan,
    )


def _refuse_unmeasured(source: str, asked: tuple[str, int], tags: Sequence[str]) -> None:
    """Raise a Refusal if only other monitors or optimizers have tags here."""
    found = {who for tag in tags if (who := monitor_of(tag)) is not None}
    if not found or asked in found:
        return
    monitor, optimizer = asked
    if any(name == monitor for name, _ in found):
        raise Refusal(
            "optimizer",
            f"be the number of an optimizer that was measured in {source}",
            optimizer,
            "Leave it out for the first optimizer.",
            word="absent",
        )
    names = ", ".join(sorted({repr(name) if name else "one without a name" for name, _ in found}))
    raise Refusal(
        "monitor",
        f"be the name of a monitor in {source}",
        repr(monitor or None),
        f"Its monitors: {names}.",
        word="absent",
    )
