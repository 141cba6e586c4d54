# SPDX-License-Identifier: Apache-2.0
"""The cost of one batch size on some devices: the plan, its hours and its price."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import Literal

from noisescale.bounded import UNKNOWN, Bounded
from noisescale.history.run_law import RunLaw
from noisescale.plan import Plan, mean_plan
from noisescale.prediction.run_hardware import OwnSteps, nodes_of
from noisescale.step_time import FittedStepTime, LoaderTiming

Basis = Literal["timed", "assumed"]

FAR = 8.0
"""A batch size this many times above the run's largest, or below its smallest, is far off."""


@dataclass(frozen=True)
class PredictedRow:
    """What the run's result costs at one batch size on one number of devices."""

    batch_size: float
    """Global, in examples."""
    plan: Plan
    """How the devices share the batch, averaged over steps."""
    steps: Bounded
    examples: Bounded
    seconds_per_step: Bounded
    hours: Bounded
    device_hours: Bounded
    cost: Bounded
    """The price of the device-hours."""
    cost_with_waiting: Bounded
    """`cost` plus the hours times what an hour is worth."""
    extrapolated: tuple[str, ...]
    """What of this row is extrapolated: "batch size", if it is far from the run's own."""
    basis: Basis | None = None
    """Whether the seconds of a step were timed or are assumed; None if they are not known."""

    @property
    def devices(self) -> int:
        """Devices that train together."""
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
    """What is known about the devices, their price, and the cost of waiting; see `predict`."""

    step_time: FittedStepTime | None
    max_device_batch_size: float
    """The most examples that a device was seen to take, or is said to take."""
    devices_per_node: float = math.inf
    price_per_device_hour: float | None = None
    hour_worth: float | None = None
    own: OwnSteps | None = None
    """The run's own steps; None if there is no plan of more than half of them."""
    largest_fitting: Bounded | None = None
    """The largest device batch that fits in memory, see `largest_fitting`; None if not known."""
    loader: LoaderTiming | None = None
    """The time of the data loader alone, if a profile of this run has it."""
    doubts: tuple[str, ...] = ()
    """Reasons not to trust the step times, in whole sentences."""

    def row(self, law: RunLaw, batch_size: float, devices: int, far: bool) -> PredictedRow:
        """Return the row of a batch size: device batches as large as fit, then accumulation.

        At the run's own batch size on its own devices it is the run's own plan, and what its steps
        took is known.
        """
        plan = self._plan(batch_size, devices)
        own = self.own if self.own and plan is self.own.plan else None
        steps, seconds = law.steps(batch_size), UNKNOWN
        examples = steps * batch_size
        if own and own.steps and own.examples:
            steps, examples = _exactly(own.steps), _exactly(own.examples)
        basis: Basis | None = None
        if own and own.seconds:
            seconds, basis = _exactly(own.seconds), "timed"
        elif self.step_time is not None:
            seconds = self.step_time.seconds(*astuple(plan))
            basis = "timed" if self.step_time.is_timed(*astuple(plan)) else "assumed"
        hours = steps * seconds * (1 / 3600)
        device_hours = hours * devices
        price, worth = self.price_per_device_hour, self.hour_worth
        return PredictedRow(
            batch_size=batch_size,
            plan=plan,
            steps=steps,
            examples=examples,
            seconds_per_step=seconds,
            hours=hours,
            device_hours=device_hours,
            cost=UNKNOWN if price is None else device_hours * price,
            cost_with_waiting=UNKNOWN
            if price is None or worth is None
            else hours * (devices * price + worth),
            extrapolated=("batch size",) if far else (),
            basis=basis,
        )

    def timed_batch_sizes(self, devices: int) -> set[float]:
        """Return the batch sizes that were timed on a number of devices."""
        model = self.step_time
        timings = model.timings if isinstance(model, FittedStepTime) else ()
        return {each.plan.batch_size for each in timings if each.devices == devices}

    def _plan(self, batch_size: float, devices: int) -> Plan:
        own = self.own and self.own.plan
        if own and own.devices == devices and math.isclose(own.batch_size, batch_size):
            return own
        return mean_plan(
            batch_size,
            devices=devices,
            max_device_batch_size=self.max_device_batch_size,
            nodes=nodes_of(devices, self.devices_per_node),
        )


def _exactly(value: float) -> Bounded:
    return Bounded(value, value, value)


def candidate_rows(
    rows: Sequence[PredictedRow], law: RunLaw, own_batch_size: float | None
) -> Sequence[PredictedRow]:
    """Return the rows that may be recommended.

    If the critical batch size is not resolved, rows below the run's own batch size are left out: a
    smaller batch size would be best only if B_crit were at its lower bound.
    """
    if own_batch_size is None or math.isfinite(law.critical_batch_size.value):
        return rows
    return [row for row in rows if row.batch_size >= own_batch_size] or rows


def recommended_row(
    rows: Sequence[PredictedRow], law: RunLaw, own_devices: int, largest: float
) -> PredictedRow:
    """Return the cheapest row if prices are given, else one on the run's own devices.

    If several batch sizes were timed there, it is the fastest of these. Otherwise it is the largest
    batch size up to `largest`. If no row has the run's own devices, return the balanced row.
    """
    if any(row.cost_with_waiting.known for row in rows):
        return _cheapest(rows, law)
    own = [row for row in rows if row.devices == own_devices]
    if not own:
        return best_row_on(own_devices, rows, law) or balanced_row(rows, law)
    timed = [row for row in own if row.basis == "timed"]
    if len(timed) > 1:
        return fastest_row(timed, law)
    up_to = [row for row in own if row.batch_size <= largest] or own[:1]
    return max(up_to, key=lambda row: row.batch_size)


def best_row_on(devices: int, rows: Sequence[PredictedRow], law: RunLaw) -> PredictedRow | None:
    """Return the fastest row on `devices` devices or fewer, if there is one.

    If all devices are used, the fastest row is also the cheapest. If no seconds are known, return
    the balanced row.
    """
    own = [row for row in rows if row.devices <= devices]
    return fastest_row(own, law) if own else None


def row_on_more_devices(
    rows: Sequence[PredictedRow], law: RunLaw, own_devices: int, max_device_batch_size: float
) -> PredictedRow | None:
    """Return the row with the most devices that pay; None if more devices do not pay.

    More devices pay as long as one per cent more device-hours saves at least one per cent of the
    hours, which is McCandlish's criterion for steps and examples. With prices, the row that costs
    least is returned.
    """
    if any(row.cost_with_waiting.known for row in rows):
        best = _cheapest(rows, law)
    elif any(row.hours.known for row in rows):
        best = balanced_row(rows, law)
    else:
        best = _balanced_row_on_full_devices(rows, law, max_device_batch_size)
    return best if best.devices > own_devices else None


def balanced_row(rows: Sequence[PredictedRow], law: RunLaw) -> PredictedRow:
    """Return the row with the least product of hours and device-hours.

    Without seconds the product is steps times examples, which is least at B_crit.
    """
    known = law.best_known

    def product(row: PredictedRow) -> float:
        seconds, steps = row.seconds_per_step.value, known.steps(row.batch_size)
        if math.isnan(seconds):
            return steps * steps * row.batch_size
        return (steps * seconds) ** 2 * row.devices

    return min(rows, key=product)


def _cheapest(rows: Sequence[PredictedRow], law: RunLaw) -> PredictedRow:
    known = law.best_known

    def cost_with_waiting(row: PredictedRow) -> float:
        a_second = row.cost_with_waiting.high / row.hours.high
        return known.steps(row.batch_size) * row.seconds_per_step.value * a_second

    return min(rows, key=cost_with_waiting)


def _balanced_row_on_full_devices(
    rows: Sequence[PredictedRow], law: RunLaw, max_device_batch_size: float
) -> PredictedRow:
    """Return the row of the balanced batch size, on as many devices as it fills."""
    size = balanced_row(rows, law).batch_size
    of_it = [row for row in rows if row.batch_size == size]
    filled = [row for row in of_it if row.devices * max_device_batch_size <= size]
    return max(filled, key=lambda row: row.devices) if filled else of_it[0]


def fastest_row(rows: Sequence[PredictedRow], law: RunLaw) -> PredictedRow:
    """Return the row with the fewest hours; without seconds, with the least steps·examples."""
    known = law.best_known

    def hours(row: PredictedRow) -> float:
        seconds = row.seconds_per_step.value
        steps = known.steps(row.batch_size)
        return steps * (steps * row.batch_size if math.isnan(seconds) else seconds)

    return min(rows, key=hours)
