# SPDX-License-Identifier: Apache-2.0
"""Runs that a tracker keeps in files of its own, and how to get their histories out."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from noisescale.history.metric_names import ROOT
from noisescale.printable import printable

NEXT = "and name history.csv"

OF_WANDB = (
    "python -c 'import pandas, wandb;"
    ' pandas.DataFrame(wandb.Api().run("ENTITY/PROJECT/{run}").scan_history())'
    '.to_csv("history.csv")\''
)
"""Every row of a run. `run.history()` would sample some, charts average between them."""

OF_MLFLOW = (
    "python -c 'import mlflow, pandas; c = mlflow.MlflowClient();"
    ' pandas.DataFrame({{k: {{m.step: m.value for m in c.get_metric_history("{run}", k)}}'
    ' for k in c.get_run("{run}").data.metrics}})'
    '.to_csv("history.csv", index_label="step")\''
)


def refuse_tracker(path: Path) -> None:
    """Raise a ValueError if a folder or file is of a tracker whose files are not read here."""
    wandb = path if path.suffix == ".wandb" else next(path.rglob("run-*.wandb"), None)
    if wandb is not None:
        run = wandb.stem.removeprefix("run-")
        folder = wandb.resolve().parent  # "latest-run" is a link to one
        offline = f"`wandb sync {printable(wandb.parent)}`, then "
        first = offline if folder.name.startswith("offline") else ""
        raise ValueError(
            f"`{printable(path)}` must be a run of TensorBoard or a CSVLogger, got one of W&B."
            f" Run {first}`{OF_WANDB.format(run=printable(run))}` {NEXT}."
        )
    mlflow = next(path.rglob("metrics/noise_scale/step"), None)
    if mlflow is not None and (mlflow.parents[2] / "meta.yaml").exists():
        run = printable(mlflow.parents[2].name)
        raise ValueError(
            f"`{printable(path)}` must be a run of TensorBoard or a CSVLogger, got one of MLflow."
            f" Run `{OF_MLFLOW.format(run=run)}` {NEXT}."
        )


def refuse_chart(source: str, names: Iterable[str]) -> None:
    """Raise a ValueError if columns are those of a chart that was exported from W&B's page."""
    if any(re.search(rf" - (?:train/)?{ROOT}", name) for name in names):
        raise ValueError(
            f"`{source}` must have all metrics of a run at all its rows, got a chart of W&B, which"
            f" has few of them. Run `{OF_WANDB.format(run='RUN')}` {NEXT}."
        )
