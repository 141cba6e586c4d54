# SPDX-License-Identifier: Apache-2.0
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from fits import data, loss_of, network
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from noisescale.profiling import blocks, time_loader
from noisescale.step_time import LoaderTiming

NOW = [0.0]
STEP, EXAMPLE = 0.01, 0.004
"""Seconds of a step, and of an example that is loaded, by the clock of `NOW`."""


@pytest.fixture(autouse=True)
def _clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that goes on in steps and in data sets alone."""
    clock = SimpleNamespace(perf_counter=lambda: NOW[0])
    monkeypatch.setattr(blocks, "time", clock)
    monkeypatch.setattr(time_loader, "time", clock)


class Slow(Dataset[Any]):
    def __init__(self) -> None:
        self.examples, self.loaded = data(), 0

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, index: int) -> Any:
        NOW[0] += EXAMPLE
        self.loaded += 1
        return self.examples[index]


class Model(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = network()
        self.sizes: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        NOW[0] += STEP
        parts = batch if isinstance(batch[0], list) else [batch]
        SIZES.extend(len(part[0]) for part in parts)
        return torch.stack([loss_of(self.net, part) for part in parts]).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


SIZES: list[int] = []


class Module(L.LightningDataModule):
    def __init__(self, loaders: Any) -> None:
        super().__init__()
        self.loaders = loaders

    def train_dataloader(self) -> Any:
        return self.loaders


def timed(source: Any, size: int = 8) -> LoaderTiming:
    SIZES.clear()
    return time_loader.time_loader(
        *(Model(), source, size), steps=5, warm_up=2, trainer_options={"accelerator": "cpu"}
    )


@pytest.mark.parametrize("form", ["data set", "loader", "data module"])
def test_a_loader_and_a_step_are_timed_each_alone(form: str) -> None:
    source = Slow()
    loader = DataLoader(source, batch_size=3)

    found = timed({"data set": source, "loader": loader, "data module": Module(loader)}[form])

    assert found.seconds == pytest.approx(8 * EXAMPLE)
    assert found.step_seconds == pytest.approx(STEP)
    assert (found.batch_size, found.workers) == (8, 0)
    assert found.bounds_training
    assert SIZES == [8] * 7
    assert source.loaded == 8 * 7


def test_a_step_waits_for_all_loaders_of_a_module() -> None:
    loaders = [DataLoader(Slow(), batch_size=3), DataLoader(Slow(), batch_size=5)]

    assert timed(Module(loaders)).seconds == pytest.approx(2 * 8 * EXAMPLE)


def test_a_fast_loader_does_not_bound_a_training() -> None:
    found = timed(data())

    assert found.seconds == 0
    assert not found.bounds_training


def test_a_slow_loader_is_gone_through_for_some_seconds_only(monkeypatch: Any) -> None:
    monkeypatch.setattr(time_loader, "ENOUGH", 2.5 * 8 * EXAMPLE)
    source = Slow()

    assert timed(source).seconds == pytest.approx(8 * EXAMPLE)
    assert source.loaded == 8 * 4
