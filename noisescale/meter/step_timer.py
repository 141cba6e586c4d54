# SPDX-License-Identifier: Apache-2.0
"""Seconds a training step takes, with everything that is not training left out."""

from __future__ import annotations

import math
import time


class StepTimer:
    """Mean time from one optimizer step to the next.

    An interval in which something else ran (validation, a checkpoint) is dropped whole. What
    remains is the host's clock: steps are enqueued no faster than the device works them off,
    so the mean over many is the device's, and nothing has to wait for it.
    """

    def __init__(self) -> None:
        self._last: float | None = None
        self._seconds = 0.0
        self._intervals = 0

    def step(self) -> None:
        """An optimizer step is taken now."""
        now = time.perf_counter()
        if self._last is not None:
            self._seconds += now - self._last
            self._intervals += 1
        self._last = now

    def interrupt(self) -> None:
        """Something else than training happens before the next step."""
        self._last = None

    @property
    def mean(self) -> float:
        """Seconds a step since the last `restart`; NaN where none was timed."""
        return self._seconds / self._intervals if self._intervals else math.nan

    def restart(self) -> None:
        """Begin another mean, with the interval under way."""
        self._seconds, self._intervals = 0.0, 0
