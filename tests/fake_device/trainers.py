# SPDX-License-Identifier: Apache-2.0
"""Short fits of trainers on the fake device, and what each of their steps transfers."""

import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import lightning.pytorch as L
import torch
from lightning.pytorch.strategies import SingleDeviceStrategy
from ranks import as_torchrun, on_ranks
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from transformers import Trainer, TrainerCallback, TrainingArguments

from fake_device.lightning import FakeAccelerator, FakeDDP
from fake_device.transfers import Transfers
from fake_device.ways import CLASSES, FEATURES, ROWS, Step, network
from noisescale import BatchSizeScheduler, NoiseScaleMonitor
from noisescale.hugging_face import NoiseScaleCallback

BATCHES, LOG_EVERY = 120, 10


class Watch:
    """Splits what a fit transfers into its steps."""

    def __init__(self, due: Callable[[], bool]) -> None:
        self.steps: list[Step] = []
        self._due = due
        self._transfers = Transfers()

    def begin(self) -> None:
        self._phase = "measured" if self._due() else "unmeasured"
        if not self.steps and self._phase == "measured":
            self._phase = "first measured"
        self._transfers = Transfers()
        self._transfers.__enter__()

    def end(self) -> None:
        self._transfers.__exit__(None, None, None)
        launched = self._transfers.launched
        self.steps.append(Step(self._phase, self._transfers.of_package(), launched))


class Module(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = network()

    def training_step(self, batch: list[Tensor], _: int) -> Tensor:
        x, y = batch
        return nn.functional.cross_entropy(self.net(x), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 1e-2, momentum=0.9)


class Steps(L.Callback):
    """The first of the callbacks, and the last: it is given twice."""

    def __init__(self, watch: Watch, *, first: bool) -> None:
        self._watch, self._first, self._begun = watch, first, False

    @property
    def state_key(self) -> str:
        return f"{type(self).__name__}, {self._first}"
