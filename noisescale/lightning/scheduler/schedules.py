# SPDX-License-Identifier: Apache-2.0
"""Learning-rate schedules that count optimizer steps, stepped by a clock instead."""

from __future__ import annotations

import math
import sys
from bisect import bisect_right
from typing import TYPE_CHECKING, Any, Literal, get_args

from torch.optim.lr_scheduler import OneCycleLR, SequentialLR

from noisescale.lightning import trainer_access
from noisescale.scheduling.ahead import ScheduleForecast, schedule_ahead
from noisescale.scheduling.controller import BatchSizeController

if TYPE_CHECKING:
    import pytorch_lightning as pl

ProgressBy = Literal["run", "steps", "examples", "gain"]
"""Clocks for learning-rate schedules, see `BatchSizeScheduler`."""
PROGRESS: tuple[ProgressBy, ...] = get_args(ProgressBy)


class ClockedSchedules:
    """Step the schedules of a Trainer that count optimizer steps, by a clock.

    Schedules that count epochs stay as they are. So do schedules that wait for a metric: their
    patience counts optimizer steps.

    Lightning compares a schedule's `frequency` with the number of batches in the epoch. This class
    does the same with the number of batches at the first batch size.

    Args:
        trainer: A Trainer at its first batch, with its optimizers set up.
        controller: The controller of the run, with its state loaded. Its clock is used.
        progress: Kind of the clock, see `BatchSizeScheduler`.
        accumulation: The Trainer's own `accumulate_grad_batches`.
        saved: State of the callback to go on from; empty for a new run.
        max_examples: The examples that end the fit; None if others end it.
    """

    def __init__(
        self,
        trainer: pl.Trainer,
        controller: BatchSizeController,
        progress: ProgressBy,
        *,
        accumulation: int,
        saved: dict[str, Any],
        max_examples: float | None = None,
    ) -> None:
        self.progress = progress
        self._max_examples = max_examples
        self._controller = controller
        kept = saved.get("schedules", {})
        self._accumulation: int = kept.get("accumulation", accumulation)
        self._batches: float = kept.get("batches", trainer.num_training_batches)
        self._steps_per_epoch = math.inf
        if math.isfinite(self._batches):
            self._steps_per_epoch = math.ceil(self._batches / self._accumulation)
        self._set_clock(trainer, saved_progress(saved))
        self._end_clock(trainer)
        self._epoch_began = trainer.global_step
        self._frequencies: dict[int, tuple[Any, int]] = {}  # configurations by their identity
        self._warned = False
        self._take_over(trainer)
        if controller.settings.policy.follows_schedule:
            controller.ahead = self._ahead(trainer)

    @property
    def _by_examples(self) -> bool:
        return self.progress in _BY_EXAMPLES

    def begin_epoch(self, trainer: pl.Trainer) -> None:
        """Begin to count another epoch."""
        self._controller.clock.begin_epoch()
        self._epoch_began = trainer.global_step

    def advance(self, trainer: pl.Trainer, examples: float) -> None:
        """Step each schedule as often as it is due, through the module's own hook.

        Args:
            trainer: A Trainer that has just taken an optimizer step.
            examples: Of all devices in that step.
        """
        self._take_over(trainer)
        controller, clock = self._controller, self._controller.clock
        self._end_clock(trainer)  # the first batch size follows the batches that come
        steps = {"steps": 1.0, "gain": controller.gain}.get(
            self.progress, examples / controller.base_batch_size
        )
        due = clock.advance(
            steps,
            ends_epoch=self._by_examples and trainer_access.is_last_batch(trainer),
            optimizer_steps=trainer.global_step if self.progress == "run" else None,
        )
        batches = self._batches  # of an epoch, which its last batch tells of a stream
        if math.isinf(batches) and trainer_access.is_last_batch(trainer):
            batches = trainer.fit_loop.epoch_loop.batch_idx + 1
        for step in range(clock.taken - due + 1, clock.taken + 1):
            for config in trainer.lr_scheduler_configs:
                if _counts_steps(config) and self._is_due(
                    config, self._step_in_epoch(step, clock.epoch_began), batches
                ):
                    self._step(trainer, config)
        if clock.is_past_end and any(map(_counts_steps, trainer.lr_scheduler_configs)):
            self._warn_that_it_is_over()
        for config in trainer.lr_scheduler_configs:
            if _counts_steps(config, waits=True):  # Lightning asks for its metric after this
                step = self._step_in_epoch(trainer.global_step, self._epoch_began)
                is_due = self._is_due(config, step, batches)
                config.frequency = 1 if is_due else _NEVER

    def drifts(self, trainer: pl.Trainer) -> bool:
        """Return whether a schedule counts optimizer steps, in a fit that counts epochs."""
        by_epochs = trainer.max_steps == -1 and trainer.max_epochs not in (None, -1)
        counts = any(map(_counts_steps, trainer.lr_scheduler_configs))
        return self.progress == "steps" and by_epochs and counts

    def close(self) -> None:
        """Let Lightning step the schedules again."""
        for config, frequency in self._frequencies.values():
            config.frequency = frequency
        self._frequencies = {}

    def state_dict(self) -> dict[str, Any]:
        """Return the state to resume from, in builtins."""
        return {
            "progress": self.progress,
            "accumulation": self._accumulation,
            "batches": self._batches,
        }

    def _ahead(self, trainer: pl.Trainer) -> ScheduleForecast | None:
        """Return what the first schedule does until the end of the run, if it tells."""
        if not trainer.lr_scheduler_configs:
            return ScheduleForecast(peak=1.0, floor=1.0, restarts=0)
        config = trainer.lr_scheduler_configs[0]
        steps: float = trainer.max_epochs or -1
        if config.interval == "step":
            steps = self._controller.clock.steps_of_schedules - self._controller.clock.taken
        return schedule_ahead(config.scheduler, steps)

    def _end_clock(self, trainer: pl.Trainer) -> None:
        """Tell the clock what schedules are sized for: first `estimated_stepping_batches`."""
        if self.progress == "steps":
            return
        controller, per_epoch = self._controller, self._controller.clock.steps_per_epoch
        if math.isinf(per_epoch):
            per_epoch = self._steps_per_epoch
        endless = trainer.max_epochs in (None, -1)
        most = self._max_examples
        controller.clock.end_with(
            steps_of_epochs=math.inf if endless else per_epoch * max(trainer.max_epochs or 0, 1),
            optimizer_steps=math.inf if trainer.max_steps == -1 else trainer.max_steps,
            steps_of_run=math.inf if most is None else most / controller.base_batch_size,
        )

    def _set_clock(self, trainer: pl.Trainer, went: ProgressBy | None) -> None:
        """Let the clock say how far the run is, where the run went by another one until now."""
        controller, clock = self._controller, self._controller.clock
        # Without a clock until now, schedules have been stepped by Lightning.
        taken = trainer.global_step if went is None else clock.taken
        if self._by_examples and went not in _BY_EXAMPLES:
            plan, batch_idx = controller.plan, trainer.fit_loop.epoch_loop.batch_idx
            examples = batch_idx * plan.device_batch_size * plan.devices
            already = examples / controller.base_batch_size
            if math.isfinite(per_epoch := self._steps_per_epoch):
                time = trainer.current_epoch * per_epoch + already
                clock.go_on(taken, time=time, steps_per_epoch=per_epoch, already=already)
            elif went is None:
                clock.go_on(taken, already=already)
        elif not self._by_examples and went != self.progress:
            clock.go_on(taken, steps_per_epoch=math.inf)

    def _take_over(self, trainer: pl.Trainer) -> None:
        """Take over all schedules, also later ones: averaging of weights adds one."""
        for config in trainer.lr_scheduler_configs:
            if id(config) not in self._frequencies and config.interval == "step":
                self._frequencies[id(config)] = config, config.frequency
                if not config.reduce_on_plateau:
                    config.frequency = _NEVER

    def _step_in_epoch(self, step: int, epoch_began: int) -> int:
        """Return the number, from 1, that a step has in its epoch at the first batch size."""
        if math.isfinite(self._steps_per_epoch):
            return (step - 1) % int(self._steps_per_epoch) + 1
        return step - epoch_began

    def _is_due(self, config: Any, of_epoch: int, batches: float) -> bool:
        """Return whether Lightning would step a schedule at this step of an epoch."""
        _, frequency = self._frequencies[id(config)]
        return int(min(of_epoch * self._accumulation, batches)) % frequency == 0

    def _step(self, trainer: pl.Trainer, config: Any) -> None:
        if _is_over(config.scheduler):
            self._warn_that_it_is_over()
            return
        progress = trainer.fit_loop.epoch_loop.scheduler_progress
        progress.increment_ready()
        trainer.lightning_module.lr_scheduler_step(config.scheduler, None)
        progress.increment_completed()

    def _warn_that_it_is_over(self) -> None:
        if not self._warned:
            self._warned = True
            trainer_access.rank_zero_warn(
                "A learning-rate schedule that counts steps ended before the run, at optimizer step"
                f" {self._controller.steps}. The run goes on with the last learning rate. Pass"
                ' `progress="run"` to BatchSizeScheduler: then schedules sized by'
                " `trainer.estimated_stepping_batches` end with the run."
            )


def saved_progress(saved: dict[str, Any]) -> ProgressBy | None:
    """Return the kind of clock that a saved run had; None for a new run."""
    taken = saved and saved["controller"]["steps"]
    return saved["schedules"]["progress"] if taken else None


def default_progress(saved: dict[str, Any], *, measured: bool) -> ProgressBy:
    """Return the default clock of the schedules: a resumed run keeps its clock.

    Args:
        saved: State of the callback to go on from; empty for a new run.
        measured: Whether there is a noise scale, from which the gain is computed.
    """
    went = saved_progress(saved)
    return "run" if went is None or (went == "gain" and not measured) else went


_BY_EXAMPLES = ("run", "examples")
_NEVER = sys.maxsize
"""A frequency at which Lightning never steps a schedule."""


def _counts_steps(config: Any, *, waits: bool = False) -> bool:
    return bool(config.interval == "step" and config.reduce_on_plateau == waits)


def _is_over(schedule: Any) -> bool:
    """Return whether a schedule has no further step: OneCycleLR raises at one, also in others."""
    if isinstance(schedule, OneCycleLR):
        return bool(schedule.last_epoch >= schedule.total_steps)
    combined = getattr(schedule, "_schedulers", ())
    if isinstance(schedule, SequentialLR):
        following = schedule.last_epoch + 1
        if following in schedule._milestones:
            return False  # the next one begins
        return _is_over(combined[bisect_right(schedule._milestones, following)])
    return any(map(_is_over, combined))
