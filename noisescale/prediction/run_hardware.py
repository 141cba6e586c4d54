# SPDX-License-Identifier: Apache-2.0
"""What a run says about its hardware: devices, their batches, and the seconds of its steps."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, replace
from typing import NamedTuple

import numpy as np

from noisescale.bounded import Bounded
from noisescale.history.segments import Array, Segments
from noisescale.plan import Plan
from noisescale.printable import printable
from noisescale.step_time import FILE, DeviceTimes, FittedStepTime, StepTiming, fit_step_time

ONE_SIZE = 1.25
"""The largest device batch over the smallest, of steps whose times are taken together."""

LEAST_SHARE = 0.05
"""A configuration is one that a run was timed at if so much of its steps were taken with it."""

ALIKE = 1.5
"""Steps of a run and of a profile that differ by a larger factor are doubtful."""

_REMEDY = (
    "Time steps on the run's device, by `noisescale profile` with `--run`. To predict times on the"
    " other device, give the file as `step_times`."
)

APART = 4.0
"""Steps that differ by a larger factor are of different devices, or of different models."""

USABLE = 0.9
"""The share of a device's memory that tensors can take: the rest is torch's, or in pieces."""


def nodes_of(devices: int, devices_per_node: float) -> int:
    """Return the number of nodes that the devices are on."""
    return math.ceil(devices / devices_per_node) if devices > devices_per_node else 1


class TimedPlan(NamedTuple):
    """A configuration that a run was timed at."""

    timing: StepTiming
    """A configuration, and the median of the seconds of a step."""
    steps: float
    mean: float
    """Mean seconds a step. Slow steps count, such as those that write a log."""


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
    other steps. Then it is the batch size of its row, if several rows have that batch size. If the
    row is of that short batch, its fewer micro-batches are not those of the other steps: NaN.

    Args:
        history: The run.
        mean: The mean global batch size of each segment.
    """
    logged = _column_or(history, "batch_size", math.nan)
    _, which, rows = np.unique(logged, return_inverse=True, return_counts=True)
    again = (rows > 1)[which.ravel()] | (len(logged) == 1)
    short = again & (mean <= logged) & (logged <= ONE_SIZE * mean)
    accumulation = _column_or(history, "accumulation", 1.0)
    rest = (logged * ONE_SIZE < mean) & (accumulation < accumulation.max())
    shares = _column_or(history, "devices", 1.0) * np.where(rest, math.nan, accumulation)
    return np.where(short | (mean > logged), usual_batch_sizes(history), mean) / shares


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
    return float(np.nanmax(_device_batches(history, run.batch_size)))


def usual_batch_sizes(history: Mapping[str, Array]) -> Array:
    """Return the batch size of the steps of each row, where an epoch may end in a short batch.

    The batch size of a row is that of its last measured step. If the mean of its steps is larger,
    that step was short. Then it is the batch size of the other steps, or the mean if that of the
    others is no whole number.

    Examples:
        >>> usual_batch_sizes({"step": np.array([2.0, 4.0]), "examples": np.array([16.0, 30.0]),
        ...                    "batch_size": np.array([8.0, 6.0])})
        array([8., 8.])
    """
    steps, examples = (np.diff(history[name], prepend=0) for name in ("step", "examples"))
    logged, mean = history["batch_size"], examples / steps
    others = (examples - logged) / np.maximum(steps - 1, 1)
    whole = np.round(others)
    usual = np.where(np.isclose(others, whole, rtol=1e-6, atol=0), whole, mean)
    return np.where(mean > (1 + 1e-6) * logged, usual, logged)


def own_batch_size(history: Mapping[str, Array], run: Segments) -> float | None:
    """Return the batch size of more than half of the steps, if there is one."""
    sizes, which = np.unique(usual_batch_sizes(history), return_inverse=True)
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
    ratio = usual_batch_sizes(history) / plan.batch_size
    other = (ratio > ONE_SIZE) | (ratio * ONE_SIZE < 1)
    other |= _column_or(history, "devices", 1.0) != plan.devices
    steps = float(run.steps.sum())
    if run.steps[other].sum() > LEAST_SHARE * steps:
        return OwnSteps(plan, None, None, seconds)
    return OwnSteps(plan, steps, run.examples, seconds)


def own_plan(
    history: Mapping[str, Array], run: Segments, devices_per_node: float = math.inf
) -> Plan | None:
    """Return how the batch of more than half of a run's steps was made up, if there is one way."""
    size = own_batch_size(history, run)
    if size is None:
        return None
    those = usual_batch_sizes(history) == size
    devices, accumulation = (
        _column_or(history, name, 1.0)[those] for name in ("devices", "accumulation")
    )
    ways, which = np.unique(np.stack([devices, accumulation], axis=1), axis=0, return_inverse=True)
    steps = np.bincount(which.ravel(), weights=run.steps[those])
    if 2 * steps.max() <= run.steps.sum():
        return None
    count, micro_batches = map(round, ways[int(np.argmax(steps))].tolist())
    nodes = nodes_of(count, devices_per_node)
    return Plan(size / (count * micro_batches), micro_batches, count, nodes)


def memory_in(history: Mapping[str, Array]) -> float | None:
    """Return the bytes of a run's device; None on the CPU, or if they were not recorded."""
    known = history.get("device_memory", np.array([]))
    known = known[np.isfinite(known)]
    return float(known[-1]) if known.size else None


def peaks_in(history: Mapping[str, Array]) -> tuple[tuple[float, float], ...]:
    """Return device batch sizes of a run, and the most bytes that tensors had at once with each.

    The history has the most so far. So the peak of a size is known only if no larger one was
    trained before.
    """
    means = np.diff(history["examples"], prepend=0) / np.diff(history["step"], prepend=0)
    sizes, peaks = _device_batches(history, means), _column_or(history, "peak_memory", math.nan)
    known = np.isfinite(peaks) & np.isfinite(sizes)
    sizes, peaks = _of_one_size(sizes[known]), peaks[known]
    first = sizes >= np.maximum.accumulate(sizes)
    return tuple(
        (float(size), float(peaks[first & (sizes == size)].max()))
        for size in np.unique(sizes[first])
    )


def largest_fitting(
    peaks: Sequence[tuple[float, float]], total: float, too_large: float | None = None
) -> Bounded | None:
    """Return the largest device batch size that fits in memory, as an estimate.

    Parameters, gradients and the optimizer's state take a fixed part of the peak. The rest grows
    with the device batch b:

        peak    = fixed + slope·b
        largest = (0.9·total - fixed)/slope

    With two sizes a line gives both parts. The bounds leave 20 % of the memory and nothing of it
    free. With one size the fixed part lies between nothing and all of the peak, and only a lower
    bound is known, for nothing: 0.9·b·total/peak. No size that did fit is above the bounds.

    Args:
        peaks: Device batch sizes, and the most bytes that tensors had at once with each.
        total: Bytes of the device.
        too_large: A size that did not fit.

    Returns:
        The estimate; its value is NaN if only bounds are known. None if the memory did not grow.

    Examples:
        >>> from noisescale.report.numbers import with_bounds
        >>> print(with_bounds(largest_fitting([(32, 3e9), (64, 5e9)], total=80e9)))
        1,136 (1,008 to 1,264)
        >>> print(with_bounds(largest_fitting([(32, 3e9)], total=80e9)))
        at least 768
    """
    if not peaks:
        return None
    sizes, bytes_ = np.array(sorted(peaks)).T
    fits, most = float(sizes[-1]), too_large or math.inf
    if len(peaks) == 1:
        low = min(max(fits, USABLE * fits * total / float(bytes_[0])), most)
        return Bounded(math.nan, low, most)
    slope, fixed = (float(x) for x in np.polyfit(sizes, bytes_, 1))
    if slope <= 0:
        return None
    low, value, high = (
        min(max(fits, (share * total - fixed) / slope), most) for share in (0.8, USABLE, 1.0)
    )
    return Bounded(value, low, high)


def devices_of(history: Mapping[str, Array]) -> int | None:
    """Return the number of devices at the end of the run; None where it was not recorded."""
    known = history.get("devices", np.array([]))
    known = known[np.isfinite(known)]
    return round(float(known[-1])) if known.size else None


def _column_or(history: Mapping[str, Array], column: str, otherwise: float) -> Array:
    values = history.get(column, np.full_like(history["step"], math.nan))
    return np.where(np.isfinite(values), values, otherwise)


def find_profile(
    history: Mapping[str, Array], plans: Sequence[TimedPlan]
) -> tuple[DeviceTimes | None, tuple[str, ...]]:
    """Return what `profile` left in a run's folder, and doubts about it in whole sentences.

    Step times of another device than the run's are left out. They would be scaled to the run's, but
    another device has another largest batch, and other batch sizes are efficient on it.

    Args:
        history: The run, with the folder that it was read from.
        plans: The configurations that it was timed at.
    """
    source = getattr(history, "source", None)
    file = source and (source if source.is_dir() else source.parent) / FILE
    if not file or not file.is_file():
        return None, ()
    try:
        found = DeviceTimes.read(file)
    except (ValueError, OSError) as error:
        return None, (f"The step times in the run's folder are left out. {error}",)
    own, other = memory_in(history), found.memory
    if own is not None and not (other and own / 1.1 < other < 1.1 * own):
        memory = "without a memory of its own" if other is None else f"with {_gigabytes(other)}"
        return None, (
            f"Step times of another device are left out: {printable(file)} is of"
            f" {printable(found.device)}, {memory}, and the run's device has"
            f" {_gigabytes(own)}. {_REMEDY}",
        )
    factor = _factor(plans, found.timings)
    if max(factor, 1 / factor) <= ALIKE:
        return found, ()
    took = (
        f"a step of this run took {factor:.2g} times as long as a step like it in {printable(file)}"
    )
    if max(factor, 1 / factor) <= APART:
        return found, (
            f"Step times are doubtful: {took}. Another device may have been timed, or a busy one."
            " Times at other batch sizes are scaled by this factor. Time them again on the run's"
            " device, by `noisescale profile` with `--run`.",
        )
    return None, (
        f"Step times of another device, or of another model, are left out: {took}. {_REMEDY}",
    )


def _gigabytes(memory: float) -> str:
    return f"{memory / 1e9:.3g} GB"


def _factor(plans: Sequence[TimedPlan], profiled: tuple[StepTiming, ...]) -> float:
    """Return how many times as long the run's steps took as the same steps of a profile; else 1."""
    known = {(timing.devices, timing.nodes > 1) for timing in profiled}
    both = [x for x in plans if (x.timing.devices, x.timing.nodes > 1) in known]
    model = step_time_of((), profiled)
    return _seconds_of(both) / _seconds_of(both, model) if both and model else 1.0


@functools.lru_cache(maxsize=64)  # pages and reports use one run many times
def step_time_of(
    plans: tuple[TimedPlan, ...], profiled: tuple[StepTiming, ...] = ()
) -> FittedStepTime | None:
    """Return step times that reproduce the time of a run's own steps; None if none are known.

    A run is slower than a profile, as it writes logs and waits for its data. So the profile says
    how the time of a step depends on its configuration, and the run says how long it takes:

        seconds = level·model(configuration)
        level   = Σ steps·mean seconds / Σ steps·model(configuration of these steps)

    The medians of the run's own configurations take part in the fit of the model if no profile has
    their number of devices.

    Args:
        plans: The configurations that the run was timed at.
        profiled: Timings of the same device by `profile`.
    """
    known = {(timing.devices, timing.nodes > 1) for timing in profiled}
    own = [plan.timing for plan in plans]
    fitted = [*profiled, *(t for t in own if (t.devices, t.nodes > 1) not in known)]
    if not fitted:
        return None
    model = fit_step_time(fitted)
    if not plans:
        return model
    model = model.scale(_seconds_of(plans) / _seconds_of(plans, model))
    return replace(model, timings=(*model.timings, *(t for t in own if t not in fitted)))


def _seconds_of(plans: Sequence[TimedPlan], model: FittedStepTime | None = None) -> float:
    """Return the seconds that the timed steps of a run took, or take by a model."""
    if model is None:
        return sum(plan.steps * plan.mean for plan in plans)
    return sum(plan.steps * model.seconds(*astuple(plan.timing.plan)).value for plan in plans)
