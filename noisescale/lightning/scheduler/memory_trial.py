# SPDX-License-Identifier: Apache-2.0
"""Try whether a larger micro-batch fits into memory, in one pass that leaves no trace."""

from __future__ import annotations

import copy
import gc
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

from noisescale.lightning import trainer_access

if TYPE_CHECKING:
    import pytorch_lightning as pl


def fits(trainer: pl.Trainer, batch: Any, growth: float) -> str | None:
    """Try a larger micro-batch on every rank; all ranks have to call it.

    The trial runs on a copy of the module that shares only the parameters' memory: buffers, metrics
    and counters are copied, `self.log` is off, random generators are restored, and the gradients
    belong to the copy. These gradients need memory beside the step's own, so the trial is a little
    stricter than training. The Trainer's loggers log nothing meanwhile, and what `training_step`
    may change in the Trainer is restored, see `_restore_trainer`.

    Any error is reported as the reason against the larger batch, and training goes on. A module
    that cannot be copied (because it holds a lock or an open file, say) cannot be tried.

    The trial cannot hide itself outside of the module and the Trainer: a forward hook that is a
    plain function sees one batch more, and may write it to a file. A collective in `training_step`
    would wait for ever for a rank whose memory runs out before it. So synchronized batch norms are
    tried as local ones.

    Args:
        trainer: Between two epochs.
        batch: A batch that was trained on. Its rows are repeated.
        growth: How many times as many rows to try.

    Returns:
        None if the batch fits on all ranks, else the reason why it does not fit on this rank.
    """
    failure = None
    with trainer_access.isolate_rng():  # without a `finally`, so nothing may leave it raised
        try:
            of_batch = trainer_access.count_examples(trainer, batch).examples
            rows: set[int] = set()
            apply_to_collection(batch, Tensor, lambda t: rows.update(t.shape[:1]))
            if of_batch is None or of_batch not in rows:  # a list of examples, for one
                raise ValueError(f"no tensor in the batch has its {of_batch} examples as rows")
            _forward_and_backward(
                trainer, apply_to_collection(batch, Tensor, _repeat, of_batch, growth)
            )
        except Exception as error:  # told, with the move that is not made, whatever it is
            failure = "".join(traceback.format_exception_only(error)).split("\n")[0][:200]
    gc.collect()
    if trainer.strategy.root_device.type == "cuda":
        torch.cuda.empty_cache()
    if trainer.strategy.reduce_boolean_decision(failure is None, all=True):
        return None
    return failure or "another device failed"


def _repeat(tensor: Tensor, of_batch: int, growth: float) -> Tensor:
    """Cycle a tensor's first dimension, if it is the batch's, until it is long enough."""
    if not tensor.dim() or len(tensor) != of_batch:
        return tensor
    return tensor[torch.arange(round(growth * of_batch), device=tensor.device) % of_batch]


def _forward_and_backward(trainer: pl.Trainer, batch: Any) -> None:
    module = _copy(trainer)
    arguments = (batch, 0) if trainer_access.takes_batch_idx(module) else (batch,)
    with (
        _restore_trainer(trainer, module),
        trainer.precision_plugin.train_step_context(),
        torch.enable_grad(),
    ):
        output = module.training_step(*arguments)
        loss = output if isinstance(output, Tensor) or output is None else output["loss"]
    if loss is not None:
        loss.backward()


@contextmanager
def _restore_trainer(trainer: pl.Trainer, module: Any) -> Iterator[None]:
    """Let a Trainer train `module` without its loggers, and put back what that may change of it."""
    strategy, metrics = trainer.strategy, trainer_access.metrics_of(trainer)
    original, loggers, stops = strategy._lightning_module, trainer.loggers, trainer.should_stop
    groups = [group for optimizer in trainer.optimizers for group in optimizer.param_groups]
    kept = [(changed, dict(changed)) for changed in (*metrics, *groups)]
    strategy._lightning_module = module  # for `self.trainer.lightning_module`
    trainer.loggers = [trainer_access.DummyLogger() for _ in loggers]
    try:
        yield
    finally:
        strategy._lightning_module, trainer.loggers = original, loggers
        trainer.should_stop = stops
        for changed, before in kept:
            changed.clear()
            changed.update(before)


def _copy(trainer: pl.Trainer) -> Any:
    """Copy the module and its state, on the memory of the parameters that are trained."""
    module = trainer.lightning_module
    shared: dict[int, Any] = {id(trainer): trainer}
    for parameter in module.parameters():
        twin = torch.nn.Parameter(parameter.detach(), requires_grad=parameter.requires_grad)
        shared[id(parameter)] = twin
    for submodule in module.modules():
        # Outputs that are kept for the end of an epoch have a graph, which cannot be copied.
        shared |= {id(t): t.detach().clone() for t in _tensors_in(vars(submodule)) if not t.is_leaf}
    made = copy.deepcopy(module, shared)
    if trainer_access.is_compiled(module):  # its methods are compiled ones, of the original
        for name in ("forward", "training_step"):
            vars(made).pop(name, None)
    submodules: list[Any] = list(made.modules())
    for copied in submodules:
        if isinstance(copied, torch.nn.SyncBatchNorm):
            # A sibling of the same state, which type checkers cannot know.
            copied.__class__ = _LocalBatchNorm  # type: ignore[assignment]
        if hasattr(copied, "log_dict"):  # a LightningModule, which leaves its Trainer out of copies
            copied._trainer = trainer
            for name in ("log", "log_dict"):
                object.__setattr__(copied, name, lambda *args, **kwargs: None)
    return made


class _LocalBatchNorm(torch.nn.modules.batchnorm._BatchNorm):
    """A BatchNorm of any number of dimensions, as a synchronized one is."""

    def _check_input_dim(self, input: Tensor) -> None:
        """Refuse no number of dimensions."""


def _tensors_in(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (dict, list, tuple)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _tensors_in(item)
