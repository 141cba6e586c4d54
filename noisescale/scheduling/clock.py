# SPDX-License-Identifier: Apache-2.0
"""A clock for schedules that are sized in steps, in runs whose steps change in size."""

from __future__ import annotations

import math
from typing import Literal

from noisescale.state import State

_ROUNDING = 1e-6


class Clock(State):
    """Count time in steps of the first batch size, and the whole steps that a schedule must take.

    A schedule is sized in whole steps an epoch, including a short last one. So each epoch has the
    same number of steps on this clock, whatever the size of its real steps.

    A schedule is also sized for the steps of the whole run, see `end_with`. After these no more are
    due.

    Examples:
        >>> clock = Clock()
        >>> [clock.advance(0.75) for _ in range(4)]
        [0, 1, 1, 1]
        >>> clock.end_with(steps_of_epochs=5)
        >>> [clock.advance(0.75) for _ in range(4)], clock.is_past_end
        ([0, 1, 1, 0], True)
    """

    _saved = ("time", "taken", "steps_per_epoch", "_epoch_began")

    def __init__(self) -> None:
        self.time = 0.0
        """Steps of the first batch size so far."""
        self.taken = 0
        """Whole steps that have been due so far."""
        self.steps_per_epoch = math.inf
        """Steps of an epoch at the first batch size; infinite if not known."""
        self._epoch_began = 0.0
        self._of_epochs = self._of_steps = self._of_run = math.inf
        self._reached = 0.0

    @property
    def epoch_began(self) -> int:
        """The whole steps that were due when the epoch began."""
        return math.floor(self._epoch_began + _ROUNDING)

    @property
    def is_past_end(self) -> bool:
        """Whether the clock stopped because the run has no more steps at the first batch size."""
        return math.floor(self._reached + _ROUNDING) > self.steps_of_schedules

    def share(self, optimizer_steps: int) -> float | None:
        """Return the share of the run that is over, from 0 to 1; None if its end is not known."""
        if not math.isfinite(min(self.steps_of_schedules, self._of_run)):
            return None
        return min(1.0, self._share(optimizer_steps))

    def ends_by(self, optimizer_steps: int) -> Literal["examples", "steps"] | None:
        """Return what ends the run first, as it goes now."""
        by_examples = self.steps_of_examples
        if not math.isfinite(min(self.steps_of_schedules, by_examples)):
            return None
        steps, time = max(optimizer_steps, 1e-9), max(self.time, 1e-9)  # at first by the limits
        by_steps = steps / self._of_steps > time / by_examples * (1 + _ROUNDING)
        return "steps" if by_steps or math.isinf(by_examples) else "examples"

    @property
    def steps_of_examples(self) -> float:
        """Steps of the first batch size in the run; infinite if examples do not end it."""
        return min(self._of_epochs, self._of_run)

    @property
    def most_steps(self) -> float:
        """The optimizer steps that the run is limited to; infinite if it is not."""
        return self._of_steps

    def end_with(
        self,
        *,
        steps_of_epochs: float = math.inf,
        optimizer_steps: float = math.inf,
        steps_of_run: float = math.inf,
    ) -> None:
        """Set what ends the run, as far as it is known: whichever limit is reached first.

        Args:
            steps_of_epochs: Steps of the first batch size in all epochs of the run.
            optimizer_steps: The optimizer steps that the run is limited to, whatever their size.
            steps_of_run: Steps of the first batch size in the examples that the run is limited to.
                Schedules are not sized for them.
        """
        self._of_epochs, self._of_steps = steps_of_epochs, optimizer_steps
        self._of_run = steps_of_run

    def begin_epoch(self, already: float = 0.0) -> None:
        """Count the steps of another epoch, `already` of which are over."""
        self._epoch_began = self.time - already

    def go_on(
        self,
        taken: int,
        *,
        time: float | None = None,
        steps_per_epoch: float | None = None,
        already: float = 0.0,
    ) -> None:
        """Continue a run that did not use this clock before.

        Args:
            taken: Whole steps that schedules have taken.
            time: Steps of the first batch size so far. Default: `taken`.
            steps_per_epoch: Steps of an epoch at the first batch size. Default: unchanged.
            already: Steps of the current epoch that are over.
        """
        self.taken = taken
        self.time = float(taken) if time is None else time
        if steps_per_epoch is not None:
            self.steps_per_epoch = steps_per_epoch
        self.begin_epoch(already)

    def advance(
        self, steps: float, *, ends_epoch: bool = False, optimizer_steps: int | None = None
    ) -> int:
        """Let `steps` pass, and return how many whole steps are due.

        Args:
            steps: Time in steps of the first batch size.
            ends_epoch: Whether no more steps follow in this epoch.
            optimizer_steps: Optimizer steps of the run so far. If given, a schedule keeps up with
                the run, by its epochs or its optimizer steps, whichever is nearer to its end.
        """
        end = self._epoch_began + self.steps_per_epoch
        self.time = min(self.time + steps, end)
        if ends_epoch:
            self.time = end if math.isfinite(end) else float(math.ceil(self.time - _ROUNDING))
        self._reached = self.time
        if optimizer_steps is not None and math.isfinite(self.steps_of_schedules):
            # The last step may take more examples than are left.
            over = self._of_run < self._of_epochs
            share = self._share(optimizer_steps)
            self._reached = (min(share, 1.0) if over else share) * self.steps_of_schedules
        due = math.floor(min(self._reached, self.steps_of_schedules) + _ROUNDING) - self.taken
        due = max(due, 0)  # a run that goes on with another clock may be ahead of it
        self.taken += due
        return due

    def _share(self, optimizer_steps: int) -> float:
        by_examples = self.time / self.steps_of_examples
        return max(by_examples, optimizer_steps / self._of_steps)

    @property
    def steps_of_schedules(self) -> float:
        """The steps that schedules are sized for; infinite if the end is not known."""
        return min(self._of_epochs, self._of_steps)
