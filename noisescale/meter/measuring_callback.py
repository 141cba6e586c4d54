# SPDX-License-Identifier: Apache-2.0
"""What the callbacks of all trainers have in common."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from noisescale.batches.shared_examples import SharedExamples
from noisescale.estimation.noise_scale import NoiseScale
from noisescale.guard import Guard, RefusalError
from noisescale.history.history import History
from noisescale.meter.logged_meter import LoggedMeter
from noisescale.meter.options import MeterOptions


class MeasuringCallback:
    """A callback with meters, of which there are none before training.

    Args:
        options: Of the meters.
        *let_pass: Errors of the trainer's own that end a training, as refusals do.
    """

    def __init__(self, options: MeterOptions, *let_pass: type[Exception]) -> None:
        self._options = options
        self._meters: list[LoggedMeter] = []
        self._shared: SharedExamples | None = None
        self._counted = False
        self._guard = Guard(*let_pass)

    @property
    def noise_scale(self) -> NoiseScale:
        """The latest estimate, during training and after it. Reads the device."""
        first = self._first
        return self._options.before_first_step if first is None else first.meter.noise_scale

    @property
    def group_noise_scales(self) -> dict[str, NoiseScale]:
        """The latest estimate for each of `groups`, of the first optimizer."""
        return {} if self._first is None else self._first.meter.group_noise_scales

    @property
    def preconditioned_noise_scale(self) -> NoiseScale | None:
        """The noise scale of g/(√v̂ + ε), where it is measured. It is not B_simple."""
        return None if self._first is None else self._first.meter.preconditioned_noise_scale

    @property
    def history(self) -> History:
        """The noise scale along the run, one row for each log step, of the first optimizer."""
        return History() if self._first is None else self._first.history

    @property
    def _first(self) -> LoggedMeter | None:
        return self._meters[0] if self._meters else None

    @property
    def _measuring(self) -> bool:
        return any(logged.measuring for logged in self._meters)

    @contextmanager
    def _leaving_step_out(self) -> Iterator[None]:
        """Raise an error of the first batch. An error of a later batch leaves out its step."""
        try:
            yield
        except Exception as error:
            if not self._counted or isinstance(error, RefusalError):
                raise
            for logged in self._meters:
                logged.meter.leave_step_out(error)

    def _interrupt(self) -> None:
        for logged in self._meters:
            logged.interrupt()

    def _close_meters(self, *, interrupted: bool) -> None:
        for logged in reversed(self._meters):  # as what they wrap was wrapped
            logged.close(interrupted=interrupted)
