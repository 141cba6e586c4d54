# SPDX-License-Identifier: Apache-2.0
"""What a run says about its hardware: devices, their batches, and the seconds of its steps."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np

from noisescale.history.segments import Array, Segments
from noisescale.plan import Plan
from noisescale.step_time import StepTiming

ONE_SIZE = 1.25
"""The largest device batch over the smallest, of steps whose times are taken together."""

LEAST_SHARE = 0.05
"""A configuration is one that a run was timed at if so much of its steps were taken with it."""


def nodes_of(devices: int, devices_per_node: float) -> int:
    """Return the number of nodes that the devices are on."""
    return math.ceil(devices / devices_per_node) if devices > devices_per_node else 1


class TimedPlan(NamedTuple):
    """A configuration that a run was timed at."""

    timing: StepTiming
    """Its seconds are the median of its steps."""
    steps: float
    mean: float
    """Mean seconds a step. Slow steps count, such as those that write a log."""


def timings_of(
    history: Mapping[str, Array], devices_per_node: float = math.inf
) -> list[StepTiming]:
    """Return the configurations that a run was timed at, with their median seconds a step."""
    return [plan.timing for plan in timed_plans(history, devices_per_node)]


def timed_plans(
    history: Mapping[str, Array], devices_per_node: float = math.inf
) -> list[TimedPlan]:
    """Return the configurations that a run was timed at.

    Configurations of few steps (the short last batch of an epoch) are left out. If the number of
    devices was not recorded, one device is assumed.
    """
    steps = np.diff(history["step"], prepend=0)
    devices = _column_or(history, "devices", 1.0)
    accumulation = _column_or(history, "accumulation", 1.0)
    device_batch = _device_batches(history, np.diff(history["examples"], prepend=0) / steps)
    seconds = history["seconds_per_step"]
    timed = (seconds > 0) & np.isfinite(seconds) & (device_batch > 0) & np.isfinite(device_batch)
    plans = np.stack([device_batch, accumulation, devices], axis=1)[timed]
    for those in ((plans[:, 1:] == plan).all(axis=1) for plan in np.unique(plans[:, 1:], axis=0)):
        plans[those, 0] = _of_one_size(plans[those, 0])
    found = []
    unique, which = np.unique(plans, axis=0, return_inverse=True)
    for k, plan in enumerate(unique.tolist()):
        those = which.ravel() == k
        taken, took = steps[timed][those], seconds[timed][those]
        if taken.sum() >= LEAST_SHARE * steps[timed].sum():
            size, median = float(np.median(device_batch[timed][those])), float(np.median(took))
            count = round(plan[2])
            nodes = nodes_of(count, devices_per_node)
            timing = StepTiming(size, round(plan[1]), count, nodes, median)
            found.append(
                TimedPlan(timing, float(taken.sum()), float(np.average(took, weights=taken)))
            )
    return found


def _device_batches(history: Mapping[str, Array], mean: Array) -> Array:
    """Return the examples that a device had at once in the steps of each segment.

    If a segment has the short last batch of an epoch, its mean is less than the batch size of its
    other steps. Then it is the batch size of its row, if several rows have that batch size.

    Args:
        history: The run.
        mean: The mean global batch size of each segment.
    """
    logged = _column_or(history, "batch_size", math.nan)
    _, which, rows = np.unique(logged, return_inverse=True, return_counts=True)
    again = (rows > 1)[which.ravel()] | (len(logged) == 1)
    short = again & (mean <= logged) & (logged <= ONE_SIZE * mean)
    shares = _column_or(history, "devices", 1.0) * _column_or(history, "accumulation", 1.0)
    return np.where(short, logged, mean) / shares


def is_nearly(plan: Plan, other: Plan) -> bool:
    """Return whether two plans differ by no more than a device batch of nearly the same size."""
    ratio = plan.device_batch_size / other.device_batch_size
    alike = (plan.accumulation, plan.devices) == (other.accumulation, other.devices)
    return alike and 1 / ONE_SIZE <= ratio <= ONE_SIZE


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
    """Return the most examples that a device had at once in a run, in steps of a usual size."""
    return float(_device_batches(history, run.batch_size).max())


def own_batch_size(history: Mapping[str, Array], run: Segments) -> float | None:
    """Return the batch size of more than half of the steps, if there is one."""
    sizes, which = np.unique(history["batch_size"], return_inverse=True)
    steps = np.bincount(which.ravel(), weights=run.steps)
    most = int(np.argmax(steps))
    known = 0 < sizes[most] < math.inf and steps[most] > run.steps.sum() / 2
    return float(sizes[most]) if known else None


class OwnSteps(NamedTuple):
    """The steps of a run with its own plan."""

    plan: Plan
    steps: float | None
    """Steps of the whole run; None if it had other batch sizes or devices, too."""
    examples: float | None
    """Examples of the whole run; None like the steps."""
    seconds: float | None
    """Mean seconds of a step; None if they are not known."""


def own_steps_of(
    history: Mapping[str, Array], run: Segments, plans: Iterable[TimedPlan], per_node: float
) -> OwnSteps | None:
    """Return the steps of a run with the plan of more than half of its steps, if there is one.

    Args:
        history: The run.
        run: The same in segments.
        plans: The configurations that it was timed at.
        per_node: Devices in a node.
    """
    plan = own_plan(history, run, per_node)
    if plan is None:
        return None
    seconds = next((x.mean for x in plans if is_nearly(x.timing.plan, plan)), None)
    ratio = run.batch_size / plan.batch_size
    other = (ratio > ONE_SIZE) | (ratio * ONE_SIZE < 1)
    other |= _column_or(history, "devices", 1.0) != plan.devices
    steps, examples = float(run.steps.sum()), float((run.steps * run.batch_size).sum())
    if run.steps[other].sum() > LEAST_SHARE * steps:
        return OwnSteps(plan, None, None, seconds)
    return OwnSteps(plan, steps, examples, seconds)


def own_plan(
    history: Mapping[str, Array], run: Segments, devices_per_node: float = math.inf
) -> Plan | None:
    """Return how the batch of more than half of a run's steps was made up, if there is one way."""
    size = own_batch_size(history, run)
    if size is None:
        return None
    devices, accumulation = (
        _column_or(history, name, 1.0)[history["batch_size"] == size]
        for name in ("devices", "accumulation")
    )
    ways, which = np.unique(np.stack([devices, accumulation], axis=1), axis=0, return_inverse=True)
    steps = np.bincount(which.ravel(), weights=run.steps[history["batch_size"] == size])
    if 2 * steps.max() <= run.steps.sum():
        return None
    count, micro_batches = map(round, ways[int(np.argmax(steps))].tolist())
    nodes = nodes_of(count, devices_per_node)
    return Plan(size / (count * micro_batches), micro_batches, count, nodes)


def devices_of(history: Mapping[str, Array]) -> int | None:
    """Return the number of devices at the end of the run; None where it was not recorded."""
    known = history.get("devices", np.array([]))
    known = known[np.isfinite(known)]
    return round(float(known[-1])) if known.size else None


def _column_or(history: Mapping[str, Array], column: str, otherwise: float) -> Array:
    values = history.get(column, np.full_like(history["step"], math.nan))
    return np.where(np.isfinite(values), values, otherwise)
