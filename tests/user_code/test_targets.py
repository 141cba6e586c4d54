# SPDX-License-Identifier: Apache-2.0
"""What a user's `make()` may return, in each command that trains."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningDataModule, LightningModule
from refused import refused
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from noisescale import History, profile
from noisescale.history.metrics import Goal
from noisescale.lab.branch.planning import Branching
from noisescale.lab.branch.train_branches import _setup
from noisescale.lab.jobs.jobs import Training
from noisescale.lab.sweep.trial_fit import MadeModule, describe, loaders_of
from noisescale.user_code.targets import module_and_data, text_of, train_and_val


class Model(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(4, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss: Tensor = self.net(batch[0]).square().mean()
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.net(batch[0]).square().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def loader(examples: int) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.randn(examples, 4)), batch_size=8)


class Loaders:
    def train_dataloader(self) -> DataLoader[Any]:
        return loader(64)

    def val_dataloader(self) -> DataLoader[Any]:
        return loader(16)


class MakesLoaders(Loaders, Model):  # type: ignore[misc]  # a hook of both
    pass


class Data(Loaders, LightningDataModule):  # type: ignore[misc]  # as above
    pass


def with_loader() -> Any:
    return Model(), loader(64)


def with_pair() -> Any:
    return Model(), (loader(64), loader(16))


def with_data_module() -> Any:
    return Model(), Data()


def planned() -> Branching:
    """A plan of which only the history counts."""
    history = History()
    history.append(step=10, examples=80, batch_size=8, noise_scale=5, low=4, high=6)
    return SimpleNamespace(history=history)  # type: ignore[return-value]  # has what is asked for


FORMS = [MakesLoaders, with_loader, with_pair, with_data_module]


@pytest.mark.parametrize("make", FORMS)
def test_profile_and_branch_take_each_form(make: Callable[[], Any]) -> None:
    found = profile(make, device_batch_sizes=[4], accumulation=[1], steps=5, accelerator="cpu")

    assert [timing.device_batch_size for timing in found.timings] == [4]
    module, data = module_and_data(make)
    # The losses of checkpoints, and branches themselves, use this setup.
    setup = _setup(planned(), module, train_and_val(data)[0], 16, {"accelerator": "cpu"})
    assert len(setup.held.dataset) == 16


@pytest.mark.parametrize("make", FORMS)
def test_sweep_and_tune_take_each_form(make: Callable[[], Any]) -> None:
    """Both begin with this step, and train on these loaders."""
    made = MadeModule(*module_and_data(make))
    validates = make is not with_loader
    goal = Goal.read("val_loss<=0.1" if validates else "loss<=0.1")

    own = describe(made, Training("make", accelerator="cpu"), goal, 8)

    assert (own.examples, own.batch_size) == (64, 8)
    assert own.of_a_batch is not validates
    with loaders_of(made.data, 4, 8, 1) as loaders:
        data = loaders.get("datamodule")
        if data is None:
            assert loaders["train_dataloaders"].batch_size == 4
        elif make is with_data_module:
            assert data.train_dataloader().batch_size == 4


def test_text_and_object_give_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "texts.py").write_text(f"from {__name__} import with_pair\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)

    for target in ("texts.py:with_pair", "texts:with_pair", with_pair, with_pair()):
        module, data = module_and_data(target)
        train, val = train_and_val(data)
        assert isinstance(module, Model)
        assert (len(train.dataset), len(val.dataset)) == (64, 16)


def test_a_function_of_the_script_that_runs_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers would run another script."""
    assert text_of(with_loader, "target") == f"{__name__}:with_loader"
    monkeypatch.setattr(with_loader, "__module__", "__main__")

    for target in (with_loader, Model()):
        with refused("target", remedy='"train.py:make"'):
            text_of(target, "target")
