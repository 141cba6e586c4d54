# SPDX-License-Identifier: Apache-2.0
"""A training with other hyperparameters, timed without its evaluations."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Any

import torch

from noisescale.lab.jobs.jobs import Record
from noisescale.lab.sweep.hyperparameters import (
    refuse_unsearchable,
    set_values,
)
from noisescale.lab.sweep.results import OUT_OF_STEPS
from noisescale.lightning.trainer_access import (
    Callback,
    has_plateau,
    has_validation,
    is_last_batch,
    looks_after_batch,
    schedules_of,
    validate_next,
    validate_no_more,
)
from noisescale.refusal import Refusal

if TYPE_CHECKING:
    import pytorch_lightning as pl


class TimedRun(Callback):
    """Set the hyperparameters, evaluate the metric where it is due, and keep the time.

    Args:
        spec: Of the task.
        metric: What is evaluated.
    """

    def __init__(self, spec: Record, metric: str) -> None:
        self._spec, self._metric = spec, metric
        self._began = self._paused = 0.0
        self._steps: list[int] = []
        self._values: list[float | None] = []
        self._seconds: list[float] = []
        self._ended = OUT_OF_STEPS
        self._loss: torch.Tensor | None = None
        self._asked = self._plateau = False
        self._batches_of_epoch = 0

    def _is_due(self, step: int) -> bool:
        """Return whether the metric is evaluated after a step."""
        raise NotImplementedError

    def _ending_at(self, trainer: pl.Trainer, value: float, step: int) -> str:
        """Return how the training ends here; `OUT_OF_STEPS` if it goes on."""
        raise NotImplementedError

    def result(self) -> dict[str, Any]:
        """Return the evaluations, and how the training ended."""
        return {
            "steps": self._steps,
            "values": self._values,
            "seconds": self._seconds,
            "ended": self._ended,
        }

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        values, beta2 = self._spec["hyperparameters"], self._spec["beta2"]
        refuse_unsearchable(trainer.optimizers, schedules_of(trainer), tuple(values))
        self._plateau = has_plateau(trainer)
        self._scaled = set_values(trainer.optimizers, values, beta2)
        self._began = time.perf_counter()

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._batches_of_epoch = 0

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not self._batches_of_epoch:  # Lightning would begin one epoch after the other for ever
            raise Refusal(
                "batch_sizes",
                "be at most the number of examples of an epoch",
                f"{self._spec['batch_size']}: the stream ended before one batch was full",
                "Leave larger ones out.",
            )

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, *_: Any
    ) -> None:
        self._batches_of_epoch += 1
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        self._loss = loss if isinstance(loss, torch.Tensor) else None
        step = trainer.global_step
        new = step > (self._steps[-1] if self._steps else 0)
        due = self._is_due(step)
        # A schedule that waits for a plateau would count the last value again and again.
        steers = self._plateau and (is_last_batch(trainer) or looks_after_batch(trainer, ""))
        if not new or not (due or steers):
            return
        self._pause(trainer)
        if has_validation(trainer):
            self._asked = True
            validate_next(trainer)
        else:
            self._look(trainer)

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not self._asked:  # the module itself stops the training
            self._pause(trainer)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not trainer.sanity_checking:
            asked, self._asked = self._asked, False
            validate_no_more(trainer)
            if asked or trainer.global_step > (self._steps[-1] if self._steps else 0):
                self._look(trainer)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._scaled.close()

    def _pause(self, trainer: pl.Trainer) -> None:
        device, accelerator = trainer.strategy.root_device, torch.accelerator.current_accelerator()
        if accelerator is not None and device.type == accelerator.type:
            torch.accelerator.synchronize(device)  # steps that are still under way count
        self._paused = time.perf_counter()

    def _look(self, trainer: pl.Trainer) -> None:
        step = trainer.global_step
        metric = metric_of(trainer, self._metric).detach().to(trainer.strategy.root_device)
        value = float(trainer.strategy.reduce(metric, reduce_op="mean"))
        seconds = trainer.strategy.broadcast(self._paused - self._began)
        self._steps.append(step)
        self._values.append(value if math.isfinite(value) else None)
        self._seconds.append(round(seconds, 4))
        self._ended = self._ending_at(trainer, value, step)
        if self._ended != OUT_OF_STEPS:
            trainer.should_stop = True
        self._began += time.perf_counter() - self._paused

    def _has_nan_loss(self, trainer: pl.Trainer) -> bool:
        """Return whether the last loss of any rank is no number: an accuracy would not show it."""
        if self._loss is None:
            return False
        bad = (~torch.isfinite(self._loss.detach())).any().float()
        return float(trainer.strategy.reduce(bad, reduce_op="sum")) > 0


def metric_of(trainer: pl.Trainer, name: str) -> torch.Tensor:
    """Return a metric that the module has logged.

    Raises:
        ValueError: If it has not.
    """
    found = trainer.callback_metrics.get(name)
    if found is None:
        names = ", ".join(sorted(trainer.callback_metrics)) or "nothing"
        unheld = "" if has_validation(trainer) else " There is no data to validate on."
        raise Refusal(
            "goal",
            "be about a metric that the module logs",
            repr(name),
            f"It logs {names}.{unheld}",
        )
    return found
