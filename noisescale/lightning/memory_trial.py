# SPDX-License-Identifier: Apache-2.0
"""Whether a larger micro-batch fits into memory: one forward and backward that leave no trace."""

from __future__ import annotations

import copy
import gc
from typing import TYPE_CHECKING, Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

from noisescale.lightning import host

if TYPE_CHECKING:
    import pytorch_lightning as pl


def fits(trainer: pl.Trainer, batch: Any, rows: int) -> str | None:
    """Try a micro-batch of so many rows on every rank; all ranks have to call it.

    What is tried is a copy of the module that shares the parameters' memory and nothing else:
    buffers, metrics and counters are copied, logging is off, random generators are put back, and
    gradients are those of the copy. They need the memory that the step's own take, which are
    still there, so that the trial is a little stricter than training.

    Args:
        trainer: Between two epochs.
        batch: One that was trained on. Its rows are repeated.
        rows: Of the batch to try.

    Returns:
        None if it fits on all ranks, else why it does not on this one.
    """
    failure = None
    with host.isolate_rng():  # has no `finally` of its own, so nothing may leave it raised
        try:
            _forward_and_backward(trainer, apply_to_collection(batch, Tensor, _repeated, rows))
        except Exception as error:
            failure = f"{type(error).__name__}: {error}".split("\n")[0][:200]
    gc.collect()
    if trainer.strategy.root_device.type == "cuda":
        torch.cuda.empty_cache()
    if trainer.strategy.reduce_boolean_decision(failure is None, all=True):
        return None
    return failure or "another device failed"


def _repeated(tensor: Tensor, rows: int) -> Tensor:
    """The first dimension cycled until it is long enough."""
    if not tensor.dim() or not len(tensor):
        return tensor
    return tensor[torch.arange(rows, device=tensor.device) % len(tensor)]


def _forward_and_backward(trainer: pl.Trainer, batch: Any) -> None:
    module = _copy(trainer)
    with trainer.precision_plugin.train_step_context(), torch.enable_grad():
        output = module.training_step(batch, 0)
        loss = output if isinstance(output, Tensor) or output is None else output["loss"]
    if loss is not None:
        loss.backward()


def _copy(trainer: pl.Trainer) -> Any:
    """A module of its own state, on the memory of the parameters that are trained."""
    module = trainer.lightning_module
    shared: dict[int, Any] = {id(trainer): trainer}
    for parameter in module.parameters():
        twin = torch.nn.Parameter(parameter.detach(), requires_grad=parameter.requires_grad)
        shared[id(parameter)] = twin
    for part in module.modules():
        for hooks in (part._forward_hooks, part._forward_pre_hooks, part._backward_hooks):
            ours = [k for k, hook in hooks.items() if _is_ours(hook)]
            if ours:  # they lead to what is measured, which a trial is no part of
                kept = {k: hook for k, hook in hooks.items() if k not in ours}
                shared[id(hooks)] = type(hooks)(kept)
    made = copy.deepcopy(module, shared)
    for name in ("log", "log_dict"):
        object.__setattr__(made, name, lambda *args, **kwargs: None)
    return made


def _is_ours(hook: Any) -> bool:
    """Whether a hook was put there by this package."""
    function = getattr(hook, "func", hook)
    return str(getattr(function, "__module__", "")).startswith("noisescale.")
