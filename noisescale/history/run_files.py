# SPDX-License-Identifier: Apache-2.0
"""Find runs in folders, and the files of a run."""

from __future__ import annotations

import re
from pathlib import Path

from noisescale.history.checkpoints import is_checkpoint
from noisescale.history.mlflow_log import files_of_run, is_database, runs_in_database, runs_in_store
from noisescale.history.trackers import RECORD, refuse_tracker
from noisescale.printable import printable
from noisescale.refusal import FileRefusal, Refusal

_FILES = ("events.out.tfevents.*", "metrics.csv")


def runs_in(path: Path) -> list[Path]:
    """Return the runs at a path or below it, in the order in which they were last written.

    Returns:
        The path itself, if it is a file, a folder with the files of a run, or a checkpoint. Of a
        record its folder. Of a database of MLflow see `runs_in_database`.

    Raises:
        ValueError: If there are only runs of W&B without a record. Their files cannot be read.
        OSError: If the path does not exist.
    """
    if is_database(path):
        return runs_in_database(path)
    if path.suffix == ".wandb" and (path.parent / "files" / RECORD).is_file():
        return [path.parent / "files"]
    if path.is_file():
        refuse_tracker(path)
        return [path.parent if path.name == RECORD else path]
    if is_database(path.parent):
        return [run for run in runs_in_database(path.parent) if path.name in run.parts] or [path]
    if not path.exists():
        raise FileRefusal(
            "run",
            "be a folder or a file",
            f"{path}, which does not exist",
            "Name the folder that the logger wrote to, for example lightning_logs/version_0.",
        )
    if files_of_rows(path) or is_checkpoint(path):
        return [path]
    runs = {file.parent for pattern in (*_FILES, RECORD) for file in path.rglob(pattern)}
    if not runs:
        refuse_tracker(path)
        runs = set(runs_in_store(path))
        runs.update(*(runs_in_database(file) for file in path.rglob("*.db") if is_database(file)))
    return sorted(runs, key=lambda run: (_last_written(run), run))


def files_of(run: Path) -> list[Path]:
    """Return the logger's files of a run: its event files, in order, one CSV file, or MLflow's."""
    if run.is_file():
        return [run]
    if is_database(run.parent):
        return [run.parent]
    return (
        sorted(run.glob(_FILES[0]), key=_in_order) or list(run.glob(_FILES[1])) or files_of_run(run)
    )


def files_of_rows(run: Path) -> list[Path]:
    """Return the files with the monitor's rows: the record, or else the logger's files."""
    record = (run.parent if run.is_file() else run) / RECORD
    return [record] if record.exists() else files_of(run)


def _last_written(run: Path) -> float:
    """Return the time at which a run's files were last written, in seconds since the epoch."""
    return max(
        (file.stat().st_mtime for file in (*files_of(run), *files_of_rows(run))), default=0.0
    )


def only_run_in(path: Path) -> Path:
    """Return the folder or file of the only run at a path or below it.

    Raises:
        ValueError: If there are several runs or none, or only runs of W&B or MLflow.
        OSError: If the path does not exist.
    """
    runs = runs_in(path)
    if len(runs) == 1:
        return runs[0]
    if not runs:
        last = max(filter(is_checkpoint, path.rglob("*")), key=_time_of_change, default=None)
        remedy = "Name the folder that the logger wrote to, for example lightning_logs/version_0."
        if last is not None:
            remedy = f"A checkpoint has a history, too, if the run had a monitor: name {last}."
        raise Refusal(
            path,
            "contain a run",
            f"no {RECORD}, no event file of TensorBoard and no metrics.csv",
            remedy,
        )
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


def _time_of_change(path: Path) -> float:
    return path.stat().st_mtime


def _in_order(file: Path) -> list[tuple[int, str]]:
    """Return what event files are sorted by: TensorBoard numbers those of one second and process.

    As texts, number 10 would come before number 9.
    """
    return [(int(x), "") if x.isdecimal() else (-1, x) for x in re.split(r"(\d+)", file.name)]
