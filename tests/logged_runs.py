# SPDX-License-Identifier: Apache-2.0
"""Folders of logs as the monitor leaves them."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from noisescale.history.history import History
from noisescale.history.optimizers import OptimizerKind, OptimizerMix
from noisescale.history.record import Recorder

Row = tuple[int, Mapping[str, float | None]]


def write_events(folder: Path, rows: Iterable[Row], suffix: str = "", **options: Any) -> None:
    """An event file of scalars at their steps; what is None is left out."""
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(folder), filename_suffix=suffix) as writer:
        for step, scalars in rows:
            for tag, value in scalars.items():
                if value is not None:
                    writer.add_scalar(tag, value, step, **options)


def ours(row: Mapping[str, float | None]) -> dict[str, float | None]:
    """Under the names of a monitor's metrics."""
    return {f"noise_scale/{name}": value for name, value in row.items()}


def record(folder: Path, **columns: Any) -> History:
    """The record of a run with these columns, which has ended."""
    steps = len(next(iter(columns.values())))
    history = History.from_columns({n: np.broadcast_to(x, steps) for n, x in columns.items()})
    Recorder(folder).end(history)
    return history


def log_run(
    folder: Path,
    *,
    noise_scale: float = 192.0,
    resolved: bool = True,
    optimizer: int = 0,
    monitor: str = "",
    before: str = "",
    optimizer_kind: OptimizerKind | None = None,
    rows: int = 100,
) -> None:
    """Steps of 64 examples on two devices, 0.1 s each, a row every 10 steps: 1,000 by default."""
    prefix = "noise_scale/" + (f"{monitor}/" if monitor else "")
    prefix += f"optimizer_{optimizer}/" if optimizer else ""
    history = History(optimizer=OptimizerMix(optimizer_kind) if optimizer_kind else None)
    history.prefix = prefix
    recorder = Recorder(folder)
    low, high = 0.8 * noise_scale, 1.3 * noise_scale
    logged = {"batch_size": 64.0, "lower_bound": low, "seconds_per_step": 0.1}
    same = {"batch_size": 64, "low": low, "seconds_per_step": 0.1, "devices": 2, "accumulation": 1}
    if resolved:
        logged |= {"simple": noise_scale, "simple_high": high}
        same |= {"noise_scale": noise_scale, "high": high}
    steps = range(10, 10 * rows + 1, 10)
    for step in steps:
        row = {"step": step, "examples": 64 * step, "behind": 1.0, **same}
        recorder.add(history, row)
        history.append(**row)
    recorder.end(history)
    named = {before + prefix + tag: value for tag, value in logged.items()}
    write_events(folder, ((step - 1, named | {"loss": 1 / step}) for step in steps))
