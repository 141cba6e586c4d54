# SPDX-License-Identifier: Apache-2.0
"""One training of a search along the front of cost and result: its metric at its end, its time."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from noisescale.lab.branch.planning import look_after
from noisescale.lab.jobs.jobs import Record
from noisescale.lab.sweep.results import DIVERGED, OUT_OF_STEPS
from noisescale.lab.sweep.timed_run import TimedRun
from noisescale.lab.sweep.trial_fit import MadeModule, train_by_spec
from noisescale.lab.tune.tune_job import DONE, TOO_DEAR
from noisescale.refusal import Refusal

if TYPE_CHECKING:
    import pytorch_lightning as pl


def train_tune_task(made: MadeModule, spec: Record, folder: Path) -> None:
    """Train a task of a search, and write its result into its folder.

    Args:
        made: Module and data, newly made after the seed of the task was set.
        spec: From `TuneJob.spec`.
        folder: Of the training.
    """
    train_by_spec(made, spec, _Tuned(spec, spec["metric"]), folder)


class _Tuned(TimedRun):
    """Evaluate the metric after the last step. Before, look for a lost loss and a spent time."""

    def __init__(self, spec: Record, metric: str) -> None:
        super().__init__(spec, metric)
        self._next = 1
        self._spent: tuple[int, float] | None = None

    def result(self) -> dict[str, Any]:
        """Return the metric at the end, the steps, and the seconds of training."""
        if self._spent is not None:
            steps, seconds = self._spent
            return {"value": None, "steps": steps, "seconds": seconds, "ended": self._ended}
        if not self._steps:
            raise Refusal(
                "module",
                "train to the end",
                "one that stops the training before it was evaluated",
                "Let it train.",
            )
        value = self._values[-1]
        return {
            "value": value,
            "steps": self._steps[-1],
            "seconds": self._seconds[-1],
            "ended": DIVERGED if value is None or self._ended == DIVERGED else DONE,
        }

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, *rest: Any
    ) -> None:
        super().on_train_batch_end(trainer, pl_module, outputs, *rest)
        step = trainer.global_step
        if self._next <= step < self._spec["most_steps"]:
            self._next = look_after(step)
            seconds = trainer.strategy.broadcast(time.perf_counter() - self._began)
            if self._has_nan_loss(trainer):
                self._ended = DIVERGED
            elif seconds > (self._spec["most_seconds"] or math.inf):
                self._ended = TOO_DEAR
            if self._ended != OUT_OF_STEPS:
                self._spent = step, round(seconds, 4)
                trainer.should_stop = True

    def _is_due(self, step: int) -> bool:
        return step >= int(self._spec["most_steps"])

    def _ending_at(self, trainer: pl.Trainer, value: float, step: int) -> str:
        if self._spent is not None:  # Lightning validates once more when a training stops
            return self._ended
        if not math.isfinite(value) or self._has_nan_loss(trainer):
            return DIVERGED
        return OUT_OF_STEPS
