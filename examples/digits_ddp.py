# SPDX-License-Identifier: Apache-2.0
"""Measure the gradient noise scale while handwritten digits are learned on two CPU processes.

    python examples/digits_ddp.py [--schedule]

The one line that measures is the callback in the Trainer. With `report=True` it also prints at the
end what the run would have cost at other batch sizes. With `--schedule` another callback lets the
batch size follow the noise scale. The rest is an ordinary training script. With
`pytorch_lightning`, import from there instead of `lightning.pytorch`.
"""

import argparse
import logging
import os
import sys
import warnings
from pathlib import Path

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import RichProgressBar
from lightning.pytorch.loggers import TensorBoardLogger
from rich.console import Console
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from noisescale import BatchSizeScheduler, NoiseScaleMonitor


class DigitClassifier(LightningModule):
    """A small perceptron, by plain SGD: the case the theory of the noise scale is for."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        return nn.functional.cross_entropy(self.net(x), y)

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        x, y = batch
        accuracy = (self.net(x).argmax(1) == y).float().mean()
        self.log("accuracy", accuracy, prog_bar=True, sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.2)


def digits(batch_size: int) -> tuple[DataLoader, DataLoader]:
    """Return loaders over 1,437 and 360 images of 8 x 8 pixels."""
    x, y = load_digits(return_X_y=True)
    parts = train_test_split(x / 16, y, test_size=0.2, random_state=0, stratify=y)
    train_x, test_x, train_y, test_y = (torch.tensor(part) for part in parts)
    train = TensorDataset(train_x.float(), train_y)
    test = TensorDataset(test_x.float(), test_y)
    return (
        DataLoader(train, batch_size=batch_size, shuffle=True),
        DataLoader(test, batch_size=len(test)),
    )


def tensorboard_command(logs: Path) -> str:
    """Return the command that shows the logs, from the environment this script runs in."""
    program = Path(sys.executable).with_name("tensorboard")
    name = os.path.relpath(program) if program.exists() else "tensorboard"
    return f"{name} --logdir {logs}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--batch-size", type=int, default=4, help="examples a process")
    parser.add_argument("--schedule", action="store_true", help="let the batch size follow")
    parser.add_argument("--logs", type=Path, default=Path("lightning_logs"))
    arguments = parser.parse_args()

    for package in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(package).setLevel(logging.WARNING)
    # Lightning 2.6.6 with torch 2.13.
    warnings.filterwarnings("ignore", ".*treespec.*is deprecated")
    seed_everything(0, verbose=False)
    monitor = NoiseScaleMonitor(report=True)
    scheduling = [BatchSizeScheduler("tradeoff")] if arguments.schedule else []
    trainer = Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        max_epochs=arguments.epochs,
        log_every_n_steps=10,
        callbacks=[monitor, *scheduling, RichProgressBar()],
        logger=TensorBoardLogger(arguments.logs, name="digits"),
        enable_model_summary=False,
    )
    train, test = digits(arguments.batch_size)
    trainer.fit(DigitClassifier(), train, test)

    if trainer.is_global_zero:
        console = Console(highlight=False)
        console.print(f"\nGradient noise scale at the end: [bold]{monitor.noise_scale}[/]")
        console.print("TensorBoard shows all of it in the tab Noise scale:")
        console.print(f"  [bold]{tensorboard_command(arguments.logs)}[/]", soft_wrap=True)


if __name__ == "__main__":
    main()
