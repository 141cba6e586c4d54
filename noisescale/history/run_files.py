# SPDX-License-Identifier: Apache-2.0
"""Find runs in folders, and the files of a run."""

from __future__ import annotations

from pathlib import Path

from noisescale.history.trackers import RECORD, refuse_tracker
from noisescale.printable import printable
from noisescale.refusal import FileRefusal, Refusal

_FILES = ("events.out.tfevents.*", "metrics.csv")


def runs_in(path: Path) -> list[Path]:
    """Return the runs at a path or below it, in the order in which they were last written.

    Returns:
        The path itself, if it is a file, or a folder with the files of a run. Of a record its
        folder.

    Raises:
        ValueError: If there are only runs of W&B or MLflow. Their files cannot be read.
        OSError: If the path does not exist.
    """
    if path.is_file():
        refuse_tracker(path)
        return [path.parent if path.name == RECORD else path]
    if not path.exists():
        raise FileRefusal(
            "run",
            "be a folder or a file",
            f"{path}, which does not exist",
            "Name the folder that the logger wrote to, for example lightning_logs/version_0.",
        )
    if files_of_rows(path):
        return [path]
    runs = {file.parent for pattern in (*_FILES, RECORD) for file in path.rglob(pattern)}
    if not runs:
        refuse_tracker(path)
    return sorted(runs, key=lambda run: (_last_written(run), run))


def files_of(run: Path) -> list[Path]:
    """Return the logger's files of a run: its event files, in order, or one CSV file."""
    if run.is_file():
        return [run]
    return sorted(run.glob(_FILES[0])) or list(run.glob(_FILES[1]))


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
        raise Refusal(
            path,
            "contain a run",
            f"no {RECORD}, no event file of TensorBoard and no metrics.csv",
            "Name the folder that the logger wrote to, for example lightning_logs/version_0.",
        )
    shown = ", ".join(printable(run.relative_to(path)) for run in sorted(runs)[:5])
    raise Refusal(
        path,
        "contain one run",
        f"{len(runs)}: {shown}{', ...' if len(runs) > 5 else ''}",
        "Name one of these runs.",
    )
