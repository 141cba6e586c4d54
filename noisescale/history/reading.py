# SPDX-License-Identifier: Apache-2.0
"""Read a run into a `History`, from its document, and its other metrics from its logger's files."""

from __future__ import annotations

import json
import time
import warnings
from collections.abc import Iterable, Mapping
from os import PathLike
from pathlib import Path
from typing import NoReturn

import numpy as np
from numpy.typing import ArrayLike, NDArray

from noisescale.history.checkpoints import document_in_checkpoint, is_checkpoint
from noisescale.history.document import Document, Part
from noisescale.history.history import History
from noisescale.history.logs import CsvLog, EventLog
from noisescale.history.metric_names import ROOT, monitor_of, name_in, prefix_of
from noisescale.history.record import RECORD
from noisescale.history.run_files import logs_of, only_run_in
from noisescale.printable import printable
from noisescale.refusal import Refusal

Array = NDArray[np.float64]

_WAIT = "Wait until the monitor has logged once. If the run was killed before that, train it again."


def read_run(
    path: str | PathLike[str], *, optimizer: int = 0, monitor: str | None = None
) -> History:
    """Read the history that `NoiseScaleMonitor` recorded in one run.

    It is in the file noise_scale.jsonl in the run's folder, and in each of its checkpoints. Steps
    that were trained twice, as the run was resumed from a checkpoint, count once, with their last
    values.

    If several runs wrote into one file, the one that began last is read. To read another, put its
    name behind the file: "runs/a/noise_scale.jsonl/3fa9c1d2".

    Args:
        path: The folder of a run, its file, a checkpoint, or a parent folder that contains a single
            run.
        optimizer: The number of the optimizer, if several were measured (manual optimization).
        monitor: The name of the monitor, if it has a name.

    Returns:
        The same history as `monitor.history`, with all rows.

    Raises:
        ValueError: If nothing was logged, the file is damaged, or the folder has several runs.
        OSError: If the run cannot be read.
    """
    path, run = only_run_in(Path(path)), ""
    if path.parent.name == RECORD:
        path, run = path.parent.parent, path.name
    if is_checkpoint(path) and not (path / RECORD).is_file():
        return history_in(document_in_checkpoint(path), path, monitor or "", optimizer)
    return history_in(read_document(path / RECORD), path, monitor or "", optimizer, run)


def read_document(file: Path) -> Document:
    """Read a file noise_scale.jsonl. A last line that is not whole is left out, with a warning.

    Raises:
        Refusal: If a line is none of a document.
        OSError: If the file cannot be read.
    """
    *lines, rest = file.read_bytes().split(b"\n")
    document = Document()
    for number, line in enumerate(lines, start=1):
        try:
            document.add(json.loads(line))
        except Refusal:
            raise
        except (ValueError, TypeError, AttributeError, LookupError):
            raise Refusal(
                file,
                "have a row of a history in each line",
                printable(line[:60].decode(errors="replace")),
                "Remove the line, or copy the file again.",
                at=(file, number),
            ) from None
    if rest:
        warnings.warn(
            f"{printable(file)} ends within line {len(lines) + 1}, as if the run was killed while"
            " it wrote this line. The line is left out.",
            stacklevel=4,
        )
    return document


def history_in(
    document: Document, path: Path, monitor: str, optimizer: int, run: str = ""
) -> History:
    """Return what a monitor ("" is one without a name) measured of an optimizer.

    Args:
        document: The document of the run.
        path: The run.
        monitor: The name of the monitor.
        optimizer: The number of the optimizer.
        run: The name of the run, if the document has several. Default: the one that began last.

    Raises:
        Refusal: If it measured nothing, or there is no such monitor, optimizer or run.
    """
    prefix = prefix_of(optimizer, monitor)
    runs = document.runs(prefix)
    if not runs:
        _refuse_unmeasured(document, path, monitor, optimizer)
    if run and run not in runs:
        names = ", ".join(runs)
        raise Refusal("run", f"be the name of a run in {path}", run, f"Its runs: {names}.")
    name = run or next(reversed(runs))
    if prefix in document.mixed and not run:
        others = ", ".join(str(path / RECORD / each) for each in runs if each != name)
        warnings.warn(
            f"Several trainings wrote into {printable(path / RECORD)} at the same time. The one"
            " that began last is read."
            + (f" To read another run, give {printable(others)}." if others else ""),
            stacklevel=3,
        )
    found = _history_of(runs[name], path)
    found.optimizers = optimizers_in(document, monitor)
    file = path / RECORD
    if not runs[name].header.get("ended") and file.is_file():
        found.under_way = time.time() - file.stat().st_mtime <= usual_gap(found)
    return found


def optimizers_in(document: Document, monitor: str) -> tuple[int, ...]:
    """Return the numbers of the optimizers of a monitor."""
    of = (monitor_of(f"{prefix}batch_size") for prefix, _ in document.parts)
    return tuple(sorted({each[1] for each in of if each and each[0] == monitor}))


def _history_of(part: Part, path: Path) -> History:
    try:
        found = part.history()
    except (ValueError, TypeError, LookupError):
        raise Refusal(
            path,
            "have a whole header of each history",
            printable(json.dumps(part.header)[:100]),
            "Copy the file again, or take another checkpoint.",
            word="damaged",
        ) from None
    if not len(found):
        raise Refusal(
            path,
            "have measured steps" if found.why_nothing else "have a row of the history",
            "none",
            found.why_nothing or _WAIT,
            word="unmeasured" if found.why_nothing else "empty",
        )
    if part.lost is not None:
        after, before = part.lost
        warnings.warn(
            f"{printable(path)} lacks the rows between the steps {after:,.0f} and {before:,.0f}."
            " What was measured there does not count.",
            stacklevel=4,
        )
    found.source = path
    return found


def _refuse_unmeasured(document: Document, path: Path, monitor: str, optimizer: int) -> NoReturn:
    """Raise a Refusal of a document that has nothing of a monitor and an optimizer."""
    found = {monitor_of(f"{of}batch_size") or ("", 0) for of, _ in document.parts}
    if any(name == monitor for name, _ in found):
        raise Refusal(
            "optimizer",
            f"be the number of an optimizer that was measured in {path}",
            optimizer,
            "Leave it out for the first optimizer.",
            word="absent",
        )
    if found:
        names = sorted({repr(name) if name else "one without a name" for name, _ in found})
        raise Refusal(
            "monitor",
            f"be the name of a monitor in {path}",
            repr(monitor or None),
            f"Its monitors: {', '.join(names)}.",
            word="absent",
        )
    raise Refusal(
        path,
        "have a row of the history",
        "an empty file",
        _WAIT,
        word="empty",
    )


PATIENCE = 60.0
"""Seconds without a new row before it is late, however fast rows have come."""

GAPS = 4.0
"""Usual gaps between two rows that may pass before the next one is late."""


def usual_gap(history: Mapping[str, Array]) -> float:
    """Return the seconds after which a new row of a run that trains is late."""
    gaps = np.diff(history["step"], prepend=0)[-10:] * history["seconds_per_step"][-10:]
    known = gaps[np.isfinite(gaps)]
    return max(PATIENCE, GAPS * float(np.median(known))) if len(known) else PATIENCE


def read_log(path: Path) -> CsvLog | EventLog:
    """Return the logger's log of a run.

    Args:
        path: The run's folder or file.

    Raises:
        ValueError: If a file is damaged.
        OSError: If the run cannot be read.
        MissingExtraError: If there are event files, and TensorBoard is not installed.
    """
    files = logs_of(path)
    return CsvLog(files[0]) if files[0].suffix == ".csv" else EventLog(path, files)


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
    log = read_log(path)
    steps, values, _ = log.metric(name)
    known = np.isfinite(values)
    if not known.any():
        refuse_metric(path, name, log.names)
    at, found = steps[known] + steps_behind(monitored_history(path)), values[known]
    last = mark_last(at)
    order = np.argsort(at[last], kind="stable")
    return at[last][order], found[last][order]


def monitored_history(path: Path) -> History | None:
    """Return the rows of the first monitor and optimizer of a run that have any.

    Returns:
        A history without rows, with the reason, if nothing was measured; None without a monitor.

    Raises:
        Refusal: If the record is damaged.
    """
    file = (path.parent if path.is_file() else path) / RECORD
    if not file.is_file():
        return None
    document = read_document(file)
    nothing = None
    for who in sorted({*filter(None, (monitor_of(f"{of}batch_size") for of, _ in document.parts))}):
        try:
            return history_in(document, file.parent, *who)
        except Refusal as refused:
            if refused.word not in ("empty", "unmeasured"):
                raise
            if refused.word == "unmeasured" and nothing is None:
                nothing = History()
                nothing.why_nothing = refused.remedy
    return nothing


def refuse_metric(path: Path, name: str, names: Iterable[str]) -> NoReturn:
    """Raise the error of a metric that was not logged."""
    others = ", ".join(sorted(n for n in names if _is_metric(n))[:20])
    raise Refusal(
        "goal",
        f"name a metric of {path}",
        repr(name),
        f"Its metrics: {others or 'none'}.",
    )


def steps_behind(history: Mapping[str, Array] | None) -> float:
    """Return how many steps a trainer's log is behind the optimizer: 0 or 1.

    Trainers log under the number of the step, or of the step before. The monitor's rows of a step
    that was measured show which.
    """
    if history is None or not np.isfinite(history["behind"]).any():
        return 0.0
    return float(np.nanmax(history["behind"]).clip(0, 1))


def mark_last(steps: ArrayLike) -> NDArray[np.bool_]:
    """Mark the values that count, by their steps in the order of logging.

    Of one step the last value counts. What a resumed run trained again counts once.

    Examples:
        >>> mark_last([1.0, 2.0, 2.0, 5.0, 3.0, 4.0])
        array([ True, False,  True, False,  True,  True])
    """
    at = np.asarray(steps, dtype=np.float64)
    earliest_after = np.minimum.accumulate(at[::-1])[::-1][1:]
    return np.append(at[:-1] < earliest_after, True)[: len(at)]


def _is_metric(name: str) -> bool:
    """Return whether a tag or column is a metric for which a goal makes sense."""
    kinds = ("custom_scalars__config__", "text_summary", "step", "epoch")
    return not name_in(name, ROOT) and not name.endswith(kinds)
