# SPDX-License-Identifier: Apache-2.0
"""Callbacks that wrap optimizers, so that each rank steps on its own, and resume each rank."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from noisescale.checks import refuse
from noisescale.guard import Guard
from noisescale.lightning import trainer_access
from noisescale.lightning.averaging_off import AveragingOff
from noisescale.lightning.trainer_access import MisconfigurationException
from noisescale.methods.across_ranks.alike import on_any_rank
from noisescale.methods.across_ranks.rank_states import (
    RankStates,
    load_own_buffers,
    mean_of_states_,
    own_buffers,
    own_state,
    states_of_former_ranks,
)
from noisescale.methods.across_ranks.wrapped_optimizer import WrappedOptimizer
from noisescale.methods.adasum.fused import copy_

if TYPE_CHECKING:
    import pytorch_lightning as pl

_Wrapped = TypeVar("_Wrapped", bound=WrappedOptimizer)


class OwnSteps(AveragingOff, Generic[_Wrapped]):
    """The base of callbacks that put a wrapper around each optimizer of the fit.

    A subclass says how (`_wrap`), and which weights each rank has of its own (`_weights_of`).
    """

    what_ranks_have = "The optimizer's moments"
    """What each rank has of its own, for the warning that some of it is missing."""

    def __init__(self) -> None:
        self._guard = Guard(MisconfigurationException)
        self._optimizers: list[_Wrapped] = []
        self._rank_states: RankStates | None = None
        self._former: dict[str, Any] = {}

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Wrap the optimizers."""
        super().on_fit_start(trainer, pl_module)
        self._guard = Guard(MisconfigurationException)
        self._close()
        self._prepare(trainer)
        self._optimizers = [self._check_and_wrap(each) for each in trainer.optimizers]
        for each in self._optimizers:
            # Lightning unscales, for clipping. Torch's GradScaler looks for this attribute by name.
            each._step_supports_amp_scaling = False  # type: ignore[attr-defined]
        trainer.strategy.optimizers = list(self._optimizers)
        if trainer.world_size > 1:
            ddp: Any = trainer.strategy.model  # checked above; after the fit it is gone
            apart = None if ddp.broadcast_buffers else pl_module
            self._rank_states = RankStates(
                trainer,
                lambda: self._own_state() | {"buffers": own_buffers(apart)},
                self._guard,
                self._before_saving,
            )
            trainer_access.rank_zero_info(self._advice())

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Go on from what each rank saved, or from the mean of it."""
        saved, self._former = self._former, {}
        former = saved.get("ranks", 0)
        if trainer.ckpt_path is None or not former:
            return
        same = former == trainer.world_size
        own = own_state(trainer, self._guard) if same else None
        missing = not same or (trainer.global_rank > 0 and own is None)
        if trainer.world_size > 1:
            missing = on_any_rank(missing, [None])
        if not missing:
            for index, optimizer in enumerate(self._optimizers):
                if own is not None:
                    optimizer.load_state_dict(own["optimizers"][index])
            weights = (own or saved).get("weights", [])
            for optimizer, some in zip(self._optimizers, weights, strict=False):
                copy_(self._weights_of(optimizer), some)
            load_own_buffers(pl_module, (own or {}).get("buffers", {}))
            return
        trainer_access.rank_zero_warn(
            f"{self.what_ranks_have} of each rank are not all there:"
            f" {former} ranks saved this checkpoint, {trainer.world_size} go on, and"
            f" `{trainer.ckpt_path}.ranks` may be missing. All ranks go on from the mean of the"
            " moments that are there. Training goes on, but not as without the interruption."
        )
        states = states_of_former_ranks(trainer, former, self._guard)
        for index, optimizer in enumerate(self._optimizers):
            some = [state["optimizers"][index] for state in states]
            mean_of_states_(optimizer, some, counts_own=trainer.global_rank == 0)

    def state_dict(self) -> dict[str, Any]:
        """Return how many ranks there are, and what rank 0 alone has beside its optimizers."""
        ranks = dist.get_world_size() if dist.is_initialized() else 1
        return {"ranks": ranks}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Remember it until the fit starts."""
        self._former = state_dict

    def _prepare(self, trainer: pl.Trainer) -> None:
        """Look at the Trainer before optimizers are wrapped."""

    def _wrap(self, optimizer: Optimizer) -> _Wrapped:
        raise NotImplementedError

    def _advice(self) -> str:
        """Return what is said about the learning rate when a fit starts."""
        raise NotImplementedError

    def _weights_of(self, optimizer: _Wrapped) -> list[Tensor]:
        """Return the weights of an optimizer that only this rank has."""
        raise NotImplementedError

    def _own_weights(self) -> list[list[Tensor]]:
        return [self._weights_of(each) for each in self._optimizers]

    def _before_saving(self, trainer: pl.Trainer, checkpoint: dict[str, Any]) -> None:
        """Change a checkpoint before it is written; all ranks are here."""

    def _check_and_wrap(self, optimizer: Optimizer) -> _Wrapped:
        if isinstance(optimizer, WrappedOptimizer):
            name = type(optimizer).__name__
            remedy = "Leave the wrapper out: the callback is one."
            got = f"{'an' if name[0] in 'AEIOU' else 'a'} {name}"
            refuse("configure_optimizers", "return plain optimizers", got, remedy)
        return self._wrap(optimizer)

    def _own_state(self) -> dict[str, Any]:
        return {
            "optimizers": [each.state_dict() for each in self._optimizers],
            "weights": self._own_weights(),
        }

    def _publish(self, trainer: pl.Trainer, metrics: Mapping[str, float], what: str) -> None:
        """Log the finite metrics as metrics of the current step."""
        known = {name: value for name, value in metrics.items() if math.isfinite(value)}
        if not known:
            return
        trainer_access.publish(trainer, known)
        if trainer_access.has_log_steps(trainer):
            step = trainer_access.log_step(trainer)
            for logger in trainer.loggers:
                with self._guard(f"{type(logger).__name__} did not log {what}"):
                    logger.log_metrics(known, step=step)

    def _close(self) -> None:
        """Begin another fit. Until then `trainer.save_checkpoint` has the states of all ranks."""
        if self._rank_states is not None:
            self._rank_states.close()
        self._rank_states = None
