# SPDX-License-Identifier: Apache-2.0
"""The cost of one batch size on some devices: the plan, its hours and its price."""

from __future__ import annotations

import math
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

    def is_same_choice(self, other: PredictedRow) -> bool:
        """Return whether both rows have the same batch size on the same number of devices."""
        return self.batch_size == other.batch_size and self.devices == other.devices


@dataclass(frozen=True)
class Hardware:
    """What is known about the devices and their price; see `predict`."""

    step_time: FittedStepTime | None
    max_device_batch_size: float
    """The most examples that a device was seen to take, or is said to take."""
    devices_per_node: float = math.inf
    price_per_device_hour: float | None = None
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
        price = self.price_per_device_hour
        return PredictedRow(
            batch_size=batch_size,
            plan=plan,
            steps=steps,
            examples=examples,
            seconds_per_step=seconds,
            hours=hours,
            device_hours=device_hours,
            cost=UNKNOWN if price is None else device_hours * price,
            extrapolated=("batch size",) if far else (),
            basis=basis,
        )

    def timed_batch_sizes(self, devices: int) -> set[float]:
        """Return the batch sizes that were timed on a number of devices."""
        timings = self.step_time.timings if self.step_time else ()
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
