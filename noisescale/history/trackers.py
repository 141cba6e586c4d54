# SPDX-License-Identifier: Apache-2.0
"""Runs in the files of W&B and MLflow, and how to get what they have of a run."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from noisescale.history.metric_names import ROOT
from noisescale.printable import printable
from noisescale.refusal import Refusal

RECORD = "noise_scale.jsonl"
"""The name of the record of a run, see `noisescale.history.record`."""

RECORD_OF_WANDB = (
    "python -c 'import wandb;"
    f' wandb.Api().run("ENTITY/PROJECT/{{run}}").file("{RECORD}").download()\''
)
"""The command that fetches the record of a run from W&B."""

HISTORY_OF = {
    "W&B": "python -c 'import pandas, wandb;"
    ' pandas.DataFrame(wandb.Api().run("ENTITY/PROJECT/{run}").scan_history())'
    '.to_csv("history.csv")\'',
    "MLflow": "python -c 'import mlflow, pandas; c = mlflow.MlflowClient();"
    ' pandas.DataFrame({{k: {{m.step: m.value for m in c.get_metric_history("{run}", k)}}'
    ' for k in c.get_run("{run}").data.metrics}})'
    '.to_csv("history.csv", index_label="step")\'',
}
"""Commands that export every row of a run. W&B's `run.history()` would sample rows; its charts
average them."""


def refuse_tracker(path: Path, *, rows: bool = True) -> None:
    """Raise a ValueError if a folder or file is of W&B, or of MLflow and other metrics are wanted.

    W&B's own file of a run cannot be read: wandb 0.31 has no reader of it in Python. An offline run
    without a record is one of an earlier version, whose rows are in W&B's history.

    Args:
        path: The folder or file, in which there is no record.
        rows: Whether the rows of a monitor are wanted, not the other metrics of a run.
    """
    found = _run_of_wandb(path) or (None if rows else _run_of_mlflow(path))
    if found is None:
        return
    tracker, run, first = found
    if rows:
        command, file = RECORD_OF_WANDB, RECORD
        if first:
            command, file = HISTORY_OF[tracker], "history.csv"
        raise Refusal(
            path,
            f"have the file {RECORD}",
            f"a run of {tracker} without it",
            f"Run {first}`{command.format(run=run)}` and pass {file} instead.",
        )
    raise Refusal(
        path,
        "be a run of TensorBoard or a CSVLogger",
        f"a run of {tracker}",
        f"Run {first}`{HISTORY_OF[tracker].format(run=run)}` and pass history.csv instead.",
    )


def _run_of_wandb(path: Path) -> tuple[str, str, str] | None:
    """Return the tracker, the run's name, and what to run first; None if there is no run."""
    file = path if path.suffix == ".wandb" else next(path.rglob("run-*.wandb"), None)
    if file is None:
        return None
    is_offline = file.resolve().parent.name.startswith("offline")  # "latest-run" is a link to one
    first = f"`wandb sync {printable(file.parent)}`, then " if is_offline else ""
    return "W&B", file.stem.removeprefix("run-"), first


def _run_of_mlflow(path: Path) -> tuple[str, str, str] | None:
    metric = next(path.rglob("metrics/noise_scale/batch_size"), None)
    if metric is None or not (metric.parents[2] / "meta.yaml").exists():
        return None
    return "MLflow", printable(metric.parents[2].name), ""


def refuse_chart(source: str, names: Iterable[str]) -> None:
    """Raise a ValueError if columns come from a chart that was exported from W&B's page."""
    if any(re.search(rf" - (?:train/)?{ROOT}", name) for name in names):
        raise Refusal(
            source,
            "have all columns of a history",
            "the export of a W&B chart, which has few",
            f"Run `{RECORD_OF_WANDB.format(run='RUN')}` and pass {RECORD} instead.",
        )
