# SPDX-License-Identifier: Apache-2.0
"""Learning-rate schedules that Lightning steps once an optimizer step, stepped by a clock."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytorch_lightning as pl


class ClockedSchedules:
    """Take over the schedules of a Trainer that count optimizer steps.

    Those that count epochs, and those that wait for a metric, stay as they are.

    Args:
        trainer: Its optimizers set up.
        taken: Steps of the clock before this fit.
    """

    def __init__(self, trainer: pl.Trainer, taken: int = 0) -> None:
        self._taken = taken
        self._configs = {
            id(config): (config, config.frequency)
            for config in trainer.lr_scheduler_configs
            if config.interval == "step" and not config.reduce_on_plateau
        }
        for config, _ in self._configs.values():
            config.frequency = sys.maxsize  # so that Lightning never finds it due

    def advance(self, trainer: pl.Trainer, steps: int) -> None:
        """Step each schedule as often as it is due, by the module's own hook."""
        progress = trainer.fit_loop.epoch_loop.scheduler_progress
        for _ in range(steps):
            self._taken += 1
            for config, frequency in self._configs.values():
                if self._taken % frequency == 0:
                    progress.increment_ready()
                    trainer.lightning_module.lr_scheduler_step(config.scheduler, None)
                    progress.increment_completed()

    def close(self) -> None:
        """Leave them to Lightning again."""
        for config, frequency in self._configs.values():
            config.frequency = frequency
        self._configs = {}


def counts_steps(trainer: pl.Trainer) -> bool:
    """Whether a schedule of the Trainer counts optimizer steps, in a fit that counts epochs."""
    by_epochs = trainer.max_steps == -1 and trainer.max_epochs not in (None, -1)
    return by_epochs and any(
        config.interval == "step" and not config.reduce_on_plateau
        for config in trainer.lr_scheduler_configs
    )
