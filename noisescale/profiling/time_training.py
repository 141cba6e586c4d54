# SPDX-License-Identifier: Apache-2.0
"""Time one short training by a copy of transformers' Trainer."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from pytorch_lightning.utilities.memory import garbage_collection_cuda
from torch.utils.data import DataLoader
from transformers import TrainerCallback

from noisescale.collectors.devices import device_name, memory_of, reset_peak_memory
from noisescale.hugging_face.trainer_access import copy_to_time, makes_its_own_loader
from noisescale.lightning.training import is_out_of_memory
from noisescale.profiling.blocks import Blocks, TimedFit
from noisescale.refusal import Refusal
from noisescale.step_time import StepTiming

if TYPE_CHECKING:
    from transformers import Trainer


def time_training(
    trainer: Trainer,
    data: Any,
    size: int,
    accumulation: int,
    *,
    blocks: Blocks,
    change_loader: Callable[[DataLoader[Any]], DataLoader[Any]],
) -> TimedFit | None:
    """Return the seconds that a step of a Trainer takes; None if memory runs out.

    A copy trains a copy of the model, as the Trainer would, without its callbacks.

    Args:
        trainer: The Trainer, which stays as it is.
        data: What it trains on.
        size: Examples in a micro-batch, on one device.
        accumulation: Micro-batches in a step.
        blocks: Which steps are timed.
        change_loader: What to train on instead of the loader.

    Raises:
        ValueError: If the Trainer makes batches of its own, or shards the model, or the data end.
    """
    _check(trainer)
    data = data.dataset if isinstance(data, DataLoader) else data
    device, ranks = trainer.args.device, trainer.args.world_size
    counts = {"per_device_train_batch_size": size, "gradient_accumulation_steps": accumulation}
    counts["max_steps"] = blocks.last
    steps = _train(trainer, _Clock(blocks), data, change_loader, counts)
    garbage_collection_cuda()  # the copy refers to itself, and an error to what its frames held
    if steps is None:
        return None
    seconds = [blocks.seconds]
    if ranks > 1:  # all ranks have to take the same decisions, so all take those of rank 0
        dist.broadcast_object_list(seconds)
    if math.isnan(seconds[0]):
        raise Refusal(
            "data",
            f"last for {blocks.last} steps",
            steps,
            "Take fewer `steps`, or give more data.",
        )
    nodes = max(1, ranks // int(os.environ.get("LOCAL_WORLD_SIZE", ranks)))
    timing = StepTiming(size, accumulation, ranks, nodes, seconds[0])
    return TimedFit(timing, device_name(device), memory_of(device))


def _train(trainer: Trainer, *how: Any) -> int | None:
    """Train a copy. Return the number of its steps; None if memory runs out."""
    try:
        made = copy_to_time(trainer, *how)
        made.train()
    except Exception as error:  # whatever a device raises where memory runs out
        if trainer.args.world_size > 1 or not is_out_of_memory(error):
            raise
        return None
    made.accelerator.free_memory()
    return made.state.global_step


class _Clock(TrainerCallback):
    """Notes the time after each step that ends a block."""

    def __init__(self, blocks: Blocks) -> None:
        self._blocks = blocks

    def on_train_begin(self, args: Any, *_: Any, **__: Any) -> None:
        reset_peak_memory(args.device)

    def on_step_end(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
        self._blocks.note(state.global_step, args.device)


def _check(trainer: Trainer) -> None:
    why = ""
    if trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled:
        why = "one with DeepSpeed or FSDP"
    elif trainer.args.n_gpu > 1:
        why = "one with nn.DataParallel"
    elif makes_its_own_loader(trainer):
        why = f"a {type(trainer).__name__}, which makes its own loader"
    if why:
        raise Refusal(
            "target",
            "train on one device or by DDP, with the loader of transformers' Trainer",
            why,
            "Train some 100 steps at another batch size, with the callback, and give `predict` that"
            " run as `step_times`.",
        )
