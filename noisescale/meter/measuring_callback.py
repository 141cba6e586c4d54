# SPDX-License-Identifier: Apache-2.0
"""What the callbacks of all trainers have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from noisescale.batches.shared_examples import SharedExamples
from noisescale.collectors.halves.proved_cuts import INSTEAD
from noisescale.estimation.noise_scale import NoiseScale
from noisescale.guard import EndsTraining, Guard
from noisescale.history.history import History
from noisescale.meter.logged_meter import LoggedMeter, last_row_of
from noisescale.meter.options import MeterOptions


class MeasuringCallback(ABC):
    """A callback with meters, which are made when training starts.

    Args:
        options: Options of the meters.
        *let_pass: The trainer's own errors that end a training, as `EndsTraining` does.
    """

    _HOW_TO_HAVE_SEVERAL: str
    """The remedy under this trainer if one process trains."""

    def __init__(self, options: MeterOptions, *let_pass: type[Exception]) -> None:
        self._options = options
        self._meters: list[LoggedMeter] = []
        self._shared: SharedExamples | None = None
        self._counted = False
        """Whether the examples of a batch have been counted."""
        self._guard = Guard(*let_pass)

    def __repr__(self) -> str:
        """Show the arguments that are not the defaults, and the estimate of the last log step."""
        known = f": {last_row_of(self.history)}" if self.history else ""
        return f"{type(self).__name__}({self._arguments}){known}"

    @property
    @abstractmethod
    def _arguments(self) -> str:
        """The arguments that are not the defaults."""

    @property
    def noise_scale(self) -> NoiseScale:
        """The latest estimate, during and after training. Reads the device."""
        return self._unknown_noise_scale if self._first is None else self._first.meter.noise_scale

    @property
    def group_noise_scales(self) -> dict[str, NoiseScale]:
        """The latest estimate for each of `groups`, of the first optimizer."""
        return {} if self._first is None else self._first.meter.group_noise_scales

    @property
    def extra_noise_scales(self) -> dict[str, NoiseScale]:
        """The latest estimate of each of `extra`, of the first optimizer."""
        return {} if self._first is None else self._first.meter.extra_noise_scales

    @property
    def history(self) -> History:
        """The noise scale along the run, one row for each log step, of the first optimizer."""
        return History() if self._first is None else self._first.history

    @property
    def _first(self) -> LoggedMeter | None:
        return self._meters[0] if self._meters else None

    @property
    def _unknown_noise_scale(self) -> NoiseScale:
        return self._options.new_estimator().estimate()

    @property
    def _measuring(self) -> bool:
        return any(logged.measuring for logged in self._meters)

    @abstractmethod
    def _tell(self, message: str) -> None:
        """Warn on one rank."""

    @abstractmethod
    def _stop(self, *, interrupted: bool) -> None:
        """Take everything back that was put into the model."""

    def _make_meters(
        self, make: Callable[[], list[LoggedMeter]], ranks: int, *, optional: bool
    ) -> None:
        """Make the meters of a training; `make` raises a ValueError if it cannot be measured.

        Where that is `optional`, a process that trains alone goes on with a warning.
        """
        try:
            self._meters = make()
        except ValueError as reason:
            if ranks > 1 or not optional:
                raise
            self._tell_that_nothing_is_measured(reason)

    def _begin(
        self, saved: Sequence[dict[str, Any]], ranks: int, device: torch.device, accumulation: int
    ) -> None:
        """Continue from the saved states of the meters, and begin to look for shared examples."""
        with self._guard("The saved averages were not restored and start again"):
            for logged, state in zip(self._meters, saved, strict=False):
                logged.resume(state)
        if ranks > 1:
            self._shared = SharedExamples(device, accumulation, self._tell)

    def _forget(self) -> None:
        """Forget an earlier training."""
        self._counted, self._meters, self._shared = False, [], None

    def _look_for_shared_examples(self, tensors: Callable[[], Sequence[torch.Tensor]]) -> None:
        if self._shared is not None and not self._shared.over:
            self._shared.look(tensors())

    def _pause(self, paused: bool) -> None:
        """Have evaluation, copies, pickles and exports between steps meet no hooks of ours."""
        for logged in self._meters:
            (logged.meter.pause if paused else logged.meter.resume)()

    @contextmanager
    def _leaving_step_out(self) -> Iterator[None]:
        """Raise an error of the first batch. An error of a later batch leaves out its step."""
        try:
            yield
        except Exception as error:
            if not self._counted or isinstance(error, EndsTraining):
                raise
            for logged in self._meters:
                logged.meter.leave_step_out(error)

    def _close_step(self, which: int, loss_divisor: float | None = None) -> bool:
        """Close a step; False where its gradients turn out to be none that can be measured."""
        logged = self._meters[which]
        try:
            logged.step(loss_divisor=loss_divisor)
        except EndsTraining as reason:
            if not self._options.leaves_choice:
                raise
            logged.close()
            if self._measuring:
                self._tell(
                    f"{type(self).__name__} does not measure the gradients of optimizer {which}:"
                    f" {reason} The gradients of the other optimizers are still measured."
                )
            else:
                self._tell_that_nothing_is_measured(reason)
                self._stop(interrupted=False)
                self._meters = []
            return False
        return True

    def _tell_that_nothing_is_measured(self, reason: Exception) -> None:
        """Warn if one process trains. `reason` says why halves of a batch are not compared."""
        why = str(reason).removesuffix(INSTEAD)  # the remedy below says how to do it here
        self._tell(
            f"{type(self).__name__} has nothing to measure: one process trains, with one gradient"
            f" in each step, and the halves of a batch cannot be compared. {why} Training goes on,"
            " and no noise scale is logged. Accumulate two or more micro-batches in each step"
            f" {self._HOW_TO_HAVE_SEVERAL}"
        )

    def _interrupt(self) -> None:
        for logged in self._meters:
            logged.timer.interrupt()

    def _close_meters(self, *, interrupted: bool) -> None:
        for logged in reversed(self._meters):  # as what they wrap was wrapped
            logged.close(interrupted=interrupted)
