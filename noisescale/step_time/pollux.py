# SPDX-License-Identifier: Apache-2.0
"""Pollux's model of the step time, and the values assumed for parameters that are not known.

References:
    Qiao et al. 2021, "Pollux", OSDI, section 3.2.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from noisescale.step_time.device_times import StepTiming

Array = NDArray[np.float64]

TELLABLE = 0.03
"""A parameter is fitted where a change by 1 moves the logarithms of the timings by so much."""


class Assumed(NamedTuple):
    """A parameter's assumed value, with its range, for when the timings do not determine it."""

    least: float
    most: float
    middle: float
    low: float
    high: float


# Times are in units of a micro-batch's gradient at the largest device batch timed.
PARAMETERS = {
    "fixed": Assumed(0.0, 1.0, 0.5, 0.0, 1.0),
    "sync": Assumed(0.0, math.inf, 0.25, 0.0, 1.0),
    "sync_across": Assumed(0.0, math.inf, 0.5, 0.0, 4.0),
    # Of what two devices take, with each more. A ring takes 2(W - 1)/W: from 2 to 4, 1/4 each.
    "growth": Assumed(0.0, math.inf, 1 / 16, 0.0, 1 / 4),
    "growth_across": Assumed(0.0, math.inf, 1 / 16, 0.0, 1 / 4),
    "overlap": Assumed(1.0, 10.0, 1.0, 1.0, 10.0),
    "update": Assumed(0.0, math.inf, 0.0, 0.0, 0.25),
}
NAMES = tuple(PARAMETERS)
GROWTHS = {"growth": "sync", "growth_across": "sync_across"}


class Plans(NamedTuple):
    """Configurations, each field a number or one for each of them."""

    size: Any
    """The size of the device batch, in units of the largest timed one."""
    accumulation: Any
    devices: Any
    across: Any
    """Whether there are several nodes."""

    @classmethod
    def of(cls, timings: Sequence[StepTiming], reference: float) -> Plans:
        """Return the timed configurations."""
        columns = [
            (t.device_batch_size / reference, t.accumulation, t.devices, t.nodes > 1)
            for t in timings
        ]
        size, accumulation, devices, across = np.array(columns, dtype=np.float64).T
        return cls(size, accumulation, devices, across > 0)


def relative_seconds(parameters: Any, plans: Plans) -> Any:
    """Return the model's seconds, in units of a gradient at the largest device batch timed.

        T_grad  = a_c + b_c·b
        T_sync  = a + c·max(W - 2, 0)         0 for one device; others across nodes
        T_step  = (T_grad^p + T_sync^p)^(1/p)
        seconds = (K - 1)·T_grad + T_step + u

    Args:
        parameters: In the order of `NAMES`, each a number or an array.
        plans: Numbers, or arrays that go with the parameters.
    """
    fixed, sync, sync_across, growth, growth_across, overlap, update = parameters
    size, accumulation, devices, across = plans
    gradient = fixed + (1 - fixed) * size
    farther = np.maximum(devices - 2, 0)
    between = np.where(across, sync_across + growth_across * farther, sync + growth * farther)
    between = np.where(devices > 1, between, 0.0)
    # (x^p + y^p)^(1/p), the larger one taken out so that no power overflows.
    larger, smaller = np.maximum(gradient, between), np.minimum(gradient, between)
    last = larger * (1 + (smaller / larger) ** overlap) ** (1 / overlap)
    return (accumulation - 1) * gradient + last + update


def identifiable_parameters(plans: Plans) -> tuple[list[int], list[int]]:
    """Return the parameters that the timings determine, and the parameters that they only hint at.

    A parameter is determined if changing it moves the timings in a way that no change of the
    parameters before it can: its derivative is then not a combination of theirs. A time that moves
    the timings in a way that other parameters can as well is only hinted at: some values of it are
    impossible.

    Timings of two devices and more, but not of one, do not tell "sync" from "growth". Then "growth"
    is fitted: in proportion to an assumed "sync" it could hardly grow.
    """
    parameters = np.array([0.5, 0.25, 0.25, 0.02, 0.02, 1.0, 0.1])  # none at a bound that matters
    at = np.log(relative_seconds(parameters, plans))
    known, told, hinted = [np.ones_like(at)], [], []
    for name in sorted(NAMES, key=lambda name: name not in GROWTHS):
        index = NAMES.index(name)
        step = 1e-6 * (np.arange(len(NAMES)) == index)
        derivative = (np.log(relative_seconds(parameters + step, plans)) - at) / 1e-6
        basis = np.stack(known, axis=1)
        left = derivative - basis @ np.linalg.lstsq(basis, derivative, rcond=None)[0]
        if np.linalg.norm(left) > TELLABLE:
            known.append(derivative)
            told.append(index)
        elif name in ("sync", "sync_across", "update") and np.any(derivative > TELLABLE):
            hinted.append(index)
    return told, hinted
