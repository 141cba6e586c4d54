# SPDX-License-Identifier: Apache-2.0
"""Modules that make their own data loaders, as Lightning's own demonstrations do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning
import pytest
import pytorch_lightning as pl
import torch
from torch.utils.data import DataLoader, TensorDataset

from noisescale.history.metrics import Goal
from noisescale.lab.jobs.jobs import Record, Training
from noisescale.lab.parameters import range_parameter
from noisescale.lab.sweep.search import Search
from noisescale.lab.sweep.settings import SweepJob
from noisescale.lab.sweep.trial_fit import Made, describe, train_task
from noisescale.lightning.own_loaders import data_of, makes_loaders
from noisescale.lightning.resized_loaders import held_examples
from noisescale.made.targets import module_and_data

CPU = Training("train.py:make", accelerator="cpu")
GOAL = Goal.read("val_loss<=0.01")


def line_of(package: Any) -> Any:
    class Line(package.LightningModule):  # type: ignore[misc]  # a class of either package
        def __init__(self) -> None:
            super().__init__()
            self.net = torch.nn.Linear(1, 1, bias=False)
            self.prepared, self.set_up, self.sizes = 0, 0, []

        def prepare_data(self) -> None:
            self.prepared += 1

        def setup(self, stage: str) -> None:
            self.set_up += 1
            x = torch.ones(64, 1)
            self.train_set, self.val_set = TensorDataset(x, x), TensorDataset(x[:8], x[:8])

        def train_dataloader(self) -> Any:
            return DataLoader(self.train_set, batch_size=4, shuffle=True)

        def val_dataloader(self) -> Any:
            return DataLoader(self.val_set, batch_size=8)

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            self.sizes.append(len(batch[0]))
            return self.loss(batch)

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val_loss", self.loss(batch))

        def loss(self, batch: Any) -> torch.Tensor:
            return ((self.net(batch[0]) - batch[1]) ** 2).mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    return Line()


packages = pytest.mark.parametrize("package", [pl, lightning], ids=lambda p: p.__name__)


@packages
def test_a_module_is_described_and_trained_with_its_own_loaders(
    package: Any, tmp_path: Path
) -> None:
    module = line_of(package)

    own = describe(Made(module, data_of(module)), CPU, GOAL, 16)

    assert (own.examples, own.batch_size) == (64, 4)
    search = Search((range_parameter("learning_rate", 0.001, 0.1, "log"),), 3, 1)
    job = SweepJob(CPU, own, GOAL, (16,), search, 20.0, None)
    assert sizes_of(module, job.task(16, {"learning_rate": 0.1}, 0).spec, tmp_path) == {16}


def sizes_of(module: Any, task: Record, folder: Path) -> set[int]:
    seen: set[int] = set()
    kept = type(module).training_step

    def watched(self: Any, batch: Any, batch_idx: int) -> torch.Tensor:
        seen.add(len(batch[0]))
        found: torch.Tensor = kept(self, batch, batch_idx)
        return found

    type(module).training_step = watched
    train_task(Made(module, data_of(module)), task, folder)
    return seen


@packages
def test_lightning_calls_the_hooks_of_the_trained_module_once(package: Any) -> None:
    module = line_of(package)

    trainer = package.Trainer(
        max_steps=2, logger=False, enable_checkpointing=False, accelerator="cpu"
    )
    trainer.fit(module, datamodule=data_of(module))

    assert (module.prepared, module.set_up, module.sizes) == (1, 1, [4, 4])


@packages
@pytest.mark.parametrize("trainer_before_its_fit", [False, True])
def test_without_a_fit_the_module_is_set_up(package: Any, trainer_before_its_fit: bool) -> None:
    module = line_of(package)
    data = data_of(module)
    if trainer_before_its_fit:  # as in a branch
        data.trainer = package.Trainer(logger=False, enable_checkpointing=False, accelerator="cpu")

    held = held_examples(data, 6, 3)

    assert [len(batch[0]) for batch in held] == [3, 3]
    assert (module.prepared, module.set_up) == (1, 1)


@packages
def test_only_a_module_with_loaders_of_its_own_has_them(package: Any) -> None:
    assert makes_loaders(line_of(package))
    assert not makes_loaders(package.LightningModule())
    assert not makes_loaders(None)


def test_a_target_with_loaders_of_its_own_needs_no_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("with_loaders.py").write_text(
        "from pytorch_lightning.demos.boring_classes import BoringModel\n"
    )

    module, data = module_and_data("with_loaders.py:BoringModel", None)

    assert type(module).__name__ == "BoringModel"
    assert isinstance(data, pl.LightningDataModule)
