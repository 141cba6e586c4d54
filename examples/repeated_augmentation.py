# SPDX-License-Identifier: Apache-2.0
"""Several augmentations of each example in a batch, and the noise scale that goes with them.

    python examples/repeated_augmentation.py [--repeats 4] [--steps 112]

Handwritten digits are shifted and made noisy anew each time they are read. Two CPU processes learn
them, each from 16 distinct digits a step, with `--repeats` augmentations of each digit. These
average out the noise of augmentation, and leave the noise between digits. The monitor counts
distinct digits.
"""

import argparse
import logging
import warnings
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from noisescale import NoiseScaleMonitor, RepeatedAugmentationSampler


class ShiftedDigits(Dataset[Any]):
    """Images of 8 x 8 pixels, shifted by up to one pixel each way, with noise."""

    def __init__(self) -> None:
        x, y = load_digits(return_X_y=True)
        self.images = torch.tensor(x / 16).float().view(-1, 8, 8)
        self.labels = torch.tensor(y)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        down, right = torch.randint(-1, 2, (2,)).tolist()
        image = self.images[index].roll((down, right), dims=(0, 1))
        return (image + 0.1 * torch.randn(8, 8)).flatten(), self.labels[index]


class DigitClassifier(LightningModule):
    """A small perceptron."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        loss = nn.functional.cross_entropy(self.net(x), y)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.5)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--repeats", type=int, default=4, help="augmentations of a digit in a batch"
    )
    parser.add_argument("--steps", type=int, default=112)
    arguments = parser.parse_args()
    for package in ("pytorch", "fabric"):
        logging.getLogger(f"lightning.{package}").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", ".*(num_workers|log_every_n_steps|treespec).*")

    for repeats in (1, arguments.repeats):
        seed_everything(0, verbose=False)
        digits = ShiftedDigits()
        sampler = RepeatedAugmentationSampler(digits, repeats)
        loader = DataLoader(digits, batch_size=16 * repeats, sampler=sampler)
        trainer = Trainer(
            accelerator="cpu",
            devices=2,
            strategy="ddp_fork",
            max_steps=arguments.steps,
            max_epochs=-1,
            callbacks=[NoiseScaleMonitor(every_n_steps=1, window=100)],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(DigitClassifier(), loader)
        seen = {name: value.item() for name, value in trainer.callback_metrics.items()}
        print(
            f"{repeats} x: loss {seen['loss']:.2f},"
            f" batch size {seen['noise_scale/batch_size']:.0f} distinct digits,"
            f" noise scale {seen['noise_scale/simple']:.1f}"
            f" ({seen['noise_scale/simple_low']:.1f} to {seen['noise_scale/simple_high']:.1f})"
        )


if __name__ == "__main__":
    main()
