# SPDX-License-Identifier: Apache-2.0
"""Models of the step time: the fitted model, and the protocol for other models."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from noisescale.bounded import Bounded
from noisescale.step_time.device_times import StepTiming
from noisescale.step_time.pollux import Array, Plans, relative_seconds

SLACK = 1.01
"""The ratio by which a device batch may miss a timed one: a mean is not a whole number."""


@dataclass(frozen=True)
class FittedStepTime:
    """A step-time model fitted to timings; made by `fit_step_time`."""

    timings: tuple[StepTiming, ...]
    """All timings of the device, also those that agree with the fit and did not take part."""
    reference: float
    """The device batch size that the parameters refer to: the largest one of the fit."""
    fit: Array
    """The unit in seconds, and the parameters in the order of `NAMES`."""
    refits: Array
    """The same for each refit to noisier timings, a column each."""
    scatter: Array
    """A factor for each refit: by how much a single time differs from the model."""
    assumptions: tuple[str, ...]

    @property
    def max_device_batch_size(self) -> float:
        """The largest device batch that was timed, in examples."""
        return max(timing.device_batch_size for timing in self.timings)

    @property
    def parameters(self) -> dict[str, float]:
        """The constants in seconds (p: none), by their names in the formula of `fit_step_time`.

        `a` and `c` hold within a node, `a_across` and `c_across` across nodes.
        """
        unit, fixed, *times, overlap, update = self.fit.tolist()
        between = zip(("a", "a_across", "c", "c_across"), times, strict=True)
        return {
            "a_c": unit * fixed,
            "b_c": unit * (1 - fixed) / self.reference,
            **{name: unit * time for name, time in between},
            "p": overlap,
            "u": unit * update,
        }

    def seconds(
        self, device_batch_size: float, accumulation: int = 1, devices: int = 1, nodes: int = 1
    ) -> Bounded:
        """Return the seconds an optimizer step takes, with bounds for 95 % of timings.

        The bounds include the uncertainty of the fit, the scatter of the timings, and the ranges of
        the assumptions.
        """
        size = device_batch_size / self.reference
        plan = Plans(size, accumulation, devices, nodes > 1)
        unit, *parameters = self.fit
        value = float(unit * relative_seconds(parameters, plan))
        unit, *parameters = self.refits
        drawn = unit * relative_seconds(parameters, plan) * self.scatter
        low, high = np.quantile(drawn, (0.025, 0.975))
        return Bounded(value, min(float(low), value), max(float(high), value))

    def is_timed(
        self, device_batch_size: float, accumulation: int = 1, devices: int = 1, nodes: int = 1
    ) -> bool:
        """Return whether the configuration was timed, or lies between timed configurations.

        1. The number of devices was timed, or lies between numbers that were. Devices in one node
           are compared with timings in one node, devices on several nodes with those across nodes.
        2. The device batch was timed, or lies between two timed ones at most a factor of 4 apart.
        3. The number of micro-batches was timed, or several were: micro-batches repeat one another.
        """
        alike = [timing for timing in self.timings if (timing.nodes > 1) == (nodes > 1)]
        sizes = [timing.device_batch_size for timing in self.timings]
        counts = {timing.accumulation for timing in self.timings}
        return (
            bool(alike)
            and _is_within(devices, [timing.devices for timing in alike])
            and _is_within(nodes, [timing.nodes for timing in alike])
            and _is_within(device_batch_size, sizes)
            and min(b for b in sizes if b * SLACK >= device_batch_size)
            <= 4 * SLACK * max(b for b in sizes if b <= device_batch_size * SLACK)
            and (accumulation in counts or len(counts) > 1)
        )

    def scale(self, factor: float) -> FittedStepTime:
        """Return the model of a device on which every step takes `factor` times as long."""
        unit = (
            np.eye(len(self.fit))[0] * (factor - 1) + 1
        )  # of the parameters, unit alone is a time
        return replace(
            self,
            timings=tuple(replace(t, seconds=factor * t.seconds) for t in self.timings),
            fit=self.fit * unit,
            refits=self.refits * unit[:, None],
        )


def _is_within(value: float, timed: Sequence[float]) -> bool:
    return min(timed) / SLACK <= value <= max(timed) * SLACK
