# SPDX-License-Identifier: Apache-2.0
"""Time a Lightning run whose batch size is scheduled but never changes, against the monitor alone.

In every round each of three fits of the same model runs once, in a random order: with
NoiseScaleMonitor, with it again, and with BatchSizeScheduler whose bounds leave one batch size,
so that it measures, decides every 8 steps, scales the learning rate by 1 and never moves. Timed
are the steps after the first 40 (early decisions are nearer to each other), whole: the mean over
them. Claimed is the median over rounds of its time over the first fit's in the same round. The
second fit with the monitor alone shows what the machine's noise does to that figure. The monitor
measures as often in all three, by the cost that a scheduler brings.

    python benchmarks/cost/scheduler.py [--rounds 15] [--smoke]

On CPU, in one process that accumulates two micro-batches, and on two ranks of DDP over gloo, one
thread each. Exits 1 if a median exceeds 1.01.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import disable_possible_user_warnings
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

sys.path.append(str(Path(__file__).resolve().parents[2]))
from benchmarks.lib.results import write_results
from noisescale import BatchSizeScheduler, NoiseScaleMonitor

WIDTH, LAYERS, BATCH = 512, 4, 256
LEFT_OUT, STEPS = 40, 440
CLAIMED = 1.01
LAYOUTS: dict[str, dict[str, Any]] = {
    "accumulation": {"devices": 1, "accumulate_grad_batches": 2},
    "ddp": {"devices": 2, "strategy": "ddp_fork"},
}


class Network(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        layers = [part for _ in range(LAYERS) for part in (nn.Linear(WIDTH, WIDTH), nn.GELU())]
        self.net = nn.Sequential(*layers, nn.Linear(WIDTH, 1))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        return nn.functional.mse_loss(self.net(x), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Timed(Callback):
    """Write the mean seconds of the steps after the first ones to a file."""

    def __init__(self, path: Path, left_out: int) -> None:
        self.path, self.left_out = path, left_out
        self.began: tuple[int, float] | None = None

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        if self.began is None and trainer.global_step == self.left_out:
            self.began = trainer.global_step, time.perf_counter()

    def on_train_end(self, trainer: Any, *_: Any) -> None:
        assert self.began is not None
        step, at = self.began
        if trainer.is_global_zero:
            mean = (time.perf_counter() - at) / (trainer.global_step - step)
            self.path.write_text(repr(mean))


def seconds_per_step(
    layout: str, scheduled: bool, left_out: int, steps: int, folder: Path
) -> float:
    options = LAYOUTS[layout]
    micro_batches = options.get("accumulate_grad_batches", 1) * options["devices"]
    monitor = NoiseScaleMonitor()
    monitor.follow()
    callbacks: list[Callback] = [monitor]
    if scheduled:
        bounds = {"min_batch_size": BATCH, "max_batch_size": BATCH}
        callbacks.append(BatchSizeScheduler(**bounds, lr_scaling="adascale"))
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(64 * BATCH, size, generator=generator) for size in (WIDTH, 1))
    Trainer(
        accelerator="cpu",
        max_steps=steps,
        max_epochs=-1,
        callbacks=[*callbacks, Timed(folder / "seconds", left_out)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    ).fit(Network(), DataLoader(TensorDataset(x, y), batch_size=BATCH // micro_batches))
    return float((folder / "seconds").read_text())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--smoke", action="store_true", help="one short round, unsaved")
    arguments = parser.parse_args()
    rounds, left_out, steps = arguments.rounds, LEFT_OUT, STEPS
    if arguments.smoke:
        rounds, left_out, steps = 1, 8, 16
    torch.set_num_threads(1)
    disable_possible_user_warnings()
    warnings.simplefilter("ignore")
    ways = {"monitor": False, "monitor again": False, "scheduler": True}
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for layout in LAYOUTS:
            seconds: dict[str, list[float]] = {way: [] for way in ways}
            for _ in range(rounds):
                for way in random.sample(list(ways), len(ways)):
                    fit = layout, ways[way], left_out, steps, Path(folder)
                    seconds[way].append(seconds_per_step(*fit))
            for way in ("monitor again", "scheduler"):
                pairs = zip(seconds[way], seconds["monitor"], strict=True)
                ratios = sorted(mine / plain for mine, plain in pairs)
                row = {
                    "layout": layout,
                    "way": way,
                    "ratio": round(statistics.median(ratios), 4),
                    "quartiles": [round(ratios[len(ratios) * k // 4], 4) for k in (1, 3)],
                    "milliseconds": round(1e3 * statistics.median(seconds[way]), 3),
                }
                rows.append(row)
                print(row, flush=True)
    if arguments.smoke:
        return 0
    write_results("cost/scheduler", rows, rounds=rounds, steps=steps - LEFT_OUT)
    return 0 if all(row["ratio"] <= CLAIMED for row in rows if row["way"] == "scheduler") else 1


if __name__ == "__main__":
    sys.exit(main())
