# SPDX-License-Identifier: Apache-2.0
"""DDP without its average: gradients stay with their rank, all else is as ever."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from noisescale.checks import refuse_setting
from noisescale.lightning.trainer_access import Callback, SettingRefusal, callbacks_of

if TYPE_CHECKING:
    import pytorch_lightning as pl


class AveragingOff(Callback):
    """The base of callbacks whose optimizers combine ranks in another way than by the mean."""

    same_weights_in_each_step = True
    """Whether all ranks compute the gradients of a step at the same weights."""

    measurable_if = "Have ranks combined after each step (`local_steps=1`)"
    """The remedy if ranks do not: how to have a noise scale measured."""

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Turn DDP's average off."""
        turn_averaging_off(trainer, type(self).__name__)

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Have DDP send rank 0's buffers (as of BatchNorm) to all ranks, as it does otherwise.

        Under manual optimization Lightning turns the average on again after each batch.
        """
        if isinstance(ddp := trainer.strategy.model, DistributedDataParallel):
            ddp.require_forward_param_sync = True
            ddp.require_backward_grad_sync = False

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Have DDP send rank 0's buffers before a validation too: they are in the checkpoint.

        After a step without its average DDP would leave them out.
        """
        if isinstance(ddp := trainer.strategy.model, DistributedDataParallel):
            ddp.require_forward_param_sync = True

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer
    ) -> None:
        """Let the loss scaler of each rank know of gradients that are not finite on any of them."""
        scaler = getattr(trainer.strategy.precision_plugin, "scaler", None)
        if scaler is not None and scaler.is_enabled() and trainer.world_size > 1:
            for found in scaler._found_inf_per_device(optimizer).values():
                dist.all_reduce(found, dist.ReduceOp.MAX)


def turn_averaging_off(trainer: pl.Trainer, name: str) -> None:
    """Have DDP leave all gradients as they are.

    Args:
        trainer: In `on_fit_start`.
        name: Of the callback, for the error.

    Raises:
        MisconfigurationException: If several processes train otherwise than by DDP, or with its
            static graph.
    """
    if trainer.world_size == 1:
        return
    ddp: Any = trainer.strategy.model
    if not isinstance(ddp, DistributedDataParallel):
        refuse_setting(
            f"{name} works",
            "strategy",
            type(trainer.strategy).__name__,
            "each rank needs all weights and its own gradient",
            'Use `strategy="ddp"`, or leave the callback out.',
            SettingRefusal,
        )
    if ddp.static_graph:
        refuse_setting(
            f"{name} works",
            "static_graph",
            "True",
            "DDP then averages in each backward pass",
            "Leave it out of the strategy, or leave the callback out.",
            SettingRefusal,
        )
    ddp.require_backward_grad_sync = False


def callback_that_does_not_average(trainer: pl.Trainer) -> AveragingOff | None:
    """Return the callback that turns DDP's average off, if there is one."""
    if trainer.world_size == 1:
        return None
    found = [each for each in callbacks_of(trainer) if isinstance(each, AveragingOff)]
    return found[0] if found else None
