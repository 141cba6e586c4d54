# SPDX-License-Identifier: Apache-2.0
"""The steps of a short training that are timed, in blocks."""

from __future__ import annotations

import math
import statistics
import time
from dataclasses import dataclass

import torch

from noisescale.collectors.devices import Memory
from noisescale.step_time import StepTiming

BLOCKS = 5
"""Blocks of steps that are timed separately. The median leaves out hiccups."""


@dataclass(frozen=True)
class TimedFit:
    """A short fit that was timed."""

    timing: StepTiming
    device: str
    """The name of the device, see `device_name`."""
    memory: Memory | None
    """The memory of the device of rank 0; None on the CPU."""


class Blocks:
    """The seconds of a step: the median over blocks of steps, after a warm-up.

    Args:
        steps: Optimizer steps to time.
        warm_up: Optimizer steps before the timed ones.
    """

    def __init__(self, steps: int, warm_up: int) -> None:
        self._bounds = {warm_up + steps * block // BLOCKS for block in range(BLOCKS + 1)}
        self._ends: list[tuple[int, float]] = []
        self.last = warm_up + steps
        """The number of the last step."""

    def note(self, step: int, device: torch.device) -> None:
        """Note that a step has ended. At the end of a block the host waits for the device."""
        if step in self._bounds:
            if device.type != "cpu":
                getattr(torch, device.type).synchronize()
            self._ends.append((step, time.perf_counter()))

    @property
    def seconds(self) -> float:
        """Seconds of a step; NaN if the training ended before the last block did."""
        pairs = zip(self._ends[:-1], self._ends[1:], strict=True)
        means = [(end - start) / (last - first) for (first, start), (last, end) in pairs]
        return statistics.median(means) if len(means) == BLOCKS else math.nan
