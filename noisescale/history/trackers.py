# SPDX-License-Identifier: Apache-2.0
"""Runs in the files of W&B, MLflow and trackio, and how to get what they have of a run."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from contextlib import closing, suppress
from pathlib import Path

from noisescale.history.record import RECORD
from noisescale.printable import printable
from noisescale.refusal import Refusal

RECORD_OF = {
    "W&B": "python -c 'import wandb;"
    f' wandb.Api().run("ENTITY/PROJECT/{{run}}").file("{RECORD}").download()\'',
    "MLflow": f"mlflow artifacts download --run-id {{run}} --artifact-path {RECORD} --dst-path .",
    "trackio": "python -c 'import trackio;"
    ' trackio.init("{run}", name="RUN", resume="must");'
    f' trackio.use_artifact("run-ID-{RECORD}").download(".")\'',
}
"""Commands that fetch the record of a run."""

HISTORY_OF = {
    "W&B": "python -c 'import pandas, wandb;"
    ' pandas.DataFrame(wandb.Api().run("ENTITY/PROJECT/{run}").scan_history())'
    '.to_csv("history.csv")\'',
    "MLflow": "python -c 'import mlflow, pandas; c = mlflow.MlflowClient();"
    ' pandas.DataFrame({{k: {{m.step: m.value for m in c.get_metric_history("{run}", k)}}'
    ' for k in c.get_run("{run}").data.metrics}})'
    '.to_csv("history.csv", index_label="step")\'',
    "trackio": "python -c 'import pandas; from trackio.sqlite_storage import SQLiteStorage as s;"
    ' pandas.DataFrame(s.get_logs("{run}", "RUN")).rename(columns={{"step": "_step"}})'
    '.to_csv("history.csv")\'',
}
"""Commands that export every value of a run's metrics. W&B's `run.history()` would sample them."""

_SQLITE = b"SQLite format 3\0"
"""The beginning of a database, in which MLflow and trackio keep their runs."""


def refuse_tracker(path: Path, *, rows: bool = True) -> None:
    """Raise a ValueError if a folder or file is of a tracker, without the record of a run.

    Args:
        path: The folder or file.
        rows: Whether the rows of a monitor are wanted, not the other metrics of a run.
    """
    found = _run_of_wandb(path) or _run_with_a_database(path)
    if found is None:
        return
    tracker, run, first = found
    file = RECORD if rows else "history.csv"
    command = (RECORD_OF if rows else HISTORY_OF)[tracker].format(run=run)
    raise Refusal(
        path,
        f"have the file {RECORD}" if rows else "be a run of TensorBoard or a CSVLogger",
        f"a run of {tracker}{' without it' * rows}",
        f"Run {first}`{command}` and pass {file} instead.",
    )


def refuse_chart(path: Path, names: Sequence[str]) -> None:
    """Raise a ValueError if the columns of a CSV file are those of a chart on W&B's page.

    W&B samples, or averages, the values of long runs in charts.
    """
    if any(f"{name}__MIN" in names and f"{name}__MAX" in names for name in names):
        raise Refusal(
            path,
            "have the whole history of one run",
            "a chart of W&B",
            f"For each run, run `{HISTORY_OF['W&B'].format(run='RUN')}`, and pass its history.csv.",
        )


def _run_of_wandb(path: Path) -> tuple[str, str, str] | None:
    """Return the tracker, the run's name, and what to run first; None if there is no run."""
    file = path if path.suffix == ".wandb" else next(path.rglob("run-*.wandb"), None)
    if file is None:
        return None
    is_offline = file.resolve().parent.name.startswith("offline")  # "latest-run" is a link to one
    first = f"`wandb sync {printable(file.parent)}`, then " if is_offline else ""
    return "W&B", file.stem.removeprefix("run-"), first


def _run_with_a_database(path: Path) -> tuple[str, str, str] | None:
    """Return the same of a run of MLflow or trackio."""
    if path.is_file():
        with path.open("rb") as file:
            if file.read(len(_SQLITE)) != _SQLITE:
                return None
        tables: set[str] = set()
        with suppress(sqlite3.Error), closing(sqlite3.connect(path)) as database:
            tables = {name for (name,) in database.execute("SELECT name FROM sqlite_master")}
        if not {"metrics", "configs"} <= tables:
            return "MLflow", "RUN", ""
        project = printable(path.stem)
        return "trackio", project, f"`trackio list artifacts --project {project}`, then "
    about = next((x for x in path.rglob("meta.yaml") if (x.parent / "metrics").is_dir()), None)
    if about is not None:
        return "MLflow", printable(about.parent.name), ""
    return next(
        (found for file in path.glob("*.db") if (found := _run_with_a_database(file))), None
    )
