# SPDX-License-Identifier: Apache-2.0
"""What a run says about its hardware: devices, their batches, and the seconds of its steps."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from noisescale.history.segments import Array, Segments
from noisescale.step_time import StepTiming

ONE_SIZE = 1.25
"""The largest device batch over the smallest, of steps whose times are taken together."""

LEAST_SHARE = 0.05
"""A configuration is one that a run was timed at if so much of its steps were taken with it."""


def nodes_of(devices: int, devices_per_node: float) -> int:
    """Return the number of nodes that the devices are on."""
    return math.ceil(devices / devices_per_node) if devices > devices_per_node else 1


def timings_of(
    history: Mapping[str, Array], devices_per_node: float = math.inf
) -> list[StepTiming]:
    """Return the configurations that a run was timed at, with their median seconds a step.

    Configurations of few steps (the short last batch of an epoch) are left out. If the number of
    devices was not recorded, one device is assumed.
    """
    steps = np.diff(history["step"], prepend=0)
    devices = _column_or(history, "devices", 1.0)
    accumulation = _column_or(history, "accumulation", 1.0)
    # The mean of each segment, as the seconds are: a row's own step may be an epoch's short last.
    device_batch = np.diff(history["examples"], prepend=0) / steps / (devices * accumulation)
    seconds = history["seconds_per_step"]
    timed = (seconds > 0) & np.isfinite(seconds) & (device_batch > 0) & np.isfinite(device_batch)
    plans = np.stack([device_batch, accumulation, devices], axis=1)[timed]
    for those in ((plans[:, 1:] == plan).all(axis=1) for plan in np.unique(plans[:, 1:], axis=0)):
        plans[those, 0] = _of_one_size(plans[those, 0])
    timings = []
    found, which = np.unique(plans, axis=0, return_inverse=True)
    for k, plan in enumerate(found.tolist()):
        those = which.ravel() == k
        if steps[timed][those].sum() >= LEAST_SHARE * steps[timed].sum():
            size, median = (float(np.median(x[timed][those])) for x in (device_batch, seconds))
            count = round(plan[2])
            nodes = nodes_of(count, devices_per_node)
            timings.append(StepTiming(size, round(plan[1]), count, nodes, median))
    return timings


def _of_one_size(sizes: Array) -> Array:
    """Return the smallest of each group of sizes that are nearly one.

    A batch counted in tokens changes from step to step, and the mean of some steps by the short
    last one of an epoch: what times differ by there is noise.
    """
    found, which = np.unique(sizes, return_inverse=True)
    least = [0.0]
    for size in found.tolist():
        if size > ONE_SIZE * least[-1]:
            least.append(size)
    starts = np.array(least[1:])
    return starts[np.searchsorted(starts, found, side="right") - 1][which]


def largest_device_batch(history: Mapping[str, Array], run: Segments) -> float:
    """Return the most examples that a device had at once, in the means of a run's segments."""
    shares = _column_or(history, "devices", 1.0) * _column_or(history, "accumulation", 1.0)
    return float((run.batch_size / shares).max())


def devices_of(history: Mapping[str, Array]) -> int | None:
    """Return the number of devices at the end of the run; None where it was not recorded."""
    known = history.get("devices", np.array([]))
    known = known[np.isfinite(known)]
    return round(float(known[-1])) if known.size else None


def _column_or(history: Mapping[str, Array], column: str, otherwise: float) -> Array:
    values = history.get(column, np.full_like(history["step"], math.nan))
    return np.where(np.isfinite(values), values, otherwise)
