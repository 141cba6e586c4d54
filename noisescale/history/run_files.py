# SPDX-License-Identifier: Apache-2.0
"""Find runs in folders, and the files of a run."""

from __future__ import annotations

import re
from pathlib import Path

from noisescale.history.checkpoints import is_checkpoint
from noisescale.history.record import RECORD
from noisescale.history.trackers import refuse_tracker
from noisescale.printable import printable
from noisescale.refusal import FileRefusal, Refusal

_LOGS = ("events.out.tfevents.*", "metrics.csv")

_HOW_TO_NAME = "Name the folder of the run, for example lightning_logs/version_0."


def runs_in(path: Path) -> list[Path]:
    """Return the runs at a path or below it, in the order in which they were last written.

    Returns:
        Folders with a record. The path itself, if it is a checkpoint.

    Raises:
        ValueError: If it is a file of something else, or there are only runs without a record.
        OSError: If the path does not exist.
    """
    if path.is_file() and path.name == RECORD:
        return [path.parent]
    named = path.parent.name == RECORD and path.parent.is_file()  # by its name within the file
    if not named and not path.exists():
        raise FileRefusal(
            "run", "be a folder or a file", f"{path}, which does not exist", _HOW_TO_NAME
        )
    if named or is_checkpoint(path) or (path / RECORD).is_file():
        return [path]
    runs = {file.parent for file in path.rglob(RECORD)}
    if not runs:
        _refuse_file_beside(path)
        refuse_tracker(path)
        _refuse_logs(path)
    return sorted(runs, key=lambda run: (_time_of_change(run / RECORD), run))


def logs_of(run: Path) -> list[Path]:
    """Return the logger's files of a run: its event files, in order, or one CSV file.

    Raises:
        Refusal: If there are none.
    """
    found = [run] if run.is_file() else sorted(run.glob(_LOGS[0]), key=_in_order)
    found = found or list(run.glob(_LOGS[1]))
    if is_checkpoint(run) or not found:
        raise Refusal(
            run,
            "have the files of a logger",
            "a checkpoint, which has the history alone" if is_checkpoint(run) else "none",
            "Name the folder that TensorBoard or a CSVLogger wrote to.",
        )
    return found


def only_run_in(path: Path) -> Path:
    """Return the only run at a path or below it.

    Raises:
        ValueError: If there are several runs or none.
        OSError: If the path does not exist.
    """
    runs = runs_in(path)
    if len(runs) == 1:
        return runs[0]
    if not runs:
        last = max(filter(is_checkpoint, path.rglob("*")), key=_time_of_change, default=None)
        remedy = _HOW_TO_NAME
        if last is not None:
            remedy = f"A checkpoint has a history, too, if the run had a monitor: name {last}."
        raise Refusal(path, "contain a run", f"no {RECORD}", remedy)
    shown = ", ".join(printable(name_of(run, path)) for run in sorted(runs)[:5])
    raise Refusal(
        path,
        "contain one run",
        f"{len(runs)}: {shown}{', ...' if len(runs) > 5 else ''}",
        "Name one of these runs.",
    )


def name_of(run: Path, below: Path) -> str:
    """Return the name of a run among those below a path."""
    return str(run.relative_to(below) if run.is_relative_to(below) else run)


def _refuse_file_beside(path: Path) -> None:
    """Refuse a logger's file that has the record of its run beside it."""
    places = (path.parent / RECORD, path.parent / "files" / RECORD)  # the second is W&B's
    if path.is_file() and (record := next(filter(Path.is_file, places), None)):
        raise Refusal(
            path, f"be the folder of a run with {RECORD}", "another file", f"Name {record}."
        )


def _refuse_logs(path: Path) -> None:
    """Refuse what has no record: a file of something else, or what a logger wrote about a run."""
    got = "another file"
    if not path.is_file():
        if not any(file for pattern in _LOGS for file in path.rglob(pattern)):
            return
        got = "the logger's files alone"
    raise Refusal(
        path,
        f"have the file {RECORD} beside the logger's files",
        got,
        f"A run with `NoiseScaleMonitor()` has {RECORD} in the folder that its logger wrote to:"
        " copy it, too. Each checkpoint of the run has the same.",
        word="unrecorded",
    )


def _time_of_change(path: Path) -> float:
    return path.stat().st_mtime


def _in_order(file: Path) -> list[tuple[int, str]]:
    """Return what event files are sorted by: TensorBoard numbers those of one second and process.

    As texts, number 10 would come before number 9.
    """
    return [(int(x), "") if x.isdecimal() else (-1, x) for x in re.split(r"(\d+)", file.name)]
