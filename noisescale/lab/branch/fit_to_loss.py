# SPDX-License-Identifier: Apache-2.0
"""One fit of a copy of a module, from a checkpoint until it reaches a given loss."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from noisescale.history.metrics import Goal
from noisescale.lab.branch.planning import BEYOND, Branching, look_after
from noisescale.lightning.checkpoints import Checkpoint, load_weights
from noisescale.lightning.resized_loaders import batches_of
from noisescale.lightning.trainer_access import Callback, takes_batch_idx
from noisescale.lightning.training import copy_to_train, plain_trainer, seed_all
from noisescale.plan import Plan
from noisescale.prediction.branches import Branch
from noisescale.refusal import Refusal

if TYPE_CHECKING:
    import pytorch_lightning as pl

MOST_STEPS = 1.5
"""A branch at a larger batch size is stopped after this many times the steps of the run."""

MOST_STEPS_ALIKE = 3.0
"""`MOST_STEPS` for branches at the run's own batch size. Their steps scatter most."""

PATIENCE = 3
"""A branch is stopped after this many high losses in a row."""


@dataclass(frozen=True)
class BranchSetup:
    """The module, the data and the settings that all branches of a run share."""

    module: pl.LightningModule
    data: Any
    held: DataLoader[Any]
    """The examples on which losses are evaluated."""
    trainer_options: dict[str, Any]


def measure_losses(setup: BranchSetup, checkpoints: Iterable[Checkpoint]) -> list[float]:
    """Return the loss on the held examples for the weights of each checkpoint."""
    losses: list[float] = []

    class Evaluate(Callback):
        def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            for checkpoint in checkpoints:
                load_weights(pl_module, checkpoint)
                losses.append(_loss(trainer, pl_module, setup.held))
            trainer.should_stop = True

    _fit(setup, Evaluate(), Plan(1, 1), 1)
    return losses


def fit_to_loss(
    branching: Branching, setup: BranchSetup, plan: Plan, order: int, goal: float, factor: float
) -> Branch:
    """Train from the checkpoint until the loss is below the goal, and then some more steps.

    Learning-rate schedules and learning rates that the module sets are ignored: they count batches,
    epochs and horizons of a Trainer that a branch does not have. A branch follows the learning rate
    that the monitor recorded, which is set before each step, after whatever the module sets.

    Args:
        branching: The plan of all branches.
        setup: The module and the data.
        plan: How a batch is made up.
        order: The number of the order of the data, which is also that of the module's randomness.
        goal: The loss to reach on the held examples.
        factor: On the learning rate of the run.
    """
    look = _Look(branching, setup, plan, goal, factor)
    seed_all(1 + order)
    started = time.perf_counter()
    _fit(setup, look, plan, look.most)
    seconds = round(time.perf_counter() - started, 2)
    size, steps, losses = float(plan.batch_size), tuple(look.steps), tuple(look.losses)
    return Branch(size, order, factor, steps, losses, seconds, look.diverged)


class _Look(Callback):
    """Load the checkpoint, set the learning rate, and evaluate the loss from time to time."""

    def __init__(
        self, branching: Branching, setup: BranchSetup, plan: Plan, goal: float, factor: float
    ) -> None:
        size, self._ratio = float(plan.batch_size), plan.batch_size / branching.batch_size
        most = MOST_STEPS if self._ratio > 1.5 else MOST_STEPS_ALIKE
        self.most = math.ceil(most * branching.steps * max(1.0, 1 / self._ratio))
        self._branching, self._setup, self._goal, self._factor = branching, setup, goal, factor
        self._clock = branching.steps / branching.steps_at(size).value
        self._next, self._last = branching.first_look(size), math.inf
        self._high = 0
        self._steps_before_epoch = 0
        self.steps: list[float] = []
        self.losses: list[float] = []
        self.diverged = False

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        checkpoint = self._branching.checkpoint
        load_weights(pl_module, checkpoint)
        if len(trainer.optimizers) != len(checkpoint.optimizers):
            raise Refusal(
                "checkpoint",
                "be of this module",
                f"{len(checkpoint.optimizers)} optimizers in the checkpoint and"
                f" {len(trainer.optimizers)} in the module",
                "Name a checkpoint of the same module.",
            )
        for optimizer, state in zip(trainer.optimizers, checkpoint.optimizers, strict=True):
            _load_state(optimizer, state, checkpoint)
            for group in optimizer.param_groups:
                group["lr"] = group["lr"] * self._factor
                if "betas" in group and len(group["betas"]) == 2:
                    beta1, beta2 = group["betas"]
                    # The same half-life in examples (Marek et al. 2025).
                    group["betas"] = (beta1, beta2**self._ratio)
        trainer.strategy.lr_scheduler_configs = []  # they go by batches of another size
        trainer.fit_loop.max_epochs = -1  # a stream that ends begins anew
        self._set: list[list[float]] = [
            [float(group["lr"]) for group in optimizer.param_groups]
            for optimizer in trainer.optimizers
        ]
        self.steps.append(0.0)
        self.losses.append(_loss(trainer, pl_module, self._setup.held))

    def on_before_optimizer_step(self, trainer: pl.Trainer, *_: Any) -> None:
        factor = self._branching.learning_rate_at(self._clock * trainer.global_step)
        for optimizer, set_to in zip(trainer.optimizers, self._set, strict=True):
            for group, lr in zip(optimizer.param_groups, set_to, strict=True):
                if isinstance(group["lr"], Tensor):
                    group["lr"].fill_(lr * factor)
                else:
                    group["lr"] = lr * factor

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.global_step == self._steps_before_epoch:
            raise Refusal(
                "data",
                "have at least one batch of examples",
                "a stream that ended before its first batch",
                "Give more data.",
            )
        self._steps_before_epoch = trainer.global_step

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any
    ) -> None:
        step = trainer.global_step
        if step >= self.most:
            trainer.should_stop = True
            self._next = min(self._next, step)
        if step < self._next or step == self.steps[-1]:
            return
        self._next = look_after(step)
        loss = _loss(trainer, pl_module, self._setup.held)
        self.steps.append(float(step))
        self.losses.append(loss)
        if loss <= self._goal and math.isinf(self._last):
            self._last = BEYOND * step
        drop = abs(self.losses[0] - self._goal)
        high = not loss < self.losses[0] + max(abs(self.losses[0]), drop)
        self._high = self._high + 1 if high else 0
        self.diverged = not math.isfinite(loss) or self._high >= PATIENCE
        if self.diverged:
            trainer.should_stop = True
        elif step >= self._last:
            # Below the goal on the average, too, not by a single low value.
            course = np.array(self.steps), np.array(self.losses)
            trainer.should_stop = Goal("loss", self._goal).first_step(*course) is not None
            self._last = math.inf


def _load_state(
    optimizer: torch.optim.Optimizer, state: dict[str, Any], checkpoint: Checkpoint
) -> None:
    """Load an optimizer's state. Raise a ValueError if the optimizer is of another kind."""
    settings = {key for group in optimizer.param_groups for key in group} - {"initial_lr"}
    saved = {key for group in state["param_groups"] for key in group} - {"initial_lr"}
    if settings != saved:
        raise Refusal(
            "checkpoint",
            "be of this module's optimizer",
            checkpoint.path,
            f"Its optimizer differs from {type(optimizer).__name__} in the settings"
            f" {', '.join(sorted(saved ^ settings))}. Name a checkpoint of the same"
            " module.",
        )
    # `load_state_dict` shares the tensors that it is given: the optimizer would train these.
    optimizer.load_state_dict(copy.deepcopy(state))


def _loss(trainer: pl.Trainer, module: pl.LightningModule, held: DataLoader[Any]) -> float:
    """Return the mean training loss over the held examples, with the module in evaluation mode."""
    modes = [(part, part.training) for part in module.modules()]
    log, log_dict = module.log, module.log_dict
    module.log = module.log_dict = _nothing  # type: ignore[method-assign]  # until `finally`
    module.eval()
    total, counted, left = 0.0, 0, len(held.dataset)  # type: ignore[arg-type]  # never a stream
    try:
        with torch.random.fork_rng(devices=[]), trainer.precision_plugin.val_step_context():
            for index, batch in enumerate(held):
                batch = trainer.strategy.batch_to_device(batch)
                arguments = (batch, index) if takes_batch_idx(module) else (batch,)
                loss = _loss_in(_output(module, arguments))
                many, left = min(left, held.batch_size or 1), left - (held.batch_size or 1)
                if loss is not None:
                    total, counted = total + many * float(loss.detach()), counted + many
    finally:
        module.log, module.log_dict = log, log_dict  # type: ignore[method-assign]  # as before
        for part, training in modes:
            part.training = training
    if not counted:
        raise Refusal(
            "training_step", "return a loss for branches", "none on any batch", "Return the loss."
        )
    return float(trainer.strategy.broadcast(total / counted))


def _output(module: pl.LightningModule, arguments: tuple[Any, ...]) -> Any:
    """Call `training_step`, without a graph unless the step computes gradients itself."""
    try:
        with torch.no_grad():
            return module.training_step(*arguments)
    except RuntimeError as error:
        if "does not require grad" not in str(error):
            raise
    with torch.enable_grad():
        return module.training_step(*arguments)


def _loss_in(output: Any) -> Tensor | None:
    """Return the loss in the result of `training_step`; None if the step skips the batch."""
    loss = output.get("loss") if isinstance(output, Mapping) else output
    if not (loss is None or isinstance(loss, Tensor)):
        raise Refusal(
            "training_step",
            "return a loss for branches",
            type(output).__name__,
            "Return the loss, or a dict with the key `loss`. Manual optimization cannot"
            " be branched.",
        )
    return loss


def _nothing(*_: Any, **__: Any) -> None:
    """Log nothing, in place of `self.log`."""


def _fit(setup: BranchSetup, callback: Any, plan: Plan, steps: int) -> None:
    trained = copy_to_train(setup.module)
    batches = steps * plan.accumulation
    options = {
        "limit_train_batches": batches,
        "accumulate_grad_batches": plan.accumulation,
        "callbacks": [callback],
        **setup.trainer_options,
    }
    trainer = plain_trainer(trained, options)
    size = int(plan.device_batch_size)
    with batches_of(setup.data, size, batches, shuffled=True) as loaders:
        trainer.fit(trained, **loaders)
