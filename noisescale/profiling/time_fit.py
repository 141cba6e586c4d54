# SPDX-License-Identifier: Apache-2.0
"""Time one short fit of a copy of a module."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from pytorch_lightning.utilities.memory import garbage_collection_cuda
from torch.utils.data import DataLoader

from noisescale.collectors.devices import Memory, device_name, memory_of, reset_peak_memory
from noisescale.lightning.resized_loaders import batches_of
from noisescale.lightning.trainer_access import Callback, publish
from noisescale.lightning.training import copy_to_train, is_out_of_memory, plain_trainer
from noisescale.refusal import Refusal
from noisescale.step_time import StepTiming

if TYPE_CHECKING:
    import pytorch_lightning as pl

BLOCKS = 5
"""Blocks of steps that are timed separately. The median leaves out hiccups."""

_METRIC = "profiled_seconds"


@dataclass(frozen=True)
class TimedFit:
    """A short fit that was timed."""

    timing: StepTiming
    device: str
    """The name of the device, see `device_name`."""
    memory: Memory | None
    """The memory of the device of rank 0; None on the CPU."""


def time_fit(
    module: pl.LightningModule,
    data: Any,
    size: int,
    accumulation: int,
    *,
    steps: int,
    warm_up: int,
    trainer_options: dict[str, Any],
    change_loader: Callable[[DataLoader[Any]], DataLoader[Any]] = lambda loader: loader,
) -> TimedFit | None:
    """Return the seconds a step takes; None if memory runs out.

    Args:
        module: The module; a copy of it is trained.
        data: As for `batches_of`.
        size: Examples in a micro-batch, on one device.
        accumulation: Micro-batches in a step.
        steps: Optimizer steps to time.
        warm_up: Optimizer steps before the timed ones.
        trainer_options: See `time_steps`.
        change_loader: What to train on instead of each loader.
    """
    ours: dict[str, Any] = {
        "limit_train_batches": (warm_up + steps) * accumulation,
        "accumulate_grad_batches": accumulation,
        "callbacks": [_Clock(accumulation, steps, warm_up)],
    }
    trainer = plain_trainer(module, {**ours, **trainer_options})
    trained = copy_to_train(module)
    enough = True
    count = int(trainer.limit_train_batches)
    with batches_of(data, size, count, change=change_loader) as batches:
        try:
            trainer.fit(trained, **batches)
        except Exception as error:
            if trainer.world_size > 1 or not is_out_of_memory(error):
                raise
            enough = False
    if not enough:  # only now is the error gone, with all that its frames held
        garbage_collection_cuda()
        return None
    counts = trainer.world_size, trainer.num_nodes
    timing = StepTiming(size, accumulation, *counts, _seconds(trainer))
    device = trainer.strategy.root_device
    return TimedFit(timing, device_name(device), memory_of(device))


class _Clock(Callback):
    """Publishes the seconds of a step: the median over blocks of steps, after a warm-up.

    A step is `accumulation` batches, whatever the module does in them.
    """

    def __init__(self, accumulation: int, steps: int, warm_up: int) -> None:
        self._bounds = {
            (warm_up + steps * block // BLOCKS) * accumulation for block in range(BLOCKS + 1)
        }
        self._accumulation = accumulation
        self._ends: list[tuple[int, float]] = []

    def on_train_start(self, trainer: pl.Trainer, *_: Any) -> None:
        reset_peak_memory(trainer.strategy.root_device)

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        batches = trainer.fit_loop.total_batch_idx + 1
        if batches in self._bounds:
            device = trainer.strategy.root_device
            if device.type != "cpu":
                getattr(torch, device.type).synchronize()
            self._ends.append((batches // self._accumulation, time.perf_counter()))

    def on_train_end(self, trainer: pl.Trainer, *_: Any) -> None:
        pairs = zip(self._ends[:-1], self._ends[1:], strict=True)
        means = [(end - start) / (last - first) for (first, start), (last, end) in pairs]
        seconds = statistics.median(means) if len(means) == BLOCKS else math.nan
        # All ranks have to take the same decisions, so all take those of rank 0.
        publish(trainer, {_METRIC: trainer.strategy.broadcast(seconds)})


def _seconds(trainer: pl.Trainer) -> float:
    seconds = float(trainer.callback_metrics[_METRIC])
    if math.isnan(seconds):
        raise Refusal(
            "data",
            f"last for {trainer.limit_train_batches} batches",
            trainer.fit_loop.total_batch_idx + 1,
            "Take fewer `steps`, or give more data.",
        )
    return seconds
