# SPDX-License-Identifier: Apache-2.0
"""Models that the stored runs and sweeps were trained with, as scripts of users define them."""

from collections.abc import Sequence
from typing import Any

import torch
from lightning.pytorch import LightningModule
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

CLASSES = 10


class Classifier(LightningModule):
    """A perceptron for images of 8 x 8 pixels."""

    def __init__(
        self,
        lr: float = 0.2,
        optimizer: str = "SGD",
        momentum: float = 0.0,
        width: int = 32,
        decay: int = 0,
        broken: Sequence[int] = (),
    ) -> None:
        super().__init__()
        self.save_hyperparameters(ignore=["broken"])
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, CLASSES))
        self.broken = broken

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        loss = nn.functional.cross_entropy(self.net(x), y)
        return loss * float("nan") if self.global_step in self.broken else loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        x, y = batch
        logits = self.net(x)
        self.log("val_loss", nn.functional.cross_entropy(logits, y), sync_dist=True)
        self.log("accuracy", (logits.argmax(1) == y).float().mean(), sync_dist=True)

    def configure_optimizers(self) -> Any:
        settings = {"momentum": self.hparams["momentum"]} if self.hparams["momentum"] else {}
        kind = getattr(torch.optim, self.hparams["optimizer"])
        optimizer = kind(self.parameters(), lr=self.hparams["lr"], **settings)
        if not self.hparams["decay"]:
            return optimizer
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.hparams["decay"])
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def digits(batch_size: int) -> tuple[DataLoader, DataLoader]:
    x, y = load_digits(return_X_y=True)
    images, labels = torch.tensor(x / 16).float(), torch.tensor(y)
    train, test = TensorDataset(images[:1400], labels[:1400]), TensorDataset(*(images, labels))
    shuffled = torch.Generator().manual_seed(0)
    return (
        DataLoader(train, batch_size, shuffle=True, generator=shuffled, drop_last=True),
        DataLoader(torch.utils.data.Subset(test, range(1400, 1797)), 397),
    )


def make(width: int = 32) -> tuple[LightningModule, tuple[DataLoader, DataLoader]]:
    """What `noisescale sweep`, `tune` and `branch` train."""
    return Classifier(width=width), digits(16)


def alone() -> tuple[LightningModule, Dataset]:
    """The module and its data without loaders."""
    module, (train, _) = make()
    return module, train.dataset
