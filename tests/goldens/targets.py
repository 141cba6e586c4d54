# SPDX-License-Identifier: Apache-2.0
"""Models that the stored runs and sweeps were trained with, as scripts of users define them."""

from collections.abc import Sequence
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.demos import Transformer
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

CLASSES = 10


class Classifier(LightningModule):
    """A perceptron, or a network with convolutions, for images of 8 x 8 pixels."""

    def __init__(
        self,
        lr: float = 0.2,
        optimizer: str = "SGD",
        momentum: float = 0.0,
        width: int = 32,
        net: nn.Module | None = None,
        decay: int = 0,
        broken: Sequence[int] = (),
    ) -> None:
        super().__init__()
        self.save_hyperparameters(ignore=["net", "broken"])
        torch.manual_seed(0)
        self.net = net or nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, CLASSES))
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


def convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)),
        *(nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 16, 3), nn.ReLU()),
        *(nn.Flatten(), nn.Linear(256, CLASSES)),
    )


def digits(batch_size: int) -> tuple[DataLoader, DataLoader]:
    x, y = load_digits(return_X_y=True)
    images, labels = torch.tensor(x / 16).float(), torch.tensor(y)
    train, test = TensorDataset(images[:1400], labels[:1400]), TensorDataset(*(images, labels))
    shuffled = torch.Generator().manual_seed(0)
    return (
        DataLoader(train, batch_size, shuffle=True, generator=shuffled, drop_last=True),
        DataLoader(torch.utils.data.Subset(test, range(1400, 1797)), 397),
    )


class Words(Dataset):
    """Pairs of sentences of 16 words, one word apart, from a language of 100 words."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        after = torch.randint(100, (100, 4), generator=generator)
        words, which = [0], torch.randint(4, (20_000,), generator=generator)
        for k in which.tolist():
            words.append(int(after[words[-1], k]))
        self.words = torch.tensor(words)

    def __len__(self) -> int:
        return len(self.words) // 16 - 1

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        piece = self.words[16 * index : 16 * index + 17]
        return piece[:-1], piece[1:]


class Sentences(LightningModule):
    """The Transformer of Lightning's demos, which learns words that follow each other."""

    def __init__(self, optimizer: str = "SGD", lr: float = 0.5) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = Transformer(vocab_size=100, ninp=32, nhead=2, nhid=32, nlayers=1, dropout=0.1)
        self.kind, self.lr = optimizer, lr

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        sentence, target = batch
        return nn.functional.nll_loss(self.net(sentence, target), target.flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return getattr(torch.optim, self.kind)(self.parameters(), lr=self.lr)


def sentences(batch_size: int) -> DataLoader:
    shuffled = torch.Generator().manual_seed(0)
    return DataLoader(Words(), batch_size, shuffle=True, generator=shuffled, drop_last=True)


def make(width: int = 32) -> tuple[LightningModule, tuple[DataLoader, DataLoader]]:
    """What `noisescale sweep`, `tune` and `branch` train."""
    return Classifier(width=width), digits(16)


def alone() -> tuple[LightningModule, Dataset]:
    """The module and its data without loaders."""
    module, (train, _) = make()
    return module, train.dataset
