# SPDX-License-Identifier: Apache-2.0
"""The seconds of a step, by the clock of the host or by that of an accelerator."""

from __future__ import annotations

import math
import time
from collections import deque
from statistics import median
from typing import NamedTuple

import torch

from noisescale.collectors.devices import current_stream
from noisescale.guard import WarnOnce

_MOST = 64
"""Intervals that are kept until the mean is asked for."""

FEWEST, SHORTEST = 8, 0.005
"""Plain steps that a measured one is compared with, and their seconds.

In a shorter step measuring is mostly the time of Python, which varies from run to run.
"""


class StepTimer:
    """The mean time from one optimizer step to the next, over steps that are not measured.

    Measured steps take longer, so they count only if there are no others. An interval in which
    something else ran (validation, a checkpoint) is dropped whole. The clock is the host's.
    """

    device = torch.device("cpu")
    """The device on which the steps run."""

    def __init__(self) -> None:
        self._last: float | None = None
        self.restart()

    def step(self, *, measured: bool = False) -> None:
        """Record that an optimizer step is taken now."""
        now = time.perf_counter()
        if self._last is not None:
            self._add(now - self._last, measured)
        self._last = now

    def interrupt(self) -> None:
        """Leave the current step out, as something else happens in it."""
        self._last = None

    @property
    def mean(self) -> float:
        """Seconds a step since the last `restart`; NaN if no step was timed."""
        kind = self._intervals[False] == 0
        return self._seconds[kind] / self._intervals[kind] if self._intervals[kind] else math.nan

    @property
    def costs(self) -> list[float]:
        """What measured steps took more than the median plain step, in plain steps, once read.

        Empty if there were few plain steps to compare with, or if they are too short to be timed.
        """
        plain, measured = self._each
        if len(plain) < FEWEST or (typical := median(plain)) < SHORTEST:
            return []
        return [seconds / typical - 1 for seconds in measured]

    def restart(self) -> None:
        """Begin a new mean, with the current interval."""
        self._seconds, self._intervals = [0.0, 0.0], [0, 0]  # plain steps, measured steps
        self._each: tuple[deque[float], ...] = (deque(maxlen=_MOST), deque(maxlen=_MOST))

    def _add(self, seconds: float, measured: bool) -> None:
        self._seconds[measured] += seconds
        self._intervals[measured] += 1
        self._each[measured].append(seconds)


class _Interval(NamedTuple):
    """The time from one step to the next, in the queue of a device."""

    start: torch.Event
    end: torch.Event
    measured: bool


class DeviceStepTimer(StepTimer):
    """A `StepTimer` by the clock of an accelerator.

    The host only fills the queue of an accelerator, and waits for it where it reads something, as
    at a log step. By the host's clock all the work that was queued by then would count as the time
    of the step after. So each step puts an event into the queue, which the device stamps when it
    comes to it. Stamps are read where the mean is asked for, and only those that are there: torch
    waits for all of the queue to read a stamp of MPS. The mean is that of the last 64 intervals.

    Without events that have a time there is no mean, and a warning says so.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device
        self._previous: torch.Event | None = None
        self._unread: deque[_Interval] = deque(maxlen=_MOST)
        self._has_events = True
        self._works = False
        """Whether an interval has been timed."""
        self._warn = WarnOnce()

    def step(self, *, measured: bool = False) -> None:
        """Record that an optimizer step is taken now."""
        if not self._has_events:
            return
        try:
            event = torch.Event(self.device, enable_timing=True)
            event.record(current_stream(self.device))
            if self._previous is not None:
                self._unread.append(_Interval(self._previous, event, measured))
            self._previous = event
        except RuntimeError as error:
            if self._works:  # an earlier error of the device shows here first
                raise
            self._give_up(error)

    def interrupt(self) -> None:
        """Leave the current step out, as something else happens in it."""
        self._previous = None

    @property
    def mean(self) -> float:
        """Seconds a step since the last `restart`; NaN if no step was timed."""
        while self._unread:
            start, end, measured = self._unread[0]
            try:
                if not end.query():
                    break
                seconds = start.elapsed_time(end) / 1000
            except RuntimeError as error:
                if not self._works:
                    self._give_up(error)
                    break
                seconds = None  # two streams, or stamps that are not in order (MPS)
            self._unread.popleft()
            if seconds is not None:
                self._works = True
                self._add(seconds, measured)
        return super().mean

    def _give_up(self, error: RuntimeError) -> None:
        self._has_events = False
        self._unread.clear()
        self.restart()
        self._warn(
            f"The seconds of a step are not known on this device ({self.device.type}), as torch has"
            f" no events there that keep the time: {error}. The noise scale is measured without."
            " `noisescale profile` times steps."
        )


def step_timer(device: torch.device) -> StepTimer:
    """Return a timer of the steps on a device."""
    return StepTimer() if device.type == "cpu" else DeviceStepTimer(device)
