# SPDX-License-Identifier: Apache-2.0
"""Runs in the files of W&B and MLflow, and how to export their histories."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from noisescale.history.metric_names import ROOT
from noisescale.printable import printable
from noisescale.refusal import Refusal

NEXT = "and pass history.csv instead"

OF_WANDB = (
    "python -c 'import pandas, wandb;"
    ' pandas.DataFrame(wandb.Api().run("ENTITY/PROJECT/{run}").scan_history())'
    '.to_csv("history.csv")\''
)
"""Exports every row of a run. `run.history()` would sample rows; charts average them."""

OF_MLFLOW = (
    "python -c 'import mlflow, pandas; c = mlflow.MlflowClient();"
    ' pandas.DataFrame({{k: {{m.step: m.value for m in c.get_metric_history("{run}", k)}}'
    ' for k in c.get_run("{run}").data.metrics}})'
    '.to_csv("history.csv", index_label="step")\''
)


def refuse_tracker(path: Path) -> None:
    """Raise a ValueError if a folder or file belongs to W&B or MLflow."""
    wandb = path if path.suffix == ".wandb" else next(path.rglob("run-*.wandb"), None)
    if wandb is not None:
        run = wandb.stem.removeprefix("run-")
        folder = wandb.resolve().parent  # "latest-run" is a link to one
        offline = f"`wandb sync {printable(wandb.parent)}`, then "
        first = offline if folder.name.startswith("offline") else ""
        raise Refusal(
            path,
            "be a run of TensorBoard or a CSVLogger",
            "a run of W&B",
            f"Run {first}`{OF_WANDB.format(run=run)}` {NEXT}.",
        )
    mlflow = next(path.rglob("metrics/noise_scale/step"), None)
    if mlflow is not None and (mlflow.parents[2] / "meta.yaml").exists():
        run = printable(mlflow.parents[2].name)
        raise Refusal(
            path,
            "be a run of TensorBoard or a CSVLogger",
            "a run of MLflow",
            f"Run `{OF_MLFLOW.format(run=run)}` {NEXT}.",
        )


def refuse_chart(source: str, names: Iterable[str]) -> None:
    """Raise a ValueError if columns come from a chart that was exported from W&B's page."""
    if any(re.search(rf" - (?:train/)?{ROOT}", name) for name in names):
        raise Refusal(
            source,
            "have all metrics of a run",
            "the export of a W&B chart, which has few metrics",
            f"Run `{OF_WANDB.format(run='RUN')}` {NEXT}.",
        )
