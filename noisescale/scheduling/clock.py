# SPDX-License-Identifier: Apache-2.0
"""How far a schedule that is sized in steps is to be taken, where steps change in size."""

from __future__ import annotations

import math

_ROUNDING = 1e-6


class Clock:
    """Count time in steps of the first batch size, and the whole steps that a schedule is due.

    Example:
        >>> clock = Clock()
        >>> [clock.advance(0.75) for _ in range(4)]
        [0, 1, 1, 1]
    """

    def __init__(self) -> None:
        self.time = 0.0
        """Steps of the first batch size so far."""
        self._taken = 0

    def advance(self, steps: float, *, round_up: bool = False) -> int:
        """Let `steps` pass, and return how many whole ones are due.

        Args:
            steps: In steps of the first batch size.
            round_up: At the end of an epoch a short last step counts as one, as it does where
                the batch size never changes: an epoch has the same number of steps anyway.
        """
        self.time += steps
        if round_up:
            self.time = float(math.ceil(self.time - _ROUNDING))
        due = math.floor(self.time + _ROUNDING) - self._taken
        self._taken += due
        return due

    def state_dict(self) -> dict[str, float]:
        """Return what `load_state_dict` needs, in builtins."""
        return {"time": self.time, "taken": self._taken}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Continue from a `state_dict`."""
        self.time, self._taken = state["time"], int(state["taken"])
