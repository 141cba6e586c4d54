# SPDX-License-Identifier: Apache-2.0
"""What a fit starts with: plan and controller, from the Trainer, its loader and what was saved."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist

from noisescale.checks import checked_state
from noisescale.lightning import trainer_access
from noisescale.plan import Plan
from noisescale.scheduling.controller import BatchSizeController

if TYPE_CHECKING:
    import pytorch_lightning as pl

_EPOCH_SHARE = 10
"""Without `max_batch_size`, at least so many steps are left in an epoch (Smith et al. 2018)."""


_SAVED = ("controller", "max_batch_size", "window", "rows", "resized", "largest_rows")
"""What a fit goes on from. How schedules go, `went_by` tells also where it was not saved."""


class Start(NamedTuple):
    """What a fit starts with."""

    controller: BatchSizeController
    rows: int | None
    """Of a batch on one device, where the loader tells."""
    max_batch_size: float | None
    """The one that was given, or its default; None where an epoch has no known end."""


def check_saved(saved: Any) -> None:
    """Raise where the state of the callback cannot be gone on from; empty is a new run.

    Raises:
        ValueError: It names what is missing.
    """
    if saved != {}:
        checked_state("BatchSizeScheduler", saved, _SAVED)
        needed = ("plan", "steps", "base_batch_size", "clock")
        checked_state("BatchSizeScheduler, `controller`,", saved["controller"], needed)


def start(
    trainer: pl.Trainer,
    examples: float,
    arguments: dict[str, Any],
    *,
    accumulation: int,
    min_accumulation: int,
    saved: dict[str, Any],
) -> Start:
    """Make the controller, now that a batch tells how many examples it has. All ranks call it.

    Args:
        trainer: At its first batch.
        examples: Of that batch, on this rank.
        arguments: Of the controller, as the user gave them.
        accumulation: The Trainer's own `accumulate_grad_batches`.
        min_accumulation: Least micro-batches a step.
        saved: State of the callback to go on from; empty for a new run.

    Raises:
        ValueError: If the loader's batches exceed `max_device_batch_size`, or no plan meets the
            bounds.
    """
    loaders = trainer.fit_loop._combined_loader
    assert loaders is not None
    rows: int | None = getattr(loaders.flattened[0], "batch_size", None)
    most = arguments["max_device_batch_size"]
    if most is not None and rows is not None and most < rows:
        raise ValueError(
            "`max_device_batch_size` must be at least the `batch_size` of the loader, got"
            f" {most} < {rows}. Raise it, or start with smaller batches."
        )
    if saved and saved["rows"] == rows:
        size = saved["controller"]["plan"][0]
    else:
        if rows is not None and trainer_access.is_last_batch(trainer):  # it may be a short one
            examples = max(examples, rows)
        size = _mean_over_ranks(examples, trainer)
    plan = Plan(size, accumulation, trainer.world_size)
    batches = trainer.num_training_batches
    max_batch_size = arguments["max_batch_size"]
    if max_batch_size is None and saved:
        max_batch_size = saved["max_batch_size"]
    elif max_batch_size is None and math.isfinite(batches):
        of_epoch = plan.device_batch_size * plan.devices * batches
        max_batch_size = max(of_epoch / _EPOCH_SHARE, plan.batch_size)
        if most is not None and rows is not None:
            # A prime number of rows would be reached by micro-batches of one row.
            full = most * size / rows * plan.devices
            max_batch_size = max(max_batch_size // full * full, plan.batch_size)
    controller = BatchSizeController(
        plan,
        trainer.optimizers,
        min_accumulation=min_accumulation,
        base_batch_size=saved["controller"]["base_batch_size"] if saved else None,
        examples_per_row=size / rows if rows else 1.0,
        **{**arguments, "max_batch_size": max_batch_size},
    )
    if saved:
        controller.load_state_dict(saved["controller"], device_batch_size=size)
    return Start(controller, rows, max_batch_size)


def _mean_over_ranks(value: float, trainer: pl.Trainer) -> float:
    if trainer.world_size == 1:
        return value
    total = torch.tensor(value, dtype=torch.float64, device=trainer.strategy.root_device)
    dist.all_reduce(total)
    return float(total) / trainer.world_size
