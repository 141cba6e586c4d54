# SPDX-License-Identifier: Apache-2.0
"""Metrics on their way to loggers, and to callbacks that go by them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from noisescale.guard import Guard
from noisescale.lightning import trainer_access
from noisescale.meter.logged_meter import LoggedMeter, Reading, nothing_measured

if TYPE_CHECKING:
    import pytorch_lightning as pl


def log_reading(trainer: pl.Trainer, logged: LoggedMeter, step: int, guard: Guard) -> Reading:
    """Read the metrics for the history and all loggers, and return them.

    Args:
        trainer: Whose loggers they are.
        logged: The meter.
        step: The x axis of Lightning's own logs.
        guard: Keeps a logger that fails from the others.
    """
    reading = logged.read()
    if trainer_access.has_log_steps(trainer):
        for logger in trainer.loggers:
            with guard(f"{type(logger).__name__} was not given the noise scale"):
                logger.log_metrics(reading.known, step=step)
    # What is not known is NaN, not left out: ModelCheckpoint takes NaN for the worst value, and
    # EarlyStopping stops and says why (`check_finite=False` goes on). A monitored key that is
    # missing makes EarlyStopping raise, ModelCheckpoint too once there was a validation. One
    # that stays would pass for a new measurement.
    trainer_access.publish(trainer, reading.all)
    return reading


def publish_news(trainer: pl.Trainer, meters: Sequence[LoggedMeter], prefix: str) -> None:
    """Put metrics where early stopping, checkpoints and schedules are about to look.

    They look when epochs and validations end, whatever `log_every_n_steps` is. Loggers and the
    history keep to that. Reads the device where there is something new.

    Args:
        trainer: Whose callbacks look.
        meters: None where nothing is measured: then all metrics are NaN.
        prefix: What their names begin with.
    """
    if not meters:
        trainer_access.publish(trainer, nothing_measured(prefix))
    for logged in meters:
        if logged.has_news:
            trainer_access.publish(trainer, logged.look())
