# SPDX-License-Identifier: Apache-2.0
"""Which Trainers the noise scale can be measured under, and what to do about the others."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.parallel import DistributedDataParallel

from noisescale.lightning.host import MisconfigurationException, rank_zero_warn

if TYPE_CHECKING:
    import pytorch_lightning as pl

# By class name: importing some of them needs packages that are not there.
_UNSUPPORTED_STRATEGIES = {
    "DeepSpeedStrategy": "DeepSpeed reduces gradients inside its own engine",
    "FSDPStrategy": "FSDP1 offers no look at a rank's own gradient",
    "ModelParallelStrategy": "sharded gradients (FSDP2) are not measured yet",
}

_UNSUPPORTED_COMM_HOOKS = {
    "powerSGD": "PowerSGD replaces the mean gradient by a low-rank approximation of it",
    "post_localSGD": "post-local SGD stops averaging gradients over all ranks",
}

_USE_DDP = 'Use `strategy="ddp"`, or leave the callback out.'


def check_supported(trainer: pl.Trainer) -> bool:
    """Say whether there is something to measure; call it when the strategy is set up.

    Returns:
        False, after one warning, where a single process trains: it goes on unmeasured.

    Raises:
        MisconfigurationException: If the numbers would be wrong or cannot be had. The message
            names the setting and the remedy.
    """
    strategy = trainer.strategy
    for kind in type(strategy).__mro__:
        if kind.__name__ in _UNSUPPORTED_STRATEGIES:
            _refuse("strategy", kind.__name__, _UNSUPPORTED_STRATEGIES[kind.__name__], _USE_DDP)
    if trainer.world_size < 2 and not _accumulates(trainer):
        rank_zero_warn(
            "NoiseScaleMonitor has nothing to measure: one process trains, and one gradient a step"
            " has nothing to be compared with. Training goes on without it. Accumulate two or more"
            " micro-batches a step (`Trainer(accumulate_grad_batches=2)`), or use more devices"
            ' (`Trainer(devices=2, strategy="ddp")`, also with `accelerator="cpu"`).'
        )
        return False
    if isinstance(strategy.model, DistributedDataParallel):
        _check_reduction(strategy.model)
    elif trainer.world_size > 1:
        _refuse("strategy", type(strategy).__name__, "it does not train by DDP", _USE_DDP)
    _check_optimization(trainer)
    return True


def _accumulates(trainer: pl.Trainer) -> bool:
    scheduled = any(
        kind.__name__ == "GradientAccumulationScheduler"
        for callback in getattr(trainer, "callbacks", [])
        for kind in type(callback).__mro__
    )
    return scheduled or trainer.accumulate_grad_batches > 1


def _check_reduction(ddp: DistributedDataParallel) -> None:
    for name in [name for hook, _ in ddp._comm_hooks for name in _names(hook, set())]:
        for part, reason in _UNSUPPORTED_COMM_HOOKS.items():
            if part in name:
                remedy = "Use a hook that keeps the mean, such as `fp16_compress_hook`, or none."
                _refuse("ddp_comm_hook", name, reason, remedy)


def _names(hook: Any, seen: set[int]) -> Iterator[str]:
    """The names of a comm hook and of the hooks it wraps, as `fp16_compress_wrapper` does."""
    if id(hook) in seen:  # a closure that refers to itself
        return
    seen.add(id(hook))
    yield str(getattr(hook, "__qualname__", hook))
    for value in (
        inspect.getclosurevars(hook).nonlocals.values() if inspect.isfunction(hook) else ()
    ):
        if callable(value):
            yield from _names(value, seen)


def _check_optimization(trainer: pl.Trainer) -> None:
    if not trainer.lightning_module.automatic_optimization:
        _refuse(
            "automatic_optimization",
            "False",
            "manual optimization is not measured yet",
            "Use automatic optimization, or `NoiseScaleMeter` in a torch loop of your own.",
        )
    for optimizer in trainer.optimizers:
        if isinstance(optimizer, torch.optim.LBFGS):
            _refuse(
                "optimizer",
                "LBFGS",
                "it takes several gradients a step, at different weights",
                "Use a first-order optimizer such as SGD or AdamW.",
            )
    if getattr(trainer.strategy.precision_plugin, "scaler", None) is not None:
        _refuse(
            "precision",
            str(trainer.precision),
            "gradients that carry a loss scale are not measured yet",
            'Use `precision="bf16-mixed"` or `"32-true"`.',
        )


def _refuse(setting: str, value: str, reason: str, remedy: str) -> None:
    raise MisconfigurationException(
        f"`{setting}` must be one that NoiseScaleMonitor can measure under, got {value}: {reason}."
        f" {remedy}"
    )
