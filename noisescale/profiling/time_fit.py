# SPDX-License-Identifier: Apache-2.0
"""Time one short fit of a copy of a module."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from pytorch_lightning.utilities.memory import garbage_collection_cuda
from torch.utils.data import DataLoader

from noisescale.collectors.devices import device_name, memory_of, reset_peak_memory
from noisescale.lightning.resized_loaders import batches_of
from noisescale.lightning.trainer_access import Callback, publish
from noisescale.lightning.training import copy_to_train, is_out_of_memory, plain_trainer
from noisescale.profiling.blocks import Blocks, TimedFit
from noisescale.refusal import Refusal
from noisescale.step_time import StepTiming
from noisescale.user_code.targets import is_trainer_of_transformers

if TYPE_CHECKING:
    import pytorch_lightning as pl

_METRIC = "profiled_seconds"


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
        module: The module, or the Trainer of transformers; a copy of it is trained.
        data: As for `batches_of`.
        size: Examples in a micro-batch, on one device.
        accumulation: Micro-batches in a step.
        steps: Optimizer steps to time.
        warm_up: Optimizer steps before the timed ones.
        trainer_options: See `time_steps`.
        change_loader: What to train on instead of each loader.
    """
    blocks = Blocks(steps, warm_up)
    if is_trainer_of_transformers(module):
        from noisescale.profiling.time_training import time_training

        host: Any = module
        return time_training(
            *(host, data, size, accumulation), blocks=blocks, change_loader=change_loader
        )
    ours: dict[str, Any] = {
        "limit_train_batches": (warm_up + steps) * accumulation,
        "accumulate_grad_batches": accumulation,
        "callbacks": [_Clock(accumulation, blocks)],
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
    """Publishes the seconds of a step. A step is `accumulation` batches, whatever it does."""

    def __init__(self, accumulation: int, blocks: Blocks) -> None:
        self._accumulation, self._blocks = accumulation, blocks

    def on_train_start(self, trainer: pl.Trainer, *_: Any) -> None:
        reset_peak_memory(trainer.strategy.root_device)

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        step, batches_more = divmod(trainer.fit_loop.total_batch_idx + 1, self._accumulation)
        if not batches_more:
            self._blocks.note(step, trainer.strategy.root_device)

    def on_train_end(self, trainer: pl.Trainer, *_: Any) -> None:
        # All ranks have to take the same decisions, so all take those of rank 0.
        publish(trainer, {_METRIC: trainer.strategy.broadcast(self._blocks.seconds)})


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
