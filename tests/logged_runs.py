# SPDX-License-Identifier: Apache-2.0
"""Folders of logs as the monitor leaves them."""

from pathlib import Path

from noisescale.history.history import History
from noisescale.history.optimizers import OptimizerKind, OptimizerMix
from noisescale.history.record import Recorder


def log_run(
    folder: Path,
    *,
    noise_scale: float = 192.0,
    resolved: bool = True,
    optimizer: int = 0,
    monitor: str = "",
    before: str = "",
    optimizer_kind: int | None = None,
    rows: int = 100,
) -> None:
    """Steps of 64 examples on two devices, 0.1 s each, a row every 10 steps: 1,000 by default."""
    from torch.utils.tensorboard import SummaryWriter

    prefix = "noise_scale/" + (f"{monitor}/" if monitor else "")
    prefix += f"optimizer_{optimizer}/" if optimizer else ""
    mix = OptimizerMix(OptimizerKind(optimizer_kind)) if optimizer_kind else None
    history = History(optimizer=mix)
    recorder = Recorder(folder, prefix)
    with SummaryWriter(str(folder)) as writer:
        for step in range(10, 10 * rows + 1, 10):
            low, high = 0.8 * noise_scale, 1.3 * noise_scale
            logged = {"batch_size": 64.0, "lower_bound": low, "seconds_per_step": 0.1}
            row = {"step": step, "examples": 64 * step, "batch_size": 64, "low": low}
            row |= {"seconds_per_step": 0.1, "devices": 2, "accumulation": 1}
            if resolved:
                logged |= {"simple": noise_scale, "simple_high": high}
                row |= {"noise_scale": noise_scale, "high": high}
            recorder.add(history, row, behind=1.0)
            history.append(**row)
            for tag, value in logged.items():
                writer.add_scalar(before + prefix + tag, value, step - 1)
            writer.add_scalar("loss", 1 / step, step - 1)
    recorder.end()
