# SPDX-License-Identifier: Apache-2.0
"""The time that `predict` gives for a run is the time that its steps took."""

import random
from types import SimpleNamespace
from typing import Any

import pytest
from fits import classifier, fit_here, loader
from tiers import slow
from torch import Tensor

from noisescale import NoiseScaleMonitor, predict


class Timed(type(classifier())):
    """Its steps alone move the clock, some for three times as long, and validations, for longer."""

    def __init__(self, now: list[float]) -> None:
        super().__init__()
        self.now, self.took, self.random = now, [], random.Random(0)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        seconds = 0.09 if self.random.random() < 0.2 else 0.03
        self.now[0] += seconds
        self.took.append(seconds)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.now[0] += 100


@pytest.mark.parametrize("accumulation", [1, slow(2)])
def test_hours_at_the_runs_own_plan_are_those_of_its_steps(
    accumulation: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Epochs of 37 batches of 16 and one of 8: `drop_last=False`. Medians would say 0.03 s."""
    now = [0.0]
    clock = SimpleNamespace(perf_counter=lambda: now[0])
    monkeypatch.setattr("noisescale.meter.step_timer.time", clock)
    monitor, module = NoiseScaleMonitor(every_n_steps=4), Timed(now)
    module.val_dataloader = lambda: loader(10, 10)

    fit_here(
        monitor,
        model=module,
        train_loader=loader(16, 600),
        max_epochs=10 * accumulation,
        accumulate_grad_batches=accumulation,
        log_every_n_steps=5,
    )

    prediction = predict(monitor)
    own = next(row for row in prediction.rows if row.batch_size == 16 * accumulation)
    assert (own.device_batch_size, own.accumulation, own.basis) == (16, accumulation, "timed")
    assert own.hours.value * 3600 == pytest.approx(sum(module.took), rel=0.03)
