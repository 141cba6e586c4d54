# SPDX-License-Identifier: Apache-2.0
"""Measure the gradient noise scale while handwritten digits are learned on two CPU processes.

    python examples/digits_ddp.py

The one line that measures is the callback in the Trainer. The rest is an ordinary training
script, and a table of what the run would have cost at other batch sizes.
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
from rich.table import Table
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from noisescale import NoiseScaleMonitor, Tradeoff


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


def cost_table(tradeoff: Tradeoff, batch_size: float) -> Table:
    """Show the run's cost at other batch sizes; the run's own is in bold."""
    table = Table()
    for column in ("batch size", "steps", "examples", "time", "compute"):
        table.add_column(column, justify="right")
    for size in [2**k for k in range(2, 11)]:
        steps, examples = tradeoff.steps(size), tradeoff.examples(size)
        table.add_row(
            f"{size:,}",
            f"{steps:,.0f}",
            f"{examples:,.0f}",
            f"{steps / tradeoff.min_steps:.2f} x",
            f"{examples / tradeoff.min_examples:.2f} x",
            style="bold" if size == batch_size else "",
        )
    return table


def tensorboard_command(logs: Path) -> str:
    """Return the command that shows the logs, from the environment this script runs in."""
    program = Path(sys.executable).with_name("tensorboard")
    name = os.path.relpath(program) if program.exists() else "tensorboard"
    return f"{name} --logdir {logs}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=16, help="examples a process")
    parser.add_argument("--logs", type=Path, default=Path("lightning_logs"))
    arguments = parser.parse_args()

    for package in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(package).setLevel(logging.WARNING)
    # Lightning 2.6.6 with torch 2.13.
    warnings.filterwarnings("ignore", ".*treespec.*is deprecated")
    seed_everything(0, verbose=False)
    monitor = NoiseScaleMonitor()
    trainer = Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        max_epochs=arguments.epochs,
        log_every_n_steps=10,
        callbacks=[monitor, RichProgressBar()],
        logger=TensorBoardLogger(arguments.logs, name="digits"),
        enable_model_summary=False,
    )
    train, test = digits(arguments.batch_size)
    trainer.fit(DigitClassifier(), train, test)

    if trainer.is_global_zero:
        console = Console(highlight=False)
        tradeoff = monitor.history.tradeoff()
        console.print(f"\nGradient noise scale at the end: [bold]{monitor.noise_scale}[/]")
        console.print(
            "Critical batch size over the run:"
            f" [bold]{tradeoff.critical_batch_size:.3g} examples[/]"
        )
        console.print("\nWhat the same result costs at other batch sizes, by the theory for SGD;")
        console.print("time and compute against the least of each that any batch size needs:")
        console.print(cost_table(tradeoff, batch_size=2 * arguments.batch_size))
        console.print("TensorBoard has it in the tabs Time Series and Custom Scalars:")
        console.print(f"  [bold]{tensorboard_command(arguments.logs)}[/]", soft_wrap=True)


if __name__ == "__main__":
    main()
