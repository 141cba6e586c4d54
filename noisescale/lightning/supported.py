# SPDX-License-Identifier: Apache-2.0
"""Trainers under which the noise scale cannot be measured, and the remedies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch.nn.parallel import DistributedDataParallel

from noisescale.collectors.ddp import spoiling_comm_hook
from noisescale.guard import NotMeasured
from noisescale.lightning.averaging_off import callback_that_does_not_average
from noisescale.lightning.trainer_access import SettingRefusal, callbacks_of

if TYPE_CHECKING:
    import pytorch_lightning as pl

# By class name: importing some of them needs packages that are not there.
_UNSUPPORTED_STRATEGIES = dict.fromkeys(
    ("XLAStrategy", "XLAFSDPStrategy", "SingleDeviceXLAStrategy"),
    "XLA traces steps instead of running them",
)

_STRATEGIES = {"FSDPStrategy", "ModelParallelStrategy", "DeepSpeedStrategy"}
"""The strategies that are supported beside DDP's."""

_USE_DDP = 'Use `strategy="ddp"`.'


def check_supported(trainer: pl.Trainer) -> None:
    """Raise if the noise scale would be wrong or cannot be measured; call it after strategy setup.

    Raises:
        NotMeasured: The message names the setting and the remedy.
    """
    strategy: Any = trainer.strategy
    kinds = [kind.__name__ for kind in type(strategy).__mro__]
    for kind in kinds:
        if kind in _UNSUPPORTED_STRATEGIES:
            raise NotMeasured.of_setting("strategy", kind, _UNSUPPORTED_STRATEGIES[kind], _USE_DDP)
    if "DeepSpeedStrategy" in kinds and not trainer.lightning_module.automatic_optimization:
        reason = "DeepSpeed's engine accumulates, whatever the module does"
        raise NotMeasured.of_setting("automatic_optimization", "False", reason, "Set it to True.")
    if isinstance(strategy.model, DistributedDataParallel):
        if (found := spoiling_comm_hook(strategy.model)) is not None:
            raise NotMeasured.of_setting("ddp_comm_hook", *found)
    elif trainer.world_size > 1 and _STRATEGIES.isdisjoint(kinds):
        reason = "it trains neither by DDP nor FSDP nor DeepSpeed"
        raise NotMeasured.of_setting("strategy", type(strategy).__name__, reason, _USE_DDP)
    own_steps = callback_that_does_not_average(trainer)
    if own_steps is not None and not own_steps.same_weights_in_each_step:
        raise NotMeasured.of_setting(
            "callbacks",
            type(own_steps).__name__,
            "ranks compute gradients at different weights",
            f"{own_steps.measurable_if}.",
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
