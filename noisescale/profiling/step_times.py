# SPDX-License-Identifier: Apache-2.0
"""The record of a profile: timings, and the step-time model fitted to them."""

from __future__ import annotations

from dataclasses import dataclass

from noisescale.step_time import FittedStepTime, LoaderTiming, StepTiming

NEARLY_ALL = 0.9
"""A device processes at least this share of its highest number of examples/s at the knee."""


@dataclass(frozen=True)
class StepTimesRecord:
    """The seconds that steps took at several batch sizes on a device."""

    timings: tuple[StepTiming, ...]
    """A timing of each configuration. There is at least one."""
    step_time: FittedStepTime
    """The model for `predict`, fitted to these timings and to earlier ones in the file."""
    stopped: tuple[str, ...] = ()
    """Why no larger device batch sizes were timed, in whole sentences."""
    output: str | None = None
    """The file that has the timings, if they were written."""
    loader: LoaderTiming | None = None
    """The time of the data loader alone; None if its batch did not fit in memory."""
    run: str | None = None
    """The run that was timed, if one was given."""

    @property
    def fastest(self) -> StepTiming:
        """The timing with the most examples per second."""
        return max(self.timings, key=lambda timing: timing.examples_per_second)

    @property
    def knee(self) -> float | None:
        """The smallest device batch size with nearly the highest examples/s.

        None if it is the largest one: larger batches may then bring more.
        """
        fewest = min(timing.accumulation for timing in self.timings)
        speeds = {
            timing.device_batch_size: timing.examples_per_second
            for timing in self.timings
            if timing.accumulation == fewest
        }
        enough = NEARLY_ALL * max(speeds.values())
        knee = min(size for size, speed in speeds.items() if speed >= enough)
        return knee if knee < max(speeds) else None
