# SPDX-License-Identifier: Apache-2.0
"""Refuse Trainers under which the noise scale cannot be measured, and name the remedy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch.nn.parallel import DistributedDataParallel

from noisescale.checks import refuse_setting
from noisescale.collectors.ddp import spoiling_comm_hook
from noisescale.lightning.averaging_off import callback_that_does_not_average
from noisescale.lightning.trainer_access import SettingRefusal, callbacks_of

if TYPE_CHECKING:
    import pytorch_lightning as pl

# By class name: importing some of them needs packages that are not there.
_UNSUPPORTED_STRATEGIES = {
    "DeepSpeedStrategy": "DeepSpeed reduces gradients inside its own engine",
    "FSDPStrategy": "FSDP1 does not show a rank's own gradient",
}

_FSDP2_STRATEGY = "ModelParallelStrategy"

_USE_DDP = 'Use `strategy="ddp"`, or leave the callback out.'


def check_supported(trainer: pl.Trainer) -> None:
    """Raise if the noise scale would be wrong or cannot be measured; call it after strategy setup.

    Raises:
        MisconfigurationException: The message names the setting and the remedy.
    """
    strategy: Any = trainer.strategy
    kinds = [kind.__name__ for kind in type(strategy).__mro__]
    for kind in kinds:
        if kind in _UNSUPPORTED_STRATEGIES:
            _refuse("strategy", kind, _UNSUPPORTED_STRATEGIES[kind], _USE_DDP)
    if isinstance(strategy.model, DistributedDataParallel):
        if (found := spoiling_comm_hook(strategy.model)) is not None:
            _refuse("ddp_comm_hook", *found)
    elif trainer.world_size > 1 and _FSDP2_STRATEGY not in kinds:
        _refuse("strategy", type(strategy).__name__, "it trains neither by DDP nor FSDP2", _USE_DDP)
    if _FSDP2_STRATEGY in kinds and (size := strategy.device_mesh["tensor_parallel"].size()) > 1:
        _refuse(
            "tensor_parallel_size",
            str(size),
            "a rank then has only a part of its gradient",
            "Use `ModelParallelStrategy(data_parallel_size=..., tensor_parallel_size=1)`, or leave"
            " the callback out.",
        )
    own_steps = callback_that_does_not_average(trainer)
    if own_steps is not None and not own_steps.same_weights_in_each_step:
        _refuse(
            "callbacks",
            type(own_steps).__name__,
            "ranks compute gradients at different weights",
            f"{own_steps.measurable_if}, or leave the monitor out.",
        )
    for optimizer in trainer.optimizers:
        if isinstance(optimizer, torch.optim.LBFGS):
            refuse_several_gradients_a_step(optimizer)


def refuse_several_gradients_a_step(optimizer: torch.optim.Optimizer) -> NoReturn:
    """Raise if an optimizer calls its closure more than once, as LBFGS and SAM do."""
    _refuse(
        "optimizer",
        type(optimizer).__name__,
        "it takes several gradients a step, at different weights",
        "Use a first-order optimizer such as SGD or AdamW.",
    )


def refuse_namesakes(names: Sequence[str | None]) -> None:
    """Raise if two monitors of a Trainer have the same name, as they log and save the same keys.

    Lightning refuses two such callbacks in a Trainer. A `BatchSizeScheduler` may add a second.
    """
    if twice := [name for name in names if names.count(name) > 1]:
        raise SettingRefusal(
            "name",
            "differ between the NoiseScaleMonitors of a Trainer",
            f"{twice[0]!r} twice",
            "Pass `NoiseScaleMonitor(name=...)`, or one monitor to the Trainer and to"
            " `BatchSizeScheduler(monitor=...)`.",
        )


def accumulates(trainer: pl.Trainer) -> bool:
    """Return whether Lightning or the module takes optimizer steps over several batches."""
    scheduled = any(
        kind.__name__ == "GradientAccumulationScheduler"
        for callback in callbacks_of(trainer)
        for kind in type(callback).__mro__
    )
    by_hand = not trainer.lightning_module.automatic_optimization
    return scheduled or by_hand or trainer.accumulate_grad_batches > 1


def _refuse(setting: str, value: str, reason: str, remedy: str) -> NoReturn:
    use = "NoiseScaleMonitor can measure"
    refuse_setting(use, setting, value, reason, remedy, SettingRefusal)
