# SPDX-License-Identifier: Apache-2.0
"""One fit of a copy of a module, from a checkpoint on, until its loss is a given one."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from noisescale.history.metrics import Goal
from noisescale.lightning.branching.checkpoints import Checkpoint
from noisescale.lightning.resized_loaders import batches_of
from noisescale.lightning.trainer_access import Callback, takes_batch_idx
from noisescale.lightning.training import plain_trainer

if TYPE_CHECKING:
    import pytorch_lightning as pl

BEYOND = 1.15
"""A branch goes on for so many times the steps at which its loss first was below the goal."""

MORE_STEPS = 1.05
"""From one evaluation of the loss to the next."""


@dataclass(frozen=True)
class Ground:
    """What branches have in common."""

    module: pl.LightningModule
    data: Any
    held: DataLoader[Any]
    """The examples that losses are taken over."""
    trainer_options: dict[str, Any]


@dataclass(frozen=True)
class Course:
    """What came of a branch: the losses at its steps, from 0 on."""

    steps: tuple[float, ...]
    losses: tuple[float, ...]
    seconds: float


def losses_at(ground: Ground, checkpoints: Iterable[Checkpoint]) -> list[float]:
    """Return the module's loss on the held examples with the weights of each checkpoint."""
    losses: list[float] = []

    class Evaluate(Callback):
        def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            for checkpoint in checkpoints:
                load_weights(pl_module, checkpoint)
                losses.append(_loss(trainer, pl_module, ground.held))
            trainer.should_stop = True

    _fit(ground, Evaluate(), device_batch_size=1, accumulation=1, steps=1)
    return losses


def branched_fit(
    ground: Ground,
    checkpoint: Checkpoint,
    *,
    device_batch_size: int,
    accumulation: int,
    steps: int,
    seed: int,
    goal: float,
    first_look: int,
    settle: Callable[[torch.optim.Optimizer], None],
    clock: float,
) -> Course:
    """Train from a checkpoint until the loss has been below the goal for a while.

    Args:
        ground: What is trained, on what.
        checkpoint: With the optimizer's state.
        device_batch_size: Examples in a micro-batch.
        accumulation: Micro-batches a step.
        steps: The most that are taken.
        seed: Of the order of the data, and of what is random in the module.
        goal: Loss on the held examples.
        first_look: The first step after which the loss is taken.
        settle: Changes the optimizer's settings, each time that a schedule has set them.
        clock: Steps of the run's own schedules for each of the branch.
    """
    look = _Look(ground, checkpoint, goal, first_look, settle, clock)
    torch.manual_seed(seed)
    started = time.perf_counter()
    _fit(
        ground,
        look,
        device_batch_size=device_batch_size,
        accumulation=accumulation,
        steps=steps,
    )
    return Course(tuple(look.steps), tuple(look.losses), time.perf_counter() - started)


class _Look(Callback):
    """Loads the checkpoint, keeps the settings, and looks at the loss now and then."""

    def __init__(
        self,
        ground: Ground,
        checkpoint: Checkpoint,
        goal: float,
        first_look: int,
        settle: Callable[[torch.optim.Optimizer], None],
        clock: float,
    ) -> None:
        self._ground, self._checkpoint, self._goal = ground, checkpoint, goal
        self._settle, self._clock = settle, clock
        self._next, self._last = max(first_look, 1), math.inf
        self._taken, self._time = 0, 0.0
        self.steps: list[float] = []
        self.losses: list[float] = []

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        load_weights(pl_module, self._checkpoint)
        if len(trainer.optimizers) != len(self._checkpoint.optimizers):
            raise ValueError(
                f"`checkpoint` must be of this module, got {len(self._checkpoint.optimizers)}"
                f" optimizers in it for {len(trainer.optimizers)}. Name one of the same module."
            )
        for optimizer, state in zip(trainer.optimizers, self._checkpoint.optimizers, strict=True):
            _load_state(optimizer, state, self._checkpoint)
        # Ours to step from here on: by the run's clock, not by batches of another size.
        self._schedules = [config.scheduler for config in trainer.lr_scheduler_configs]
        for schedule, state in zip(self._schedules, self._checkpoint.schedules, strict=False):
            schedule.load_state_dict(state)
        trainer.strategy.lr_scheduler_configs = []
        for optimizer in trainer.optimizers:
            self._settle(optimizer)
        self.steps.append(0.0)
        self.losses.append(_loss(trainer, pl_module, self._ground.held))

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any
    ) -> None:
        step = trainer.global_step
        self._advance(trainer, step)
        if step < self._next or step == self.steps[-1]:
            return
        self._next = max(step + 1, math.ceil(step * MORE_STEPS))
        loss = _loss(trainer, pl_module, self._ground.held)
        self.steps.append(float(step))
        self.losses.append(loss)
        if loss <= self._goal and math.isinf(self._last):
            self._last = BEYOND * step
        if not loss < 2 * self.losses[0]:
            trainer.should_stop = True
        elif step >= self._last:
            # Below the goal on the average, too, not by a single low value.
            course = np.array(self.steps), np.array(self.losses)
            trainer.should_stop = Goal("loss", self._goal).reached_at(*course) is not None
            self._last = math.inf

    def _advance(self, trainer: pl.Trainer, step: int) -> None:
        """Step the run's schedules by as much as this step of the branch is worth."""
        if step == self._taken:
            return
        self._taken = step
        if not self._schedules:
            return
        before, self._time = self._time, self._time + self._clock
        for schedule in self._schedules:
            for group, lr in zip(
                schedule.optimizer.param_groups, schedule.get_last_lr(), strict=True
            ):
                group["lr"] = lr
            for _ in range(math.floor(self._time) - math.floor(before)):
                schedule.step()
        for optimizer in trainer.optimizers:
            self._settle(optimizer)


def _load_state(
    optimizer: torch.optim.Optimizer, state: dict[str, Any], checkpoint: Checkpoint
) -> None:
    """Put an optimizer's state into another of its kind, and no other."""
    settings = {key for group in optimizer.param_groups for key in group} - {"initial_lr"}
    saved = {key for group in state["param_groups"] for key in group} - {"initial_lr"}
    if settings != saved:
        raise ValueError(
            f"`checkpoint` must be of this module's optimizer, got {checkpoint.path} of one with"
            f" {', '.join(sorted(saved ^ settings))}, or without, unlike"
            f" {type(optimizer).__name__}. Name one of the same module."
        )
    optimizer.load_state_dict(state)


def load_weights(module: pl.LightningModule, checkpoint: Checkpoint) -> None:
    """Put the weights of a checkpoint into a module.

    Raises:
        ValueError: If they are of another one.
    """
    try:
        module.load_state_dict(checkpoint.weights)
    except RuntimeError as error:
        reason = " ".join(str(error).split())
        raise ValueError(
            f"`checkpoint` must be of this module, got {checkpoint.path}, whose weights do not fit:"
            f" {reason[:300]}. Name one of the same module."
        ) from error


@torch.no_grad()
def _loss(trainer: pl.Trainer, module: pl.LightningModule, held: DataLoader[Any]) -> float:
    """The mean of the module's training loss over batches of examples, as in evaluation."""
    modes = [(part, part.training) for part in module.modules()]
    log, log_dict = module.log, module.log_dict
    module.log = module.log_dict = _nothing  # type: ignore[method-assign]
    module.eval()
    total, count = 0.0, 0
    try:
        with torch.random.fork_rng(devices=[]), trainer.precision_plugin.val_step_context():
            for index, batch in enumerate(held):
                batch = trainer.strategy.batch_to_device(batch)
                arguments = (batch, index) if takes_batch_idx(module) else (batch,)
                total += float(_loss_in(module.training_step(*arguments)))
                count += 1
    finally:
        module.log, module.log_dict = log, log_dict  # type: ignore[method-assign]
        for part, training in modes:
            part.training = training
    return float(trainer.strategy.broadcast(total / max(count, 1)))


def _loss_in(output: Any) -> Tensor:
    """The loss of what `training_step` returned."""
    loss = output["loss"] if isinstance(output, dict) else output
    if not isinstance(loss, Tensor):
        raise ValueError(
            f"`training_step` must return a loss for branches, got {type(output).__name__}."
            " Return the loss, or a dict with `loss` in it; manual optimization has no branches."
        )
    return loss


def _nothing(*_: Any, **__: Any) -> None:
    """In place of `self.log`, where there is nothing to log to."""


def _fit(
    ground: Ground, callback: Any, *, device_batch_size: int, accumulation: int, steps: int
) -> None:
    module = ground.module
    trained = copy.deepcopy(module, {id(module._trainer): None} if module._trainer else None)
    trained.configure_callbacks = list  # type: ignore[method-assign]
    batches = steps * accumulation
    options = {
        "limit_train_batches": batches,
        "accumulate_grad_batches": accumulation,
        "callbacks": [callback],
        **ground.trainer_options,
    }
    trainer = plain_trainer(module, options)
    with batches_of(ground.data, device_batch_size, batches) as loaders:
        trainer.fit(trained, **loaders)
