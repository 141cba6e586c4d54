# SPDX-License-Identifier: Apache-2.0
"""One fit whose steps change in size: its changes to the Trainer, and its progress."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from noisescale.checks import require_state
from noisescale.collectors.loss_scale import LossScale
from noisescale.collectors.squared_norms import wide_dtype
from noisescale.estimation.moments import GradientMoments
from noisescale.lightning import trainer_access
from noisescale.lightning.scheduler.counted_batches import CountedBatches
from noisescale.lightning.scheduler.device_batches import ResizedLoaders
from noisescale.lightning.scheduler.memory_trial import fits
from noisescale.lightning.scheduler.schedulable import check_may_resize
from noisescale.lightning.scheduler.schedules import ClockedSchedules, ProgressBy
from noisescale.plan import Bounds, Plan
from noisescale.refusal import Refusal
from noisescale.scheduling.accumulation import Accumulation
from noisescale.scheduling.controller import BatchSizeController
from noisescale.scheduling.decision import Move
from noisescale.scheduling.settings import SchedulerOptions, Settings, default_cap

if TYPE_CHECKING:
    import pytorch_lightning as pl


_SURPRISING = 1.5
"""A factor between the first batch and the others that is worth a warning."""

_ROUNDING = 1e-6

_STEPS_BETWEEN_COUNTS = 8
"""Steps between additions over ranks of the examples that came."""

_SAVED = (
    "controller",
    "max_batch_size",
    "window",
    "rows",
    "resized",
    "largest_rows",
    "schedules",
)
"""Keys of a saved fit."""


def check_saved(saved: Any) -> None:
    """Raise a ValueError if a state of the callback is incomplete; an empty one is a new run."""
    if saved != {}:
        require_state("BatchSizeScheduler", saved, _SAVED)
        needed = ("plan", "steps", "base_batch_size", "clock")
        require_state("BatchSizeScheduler, `controller`,", saved["controller"], needed)


class TrainerChanges:
    """The changes that a fit makes to its Trainer, until it ends.

    Args:
        trainer: About to fit.
        max_device_batch_size: Largest batch of the loader, in rows; None: batches stay.
        saved: State of the callback to go on from; empty for a new run.

    Raises:
        MisconfigurationException: If batches cannot change under this Trainer.
    """

    def __init__(
        self, trainer: pl.Trainer, max_device_batch_size: int | None, saved: dict[str, Any]
    ) -> None:
        self.saved = saved
        self.accumulation = int(trainer.accumulate_grad_batches)
        """The Trainer's own `accumulate_grad_batches`."""
        self.loaders: ResizedLoaders | None = None
        """The source of its batches, if their size may change."""
        self.under_way = Accumulation(*saved.get("window", (1,)))
        """The batches of the current step."""
        self._trainer: pl.Trainer | None = trainer
        if max_device_batch_size is not None:
            check_may_resize(trainer)
            self.loaders = ResizedLoaders(trainer)
            if saved and saved["resized"] is not None:
                self.loaders.change(min(saved["resized"], max_device_batch_size))
        if saved:  # Lightning asks whether the last step was complete before the first batch
            trainer.accumulate_grad_batches = self.under_way

    def close(self) -> None:
        """Restore the Trainer, once."""
        if self._trainer is not None:
            self._trainer.accumulate_grad_batches = self.accumulation
            self._trainer = None
        if self.loaders is not None:
            self.loaders.close()


class ScheduledFit:
    """A fit from its first batch on. All ranks have to create it.

    Args:
        trainer: At its first batch.
        taken: The changes to the Trainer.
        examples: This rank's examples in the first batch.
        min_accumulation: Least micro-batches a step.
        options: The options that the user chose.
        progress: See `ClockedSchedules`.
        max_examples: The examples that end the fit; None if others end it.

    Raises:
        ValueError: If the loader's batches exceed `max_device_batch_size`, or no plan meets the
            bounds.
    """

    def __init__(
        self,
        trainer: pl.Trainer,
        taken: TrainerChanges,
        examples: float,
        min_accumulation: int,
        options: SchedulerOptions,
        progress: ProgressBy,
        max_examples: float | None = None,
    ) -> None:
        saved = taken.saved
        self._max_examples = math.inf if max_examples is None else max_examples
        rows = self._rows = _rows_of_loader(trainer, options.max_device_batch_size)
        if saved and saved["rows"] == rows:
            size = saved["controller"]["plan"]["device_batch_size"]
        else:
            if rows is not None and trainer_access.is_last_batch(trainer):  # it may be a short one
                examples = max(examples, rows)
            size = _mean_over_ranks(examples, trainer)
        plan = Plan(size, taken.accumulation, trainer.world_size)
        self._caps_itself = options.max_batch_size is None
        self._max_batch_size = options.max_batch_size  # None where an epoch has no known end
        if self._caps_itself and Settings.from_options(options).policy.needs_a_cap:
            cap = _default_cap(trainer, plan, options, rows, self._max_examples)
            self._max_batch_size = saved["max_batch_size"] if saved else cap
        self._outgrown: list[float] | None = saved.get("outgrown")
        """Bounds that batches may have outgrown, as they came; None if they are as the first."""
        self.controller = self._make_controller(
            trainer,
            plan,
            replace(options, max_batch_size=self._max_batch_size),
            min_accumulation,
            examples_per_row=size / rows if rows else 1.0,
            saved=saved,
        )
        self._came = CountedBatches(
            trainer.world_size,
            trainer.strategy.root_device,
            self.controller.examples,
            saved.get("came", ()) if saved.get("rows", rows) == rows else (),
        )
        self.schedules = ClockedSchedules(
            trainer,
            self.controller,
            progress,
            accumulation=taken.accumulation,
            saved=saved,
            max_examples=max_examples,
        )
        self._first_size, self._told = size, False
        self._of_batch = size
        self._loss_scale = LossScale(getattr(trainer.strategy.precision_plugin, "scaler", None))
        self._of_step = self._since_log = 0.0  # examples, of this rank and of all
        self._steps_since_log = 0
        self.given = plan.batch_size
        """The mean global batch size between the last two log steps, as batches came."""
        self.logged_step = -1
        """The last step that was logged, see `note_logged`."""
        self._loaders = taken.loaders
        self._largest_rows = max(rows or 0, saved.get("largest_rows", 0))
        self._batch: tuple[Any, int] | None = None  # to try a larger one with, and its rows
        self._under_way = taken.under_way
        self._begins_anew = True

    def _make_controller(
        self,
        trainer: pl.Trainer,
        plan: Plan,
        options: SchedulerOptions,
        min_accumulation: int,
        *,
        examples_per_row: float,
        saved: dict[str, Any],
    ) -> BatchSizeController:
        """Return the controller, which goes on where a saved run had outgrown its bounds."""
        base = saved["controller"]["base_batch_size"] if saved else None
        begins_with, most = options, options.max_batch_size
        if self._outgrown:
            most = most and max(most, min(plan.batch_size, base or 0.0))
            begins_with = replace(options, min_batch_size=None, max_batch_size=most)
        controller = BatchSizeController(
            plan,
            trainer.optimizers,
            min_accumulation=1 if self._outgrown else min_accumulation,
            base_batch_size=base,
            examples_per_row=examples_per_row,
            **vars(begins_with),
        )
        if saved:
            controller.load_state_dict(
                saved["controller"], device_batch_size=plan.device_batch_size
            )
        if self._outgrown:
            least, largest, few = self._outgrown
            bounds = Bounds(
                min(options.min_batch_size or 0.0, least),
                max(options.max_batch_size or math.inf, largest),
                min(min_accumulation, int(few)),
            )
            controller.settings = replace(controller.settings, bounds=bounds)
        return controller

    def begins_step(self, trainer: pl.Trainer, batch_idx: int) -> bool:
        """Return whether a batch is the first one of a step."""
        ended = batch_idx % trainer.accumulate_grad_batches == 0
        return self._begins_anew or batch_idx == 0 or ended

    def begin_step(self, trainer: pl.Trainer, batch_idx: int) -> None:
        """Begin a step: it takes the plan's number of batches, or as many as are left."""
        plan = self.controller.plan
        left = (self._max_examples - self.controller.examples) / (
            plan.devices * plan.device_batch_size
        )
        remaining = min(trainer.num_training_batches - batch_idx, left)
        length = min(plan.accumulation, remaining)
        length = math.ceil(max(length - _ROUNDING, 1))
        self._of_step = 0.0
        self._under_way = trainer.accumulate_grad_batches = Accumulation(length, begin=batch_idx)
        self._begins_anew = False

    @property
    def is_over(self) -> bool:
        """Whether the examples that end the fit have come."""
        return self.controller.examples >= self._max_examples * (1 - _ROUNDING)

    def rescale_short_step(self, trainer: pl.Trainer, optimizer: Optimizer) -> None:
        """Correct the mean of an epoch's short last step, if the loader has no length."""
        length, taken = trainer.accumulate_grad_batches, _batches_taken(trainer)
        if taken < length:
            gradients = [
                p.grad for g in optimizer.param_groups for p in g["params"] if p.grad is not None
            ]
            if gradients:
                torch._foreach_mul_(gradients, length / taken)

    def count_batch(self, trainer: pl.Trainer, examples: float) -> None:
        """Count a batch of this rank."""
        self._came.add(examples, ends_epoch=trainer_access.is_last_batch(trainer))
        self._of_step += examples
        self._of_batch = examples

    def add_loss(self, trainer: pl.Trainer, loss: Tensor) -> None:
        """Add the loss of the batch under way as it goes backward: scaled, and divided."""
        if self.controller.settings.policy.needs_loss:
            whole = self._loss_scale.unscale_loss(loss) * int(trainer.accumulate_grad_batches)
            self.controller.add_loss(whole, self._of_batch)

    def _follow_batches(self) -> str | None:
        """Have plans made up of the batches that came. Return what surprises, once."""
        controller, before = self.controller, self.controller.plan.device_batch_size
        if (came := self._came.read()) is None:
            return None
        size, bounds = came.size, controller.settings.bounds
        if self._caps_itself and self._max_batch_size is not None:
            self._max_batch_size *= size / before
            bounds = bounds._replace(max_batch_size=self._max_batch_size)
        controller.follow_batches(size, came.more, max_batch_size=bounds.max_batch_size)
        if controller.settings.bounds != bounds or size != self._first_size:
            self._outgrown = [*controller.settings.bounds]
        alike = 1 / _SURPRISING < size / self._first_size < _SURPRISING
        if self._told or alike or controller.steps < _STEPS_BETWEEN_COUNTS:
            return None
        self._told = True
        return (
            f"The first batch had {self._first_size:.3g} examples on a device, and batches have"
            f" {size:.3g} on average. Batch sizes and the learning rate follow the average."
        )

    def count_step(self, trainer: pl.Trainer, batch: Any) -> str | None:
        """Count a step, and step the schedules that are due after it.

        Returns:
            What surprises about the batches that came, once.
        """
        controller, plan = self.controller, self.controller.plan
        examples = plan.device_batch_size * _batches_taken(trainer) * plan.devices
        if plan.devices == 1 and self._of_step:
            examples = self._of_step
        self._since_log += self._of_step * plan.devices
        self._steps_since_log += 1
        self._of_step = 0.0
        controller.step(examples)
        surprise = None
        # Batches of so many rows as the loader says need no ranks to agree on their size.
        often = controller.steps <= 2 or controller.steps % _STEPS_BETWEEN_COUNTS == 0
        if plan.devices == 1 or (often and plan.device_batch_size != self._rows):
            surprise = self._follow_batches()  # what was added up some steps ago
            self._came.add_up(controller.examples)
        self.schedules.advance(trainer, examples)
        may_be_short = self._batch is not None and trainer_access.is_last_batch(trainer)
        if self._loaders is not None and self._rows and not may_be_short:
            self._batch = batch, self._rows
        return surprise

    def note_logged(self, step: int, *, in_step: bool) -> None:
        """Note that this step is logged, and the mean batch size since the log step before.

        Args:
            step: The step under which it is logged.
            in_step: Whether the batches of the step under way have come, and it is not counted yet.
        """
        self.logged_step = step
        under_way = self._of_step * self.controller.plan.devices if in_step else 0.0
        examples, steps = self._since_log + under_way, self._steps_since_log + in_step
        if examples:
            self.given = examples / steps
        self._since_log, self._steps_since_log = -under_way, -int(in_step)

    def resize(self, trainer: pl.Trainer, average: GradientMoments | None) -> Move | str | None:
        """Make a new plan for the wanted batch, with the loader's batches as large as allowed.

        After a batch that does not fit, the next trial is half way between it and the largest one
        that fits, so that a few epochs find the limit.

        Args:
            trainer: Between two epochs.
            average: Moments averaged over the run, for the learning rate.

        Returns:
            The move, or the reason why there is none; None if everything stays.
        """
        if self._loaders is None:
            return None
        assert self._rows is not None
        controller = self.controller
        controller.settle()  # a larger batch is tried on all ranks or on none
        plan = controller.plan_for(controller.wanted)
        rows = round(self._rows * plan.device_batch_size / controller.plan.device_batch_size)
        if rows == self._rows or self._batch is None:
            return None
        batch, of_batch = self._batch
        if rows > self._largest_rows and (why := fits(trainer, batch, rows / of_batch)) is not None:
            controller.lower_max_device_batch_size((self._largest_rows + rows) // 2)
            return (
                f"step {controller.steps}: batch size stays {controller.plan}, as a batch of {rows}"
                " rows on a device does not fit; the next trial has at most"
                f" {controller.max_device_batch_size} rows. Reason: {why}"
            )
        self._largest_rows = max(self._largest_rows, rows)
        self._loaders.change(rows)
        self._rows = rows
        self._came.begin_again()
        self._first_size = plan.device_batch_size
        return controller.adopt(plan, "micro-batches of another size", average)

    def state_dict(self) -> dict[str, Any]:
        """Return the state to resume from, in builtins."""
        return {
            "controller": self.controller.state_dict(),
            "max_batch_size": self._max_batch_size,
            "came": self._came.state,
            "outgrown": self._outgrown,
            "window": [int(self._under_way), self._under_way.begin],
            "rows": self._rows,
            "resized": None if self._loaders is None else self._loaders.size,
            "largest_rows": self._largest_rows,
            "schedules": self.schedules.state_dict(),
        }

    def close(self) -> None:
        """Restore the optimizers and the schedules."""
        self.controller.close()
        self.schedules.close()
        self._batch = None


def _rows_of_loader(trainer: pl.Trainer, most: int | None) -> int | None:
    """Return the rows of a batch on one device; None if the loader does not tell.

    Raises:
        ValueError: If there are more than `most`, the user's `max_device_batch_size`.
    """
    loaders = trainer.fit_loop._combined_loader
    assert loaders is not None
    rows: int | None = getattr(loaders.flattened[0], "batch_size", None)
    if most is not None and rows is not None and most < rows:
        raise Refusal(
            "max_device_batch_size",
            "be at least the `batch_size` of the loader",
            f"{most} < {rows}",
            "Raise it, or start with smaller batches.",
        )
    return rows


def _default_cap(
    trainer: pl.Trainer, plan: Plan, options: SchedulerOptions, rows: int | None, of_run: float
) -> float | None:
    """Return the largest batch size of a fit, if its end is known, of whole micro-batches."""
    of_epoch = plan.device_batch_size * plan.devices * trainer.num_training_batches
    epochs = math.inf if trainer.max_epochs in (None, -1) else max(trainer.max_epochs or 0, 1)
    steps = math.inf if trainer.max_steps == -1 else trainer.max_steps
    cap = default_cap(min(of_epoch * epochs, plan.batch_size * steps, of_run), plan)
    if cap is not None and options.max_device_batch_size is not None and rows is not None:
        # A prime number of rows would be reached by micro-batches of one row.
        full = options.max_device_batch_size * plan.device_batch_size / rows * plan.devices
        cap = max(cap // full * full, plan.batch_size)
    return None if cap is None else max(cap, options.min_batch_size or 0.0)


def _batches_taken(trainer: pl.Trainer) -> int:
    """Return the batches in the step so far, the one under way included."""
    of_step = trainer.accumulate_grad_batches
    begin = of_step.begin if isinstance(of_step, Accumulation) else 0
    return trainer.fit_loop.epoch_loop.batch_progress.current.ready - begin


def _mean_over_ranks(value: float, trainer: pl.Trainer) -> float:
    if trainer.world_size == 1:
        return value
    device = trainer.strategy.root_device
    total = torch.full((), value, dtype=wide_dtype(device), device=device)
    dist.all_reduce(total)
    return float(total) / trainer.world_size
