# SPDX-License-Identifier: Apache-2.0
"""What one batch size on so many devices takes: a plan for the devices, its hours, its price."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass

import numpy as np

from noisescale.bounded import UNKNOWN, Bounded
from noisescale.history.run_law import RunLaw
from noisescale.history.segments import Array
from noisescale.plan import Plan, mean_plan
from noisescale.step_time import StepTimeModel, StepTiming

FAR = 8.0
"""A batch size more than so many times the run's largest, or below its smallest, is far away."""

LEAST_SHARE = 0.05
"""A configuration is one that a run was timed at if so much of its steps were taken with it."""


@dataclass(frozen=True)
class PredictedRow:
    """What the run's result costs at one batch size on one number of devices."""

    batch_size: float
    """Global, in examples."""
    plan: Plan
    """How the devices share it, in means."""
    steps: Bounded
    examples: Bounded
    seconds_per_step: Bounded
    hours: Bounded
    device_hours: Bounded
    cost: Bounded
    """Device-hours at their price."""
    cost_with_waiting: Bounded
    """`cost`, and the hours at what an hour is worth."""
    extrapolated: tuple[str, ...]
    """What of this row lies outside of what was measured: "batch size", "step time"."""

    @property
    def devices(self) -> int:
        """That train together."""
        return self.plan.devices

    @property
    def device_batch_size(self) -> float:
        """Examples of one device in one micro-batch."""
        return self.plan.device_batch_size

    @property
    def accumulation(self) -> int:
        """Micro-batches a step."""
        return self.plan.accumulation


@dataclass(frozen=True)
class Hardware:
    """What is known of the devices, and what they and waiting for them cost, see `predict`."""

    step_time: StepTimeModel | None
    max_device_batch_size: float
    devices_per_node: float = math.inf
    price_per_device_hour: float | None = None
    hour_worth: float | None = None

    def row(self, law: RunLaw, batch_size: float, devices: int, far: bool) -> PredictedRow:
        """Cost a batch size: device batches as large as fit, then accumulation."""
        plan = mean_plan(
            batch_size,
            devices=devices,
            max_device_batch_size=self.max_device_batch_size,
            nodes=nodes_of(devices, self.devices_per_node),
        )
        steps = law.steps(batch_size)
        seconds, extrapolated = UNKNOWN, ["batch size"] if far else []
        if self.step_time is not None:
            seconds = self.step_time.seconds(*astuple(plan))
            if self.step_time.extrapolates(*astuple(plan)):
                extrapolated.append("step time")
        hours = steps * seconds * (1 / 3600)
        device_hours = hours * devices
        price, worth = self.price_per_device_hour, self.hour_worth
        return PredictedRow(
            batch_size=batch_size,
            plan=plan,
            steps=steps,
            examples=steps * batch_size,
            seconds_per_step=seconds,
            hours=hours,
            device_hours=device_hours,
            cost=UNKNOWN if price is None else device_hours * price,
            cost_with_waiting=UNKNOWN
            if price is None or worth is None
            else hours * (devices * price + worth),
            extrapolated=tuple(extrapolated),
        )


def recommended_row(
    rows: Sequence[PredictedRow], law: RunLaw, max_device_batch_size: float
) -> PredictedRow:
    """Return the row with the least cost, waiting included; without prices the balanced one.

    A batch is balanced where a step is worth B_crit examples, McCandlish's default exchange rate:
    steps + examples/B_crit is least at B_crit. It goes to as many devices as it fills, so that
    none has to accumulate and none runs half empty.
    """
    known = law.known
    rate = known.critical_batch_size

    def cost_with_waiting(row: PredictedRow) -> float:
        a_second = row.cost_with_waiting.high / row.hours.high
        return known.steps(row.batch_size) * row.seconds_per_step.value * a_second

    if any(row.cost_with_waiting.known for row in rows):
        return min(rows, key=cost_with_waiting)

    def cost(row: PredictedRow) -> float:
        return known.steps(row.batch_size) * (1 + row.batch_size / rate)

    size = min(rows, key=cost).batch_size
    of_it = [row for row in rows if row.batch_size == size]
    filled = [row for row in of_it if row.devices * max_device_batch_size <= size]
    return max(filled, key=lambda row: row.devices) if filled else of_it[0]


def fastest_row(rows: Sequence[PredictedRow], law: RunLaw) -> PredictedRow:
    """Return the row with the fewest hours; without seconds with the fewest steps·examples."""
    known = law.known

    def hours(row: PredictedRow) -> float:
        seconds = row.seconds_per_step.value
        steps = known.steps(row.batch_size)
        return steps * (steps * row.batch_size if math.isnan(seconds) else seconds)

    return min(rows, key=hours)


def nodes_of(devices: int, devices_per_node: float) -> int:
    """Return how many nodes so many devices are on."""
    return math.ceil(devices / devices_per_node) if devices > devices_per_node else 1


def timings_of(
    history: Mapping[str, Array], devices_per_node: float = math.inf
) -> list[StepTiming]:
    """Return the configurations that a run was timed at, with their median seconds a step.

    Configurations of few steps (the short last batch of an epoch) are left out. Where the
    number of devices was not recorded it is taken to be one.
    """
    steps = np.diff(history["step"], prepend=0)
    devices = _recorded(history, "devices", 1.0)
    accumulation = _recorded(history, "accumulation", 1.0)
    # The mean of each segment, as the seconds are: a row's own step may be an epoch's short last.
    device_batch = np.diff(history["examples"], prepend=0) / steps / (devices * accumulation)
    seconds = history["seconds_per_step"]
    timed = (seconds > 0) & np.isfinite(seconds) & (device_batch > 0) & np.isfinite(device_batch)
    # Batches of nearly one size, counted in tokens say, are one configuration: eighths of octaves.
    octaves = np.round(8 * np.log2(device_batch[timed]))
    plans = np.stack([octaves, accumulation[timed], devices[timed]], axis=1)
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


def devices_of(history: Mapping[str, Array]) -> int | None:
    """Number of devices at the end of the run; None where it was not recorded."""
    known = history.get("devices", np.array([]))
    known = known[np.isfinite(known)]
    return round(float(known[-1])) if known.size else None


def _recorded(history: Mapping[str, Array], column: str, otherwise: float) -> Array:
    values = history.get(column, np.full_like(history["step"], math.nan))
    return np.where(np.isfinite(values), values, otherwise)
