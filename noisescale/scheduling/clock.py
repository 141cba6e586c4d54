# SPDX-License-Identifier: Apache-2.0
"""How far a schedule that is sized in steps is to be taken, where steps change in size."""

from __future__ import annotations

import math

_ROUNDING = 1e-6


class Clock:
    """Count time in steps of the first batch size, and the whole steps that a schedule is due.

    A schedule is sized in whole steps an epoch, a short last one included. So an epoch has as
    many of them on this clock, whatever the steps are that it is taken in.

    Example:
        >>> clock = Clock()
        >>> [clock.advance(0.75) for _ in range(4)]
        [0, 1, 1, 1]
    """

    def __init__(self) -> None:
        self.time = 0.0
        """Steps of the first batch size so far."""
        self.taken = 0
        """Whole steps that have been due so far."""
        self.steps_per_epoch = math.inf
        """That an epoch has at the first batch size; infinite where that is not known."""
        self._epoch_began = 0.0

    def begin_epoch(self, already: float = 0.0) -> None:
        """Count the steps of another epoch, `already` of which are over."""
        self._epoch_began = self.time - already

    def advance(self, steps: float, *, ends_epoch: bool = False) -> int:
        """Let `steps` pass, and return how many whole ones are due.

        Args:
            steps: In steps of the first batch size.
            ends_epoch: Whether no more follow in this epoch.
        """
        end = self._epoch_began + self.steps_per_epoch
        self.time = min(self.time + steps, end)
        if ends_epoch:
            self.time = end if math.isfinite(end) else float(math.ceil(self.time - _ROUNDING))
        due = math.floor(self.time + _ROUNDING) - self.taken
        self.taken += due
        return due

    def state_dict(self) -> dict[str, float]:
        """Return what `load_state_dict` needs, in builtins."""
        return {
            "time": self.time,
            "taken": self.taken,
            "steps_per_epoch": self.steps_per_epoch,
            "epoch_began": self._epoch_began,
        }

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Continue from a `state_dict`."""
        self.time, self.taken = state["time"], int(state["taken"])
        self.steps_per_epoch, self._epoch_began = state["steps_per_epoch"], state["epoch_began"]
