# SPDX-License-Identifier: Apache-2.0
"""Runs in MLflow's own files: a database of SQLite, or a folder with a file for each metric."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from urllib.parse import unquote, urlparse

from noisescale.history.log import Log
from noisescale.history.metric_names import ROOT
from noisescale.history.trackers import RECORD
from noisescale.refusal import Refusal

_METRICS = "metrics"

_SQLITE = b"SQLite format 3\0"
"""The beginning of a database."""


def is_database(path: Path) -> bool:
    """Return whether a file is a database of SQLite."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(len(_SQLITE)) == _SQLITE


def runs_in_database(path: Path) -> list[Path]:
    """Return the measured runs in a database, in the order in which they began.

    Returns:
        The folder of a run's artifacts, if the record is there. Else the path of the database with
        the id of the run behind it: there is no such file, but `MlflowLog` reads it.

    Raises:
        Refusal: If it is no database of MLflow, or has no measured run.
    """
    with _open(path) as database:
        runs = database.execute(
            "SELECT run_uuid, artifact_uri FROM runs WHERE lifecycle_stage = 'active' AND EXISTS"
            " (SELECT 1 FROM metrics WHERE metrics.run_uuid = runs.run_uuid AND key LIKE ?)"
            " ORDER BY start_time",
            (f"%{ROOT}%batch_size",),
        ).fetchall()
    if not runs:
        raise Refusal(
            path,
            "have a run with NoiseScaleMonitor",
            f"a database of MLflow without a metric {ROOT}batch_size",
            "Add `NoiseScaleMonitor()` to the callbacks of the Trainer.",
            word="unmeasured",
        )
    return [_with_record(str(artifacts)) or path / str(run) for run, artifacts in runs]


def runs_in_store(path: Path) -> Iterator[Path]:
    """Return the folders of measured runs in a folder of MLflow, at a path or below it."""
    for about in path.rglob("meta.yaml"):
        if any((about.parent / _METRICS).rglob("batch_size")):
            yield about.parent


def files_of_run(run: Path) -> list[Path]:
    """Return the files of a run's metrics, if it is the folder of a run of MLflow."""
    if not (run / "meta.yaml").is_file():
        return []
    return sorted(file for file in (run / _METRICS).rglob("*") if file.is_file())


class MlflowLog(Log):
    """A run in a database or in a folder of MLflow. It may still grow: it is read anew then.

    Args:
        path: The database with the run's id behind it, or the run's folder.
    """

    has_record = False

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path
        self._before: tuple[int, int] | None = None

    @property
    def unread(self) -> int:
        """Nothing: MLflow writes whole values."""
        return 0

    def replaced(self, files: list[Path]) -> bool:
        """Return whether something was written since: then it has to be read from its beginning."""
        return self._before is not None and self._before != _state_of(files)

    def read(self, files: list[Path]) -> bool:
        """Read the run, once. Return whether there was anything new.

        Raises:
            Refusal: If it is damaged.
            OSError: If it cannot be read.
        """
        if self._before is not None:
            return False
        self._before = _state_of(files)
        found = list(_in_database(self.path) if is_database(files[0]) else _in_files(files))
        first = min((at for _, _, at, _ in found), default=0)
        for name, value, at, step in found:
            self.add(name, value, f"in {self.path}", step=step, seconds=(at - first) / 1e3, part=0)
            if name.startswith(ROOT):
                self.last_row_at = max(self.last_row_at or 0.0, at / 1e3)
        return bool(found)

    def check_endings(self, *, allow_truncated: bool = False) -> None:
        """Do nothing: MLflow writes whole values."""


_Value = tuple[str, float, int, int]
"""The name of a metric, a value, milliseconds since the epoch, the step."""


def _in_database(path: Path) -> Iterator[_Value]:
    with _open(path.parent) as database:
        yield from database.execute(
            "SELECT key, value, timestamp, step FROM metrics WHERE run_uuid = ? AND NOT is_nan"
            " ORDER BY rowid",
            (path.name,),
        )


def _in_files(files: list[Path]) -> Iterator[_Value]:
    """Return the values in a folder's files, in the order of writing."""
    found = []
    for file in files:
        name = file.as_posix().rpartition(f"/{_METRICS}/")[2]
        for number, line in enumerate(file.read_text().splitlines(), start=1):
            try:
                at, value, step = line.split()
                found.append((name, float(value), int(at), int(step)))
            except ValueError:
                raise Refusal(
                    file,
                    "have milliseconds, a value and a step in each line",
                    repr(line),
                    "Remove the line, or copy the file again.",
                    at=(file, number),
                ) from None
    return iter(sorted(found, key=lambda value: (value[2], value[3])))


def _state_of(files: list[Path]) -> tuple[int, int]:
    """Return what changes when something is written."""
    found = [file.stat() for file in files]
    return sum(one.st_size for one in found), max(one.st_mtime_ns for one in found)


@contextmanager
def _open(path: Path) -> Iterator[sqlite3.Connection]:
    """Open a database to read it."""
    try:
        uri = f"{path.resolve().as_uri()}?mode=ro"
        with closing(sqlite3.connect(uri, uri=True)) as database:
            yield database
    except sqlite3.Error as error:
        raise Refusal(
            path,
            "be a database of MLflow",
            f"one that cannot be read as such: {error}",
            "Name MLflow's database, for example mlflow.db.",
        ) from None


def _with_record(artifacts: str) -> Path | None:
    """Return the folder of artifacts, if it is on this machine and has the record of the run."""
    parsed = urlparse(artifacts)
    folder = Path(unquote(parsed.path) if parsed.scheme == "file" else artifacts)
    return folder if (folder / RECORD).is_file() else None
