# SPDX-License-Identifier: Apache-2.0
"""The time that `predict` gives for a run is the time that its steps took."""

import random
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from fits import data, loss_of, network
from torch import Tensor
from torch.utils.data import DataLoader

from noisescale import NoiseScaleMonitor, predict


class Timed(L.LightningModule):
    """Its steps alone move the clock, some for three times as long, and validations, for longer."""

    def __init__(self, now: list[float]) -> None:
        super().__init__()
        self.net, self.now = network(), now
        self.took: list[float] = []
        self.random = random.Random(0)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        seconds = 0.09 if self.random.random() < 0.2 else 0.03
        self.now[0] += seconds
        self.took.append(seconds)
        return loss_of(self.net, batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.now[0] += 100

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05)


@pytest.mark.parametrize("accumulation", [1, 2])
def test_hours_at_the_runs_own_plan_are_those_of_its_steps(
    accumulation: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Epochs of 37 batches of 16 and one of 8: `drop_last=False`. Medians would say 0.03 s."""
    now = [0.0]
    clock = SimpleNamespace(perf_counter=lambda: now[0])
    monkeypatch.setattr("noisescale.meter.step_timer.time", clock)
    monitor, module = NoiseScaleMonitor(), Timed(now)
    trainer = L.Trainer(
        accelerator="cpu",
        max_epochs=10 * accumulation,
        accumulate_grad_batches=accumulation,
        log_every_n_steps=5,
        callbacks=[monitor],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )

    trainer.fit(module, DataLoader(data(600), batch_size=16), DataLoader(data(10)))

    prediction = predict(monitor)
    own = next(row for row in prediction.rows if row.batch_size == 16 * accumulation)
    assert (own.device_batch_size, own.accumulation, own.basis) == (16, accumulation, "timed")
    assert own.hours.value * 3600 == pytest.approx(sum(module.took), rel=0.03)
