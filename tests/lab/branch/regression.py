# SPDX-License-Identifier: Apache-2.0
"""A run of 80 steps with checkpoints, and the model and the data that it trains."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from noisescale import History, NoiseScaleMonitor

STEPS, BATCH_SIZE = 80, 8


class Regression(lightning.pytorch.LightningModule):
    """Linear, with noise in the targets; by the optimizer that is asked for."""

    def __init__(self, make: Callable[..., Any] = torch.optim.AdamW, features: int = 16) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Linear(features, 1)
        self.make = make
        self.seen: list[tuple[float, Any, int]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss = (self.net(x) - y).square().mean()
        self.log("loss", loss)
        if self.net.training:
            (group, *_) = self.trainer.optimizers[0].param_groups
            self.seen.append((group["lr"], group.get("betas"), len(x)))
            seen.append(self.seen[-1])
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = self.make(self.parameters(), lr=0.02)
        decay = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.5, total_iters=STEPS)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": decay, "interval": "step"}}


seen: list[tuple[float, Any, int]] = []
"""Of the copies that are trained: learning rate, betas and examples of each pass."""


def examples() -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2000, 16, generator=generator)
    y = x.sum(1, keepdim=True) + torch.randn(2000, 1, generator=generator)
    return TensorDataset(x, y)


def train(folder: Path) -> History:
    """Leave a log, checkpoints in `saved`, and a checkpoint of weights alone in `weights`."""
    monitor = NoiseScaleMonitor(every_n_steps=1)
    saved = ModelCheckpoint(folder / "saved", every_n_train_steps=20, save_top_k=-1)
    weights = ModelCheckpoint(
        folder / "weights", every_n_train_steps=40, save_top_k=-1, save_weights_only=True
    )
    torch.manual_seed(1)
    lightning.pytorch.Trainer(
        accelerator="cpu",
        max_steps=STEPS,
        callbacks=[monitor, saved, weights],
        log_every_n_steps=5,
        logger=CSVLogger(folder),
        enable_progress_bar=False,
        enable_model_summary=False,
    ).fit(Regression(), DataLoader(examples(), batch_size=BATCH_SIZE, shuffle=True))
    return monitor.history
