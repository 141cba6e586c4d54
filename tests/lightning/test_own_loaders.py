# SPDX-License-Identifier: Apache-2.0
"""Modules that make their own data loaders, as Lightning's own demonstrations do."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import lightning.pytorch as lightning
import pytest
import pytorch_lightning as pl
from fits import classifier, data, loss_of, trainer
from torch.utils.data import DataLoader

from noisescale.history.metrics import Goal
from noisescale.lab.jobs.jobs import Training
from noisescale.lab.parameters import range_parameter
from noisescale.lab.sweep.search import Search
from noisescale.lab.sweep.settings import SweepJob
from noisescale.lab.sweep.trial_fit import MadeModule, describe, train_task
from noisescale.lightning.own_loaders import data_of, makes_loaders
from noisescale.lightning.resized_loaders import held_examples
from noisescale.user_code.targets import module_and_data

CPU = Training("train.py:make", accelerator="cpu")
GOAL = Goal.read("val_loss<=9")


def module_of(package: Any) -> Any:
    class Own(type(classifier(package))):
        sizes: ClassVar[list[int]] = []  # also of copies
        prepared, set_up = 0, 0

        def prepare_data(self) -> None:
            self.prepared += 1

        def setup(self, stage: str) -> None:
            self.set_up += 1
            self.train_set, self.val_set = data(64), data(8)

        def train_dataloader(self) -> Any:
            return DataLoader(self.train_set, batch_size=4, shuffle=True)

        def val_dataloader(self) -> Any:
            return DataLoader(self.val_set, batch_size=8)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.sizes.append(len(batch[0]))
            return super().training_step(batch, batch_idx)

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val_loss", loss_of(self.net, batch))

    return Own()


packages = pytest.mark.parametrize("package", [pl, lightning], ids=lambda p: p.__name__)


@packages
def test_a_module_is_described_and_trained_with_its_own_loaders(
    package: Any, tmp_path: Path
) -> None:
    module = module_of(package)

    own = describe(MadeModule(module, data_of(module)), CPU, GOAL, 16)

    assert (own.examples, own.batch_size) == (64, 4)
    search = Search((range_parameter("learning_rate", 0.001, 0.1, "log"),), 3, 1)
    job = SweepJob(CPU, own, GOAL, (16,), search, 20.0, None)
    module.sizes.clear()
    task = job.task(16, {"learning_rate": 0.1}, 0).spec
    train_task(MadeModule(module, data_of(module)), task, tmp_path)
    assert set(module.sizes) == {16}


@packages
def test_lightning_calls_the_hooks_of_the_trained_module_once(package: Any) -> None:
    module = module_of(package)

    trainer(1, package, strategy="auto", max_steps=2).fit(module, datamodule=data_of(module))

    assert (module.prepared, module.set_up, module.sizes) == (1, 1, [4, 4])


@packages
@pytest.mark.parametrize("trainer_before_its_fit", [False, True])
def test_without_a_fit_the_module_is_set_up(package: Any, trainer_before_its_fit: bool) -> None:
    module = module_of(package)
    own = data_of(module)
    if trainer_before_its_fit:  # as in a branch
        own.trainer = trainer(1, package, strategy="auto")

    held = held_examples(own, 6, 3)

    assert [len(batch[0]) for batch in held] == [3, 3]
    assert (module.prepared, module.set_up) == (1, 1)


@packages
def test_only_a_module_with_loaders_of_its_own_has_them(package: Any) -> None:
    assert makes_loaders(module_of(package))
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
