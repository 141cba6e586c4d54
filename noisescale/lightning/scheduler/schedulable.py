# SPDX-License-Identifier: Apache-2.0
"""Refuse Trainers under which the batch size cannot change."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

from noisescale.checks import refuse_setting
from noisescale.lightning import trainer_access

if TYPE_CHECKING:
    import pytorch_lightning as pl


def check_schedulable(trainer: pl.Trainer, scheduler: Any) -> None:
    """Raise if steps of another size would be wrong; call it after strategy setup.

    Raises:
        MisconfigurationException: The message names the setting and the remedy.
    """
    strategy: Any = trainer.strategy
    if not trainer.lightning_module.automatic_optimization:
        _refuse(
            "automatic_optimization",
            "False",
            "the module decides itself when to step",
            "Set it to True, or use `BatchSizeController` in your `training_step`.",
        )
    if not any(optimizer.param_groups for optimizer in trainer.optimizers):
        _refuse(
            "configure_optimizers",
            "None",
            "without an optimizer there are no steps",
            "Return one, or leave the callback out.",
        )
    if strategy.handles_gradient_accumulation:
        _refuse(
            "strategy",
            type(strategy).__name__,
            "it accumulates gradients inside its own engine",
            'Use `strategy="ddp"`, or leave the callback out.',
        )
    if (size := trainer_access.tensor_parallel_size(trainer)) > 1:
        _refuse(
            "tensor_parallel_size",
            str(size),
            "it counts one batch a process, and the processes of a model have one batch together",
            "Use `tensor_parallel_size=1`, or leave the callback out.",
        )
    for callback in trainer_access.callbacks_of(trainer):
        kinds = [kind.__name__ for kind in type(callback).__mro__]
        if "GradientAccumulationScheduler" in kinds:
            _refuse(
                "callbacks",
                type(callback).__name__,
                "both would set `accumulate_grad_batches`",
                "Leave one of them out; `policy={0: 64, 1000: 128}` gives a schedule by steps.",
            )
        if "BatchSizeScheduler" in kinds and callback is not scheduler:
            _refuse(
                "callbacks",
                "two of BatchSizeScheduler",
                "both would set the batch size",
                "Leave one of them out.",
            )


def check_may_resize(trainer: pl.Trainer) -> None:
    """Raise if the loader's batches cannot become larger or smaller.

    Raises:
        MisconfigurationException: The message names the setting and the remedy.
    """
    kinds = [kind.__name__ for kind in type(trainer.strategy).__mro__]
    for kind in {"FSDPStrategy", "ModelParallelStrategy"} & {*kinds}:
        _refuse(
            "max_device_batch_size",
            f"a number under {kind}",
            "a larger micro-batch cannot be tried on sharded parameters",
            "Leave it out: then only the number of micro-batches changes.",
        )
    every, by_epochs = trainer.val_check_interval, trainer.check_val_every_n_epoch is not None
    if isinstance(every, int) and not isinstance(every, bool) and by_epochs:
        _refuse(
            "val_check_interval",
            str(every),
            "an epoch may later have fewer batches than that",
            "Give a part of an epoch, such as 0.5, or set `check_val_every_n_epoch=None`.",
        )


def _refuse(setting: str, value: str, reason: str, remedy: str) -> NoReturn:
    use, error = "BatchSizeScheduler can work", trainer_access.SettingRefusal
    refuse_setting(use, setting, value, reason, remedy, error)
