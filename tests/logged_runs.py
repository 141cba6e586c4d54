# SPDX-License-Identifier: Apache-2.0
"""Folders of logs as the monitor leaves them."""

from pathlib import Path

from torch.utils.tensorboard import SummaryWriter


def log_run(
    folder: Path,
    *,
    noise_scale: float = 192.0,
    resolved: bool = True,
    optimizer: int = 0,
    monitor: str = "",
    before: str = "",
    optimizer_kind: int | None = None,
) -> None:
    """1,000 steps of 64 examples on two devices, 0.1 s each, a row every 10 steps."""
    prefix = f"{before}noise_scale/" + (f"{monitor}/" if monitor else "")
    prefix += f"optimizer_{optimizer}/" if optimizer else ""
    with SummaryWriter(str(folder)) as writer:
        for step in range(10, 1001, 10):
            row = {
                "step": step,
                "examples": 64 * step,
                "batch_size": 64,
                "lower_bound": 0.8 * noise_scale,
                "seconds_per_step": 0.1,
                "devices": 2,
                "accumulation": 1,
            }
            if optimizer_kind is not None:
                row["optimizer_kind"] = optimizer_kind
            if resolved:
                row |= {"simple": noise_scale, "simple_high": 1.3 * noise_scale}
            for tag, value in row.items():
                writer.add_scalar(prefix + tag, value, step - 1)
            writer.add_scalar("loss", 1 / step, step - 1)
