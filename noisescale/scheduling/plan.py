# SPDX-License-Identifier: Apache-2.0
"""A wanted global batch size -> device batch x accumulation x devices."""

from __future__ import annotations

import math
from dataclasses import dataclass

from noisescale.scheduling.checks import checked_count, checked_positive


@dataclass(frozen=True)
class Plan:
    """How the global batch of a step is made up.

    Raises:
        ValueError: If a number is not positive, or one that counts is not whole.

    Example:
        >>> plan = Plan(device_batch_size=8, accumulation=4, devices=2)
        >>> plan.batch_size, str(plan)
        (64, '64 = 8 x 4 micro-batches x 2 devices')
    """

    device_batch_size: float
    """Examples of one micro-batch, on one device; not whole where they are counted in means."""
    accumulation: int
    """Micro-batches of each device in a step."""
    devices: int = 1

    def __post_init__(self) -> None:
        """Refuse what no step can have."""
        examples = "Give the examples of one micro-batch, on one device."
        checked_positive("device_batch_size", self.device_batch_size, examples)
        checked_count("accumulation", self.accumulation, "Give the micro-batches of a step.")
        checked_count("devices", self.devices, "Give the ranks that train together.")

    @property
    def batch_size(self) -> float:
        """Examples of all devices in a step."""
        return self.device_batch_size * self.accumulation * self.devices

    def __str__(self) -> str:
        micro_batches = f"{self.accumulation} micro-batch{'es' * (self.accumulation > 1)}"
        devices = f"{self.devices} device{'s' * (self.devices > 1)}"
        return f"{self.batch_size:g} = {self.device_batch_size:g} x {micro_batches} x {devices}"


@dataclass(frozen=True)
class Bounds:
    """What a plan may be.

    Args:
        min_batch_size: Least global batch, in examples.
        max_batch_size: Largest global batch, in examples.
        min_accumulation: Least micro-batches a step, where something is measured by them.
    """

    min_batch_size: float = 0.0
    max_batch_size: float = math.inf
    min_accumulation: int = 1

    def clipped(self, batch_size: float) -> float:
        """Return the batch size within the bounds that is nearest to the wanted one."""
        return min(max(batch_size, self.min_batch_size), self.max_batch_size)


def plan_for(
    wanted: float,
    *,
    devices: int,
    device_batch_size: float | None = None,
    max_device_batch_size: int | None = None,
    examples_per_row: float = 1.0,
    bounds: Bounds | None = None,
) -> Plan:
    """Return the plan whose global batch is nearest to the wanted one, by ratio.

    One of two is given: a device batch that stays, so that micro-batches are counted, or the
    largest one that fits. Then it is as large as that allows, and micro-batches are as few as
    possible and of equal size.

    Args:
        wanted: Global batch, in examples.
        devices: Ranks that train together.
        device_batch_size: Examples of a micro-batch, that stay as they are.
        max_device_batch_size: Largest number of rows of a micro-batch.
        examples_per_row: Where a row of the data is not one example.
        bounds: That the plan keeps to.

    Returns:
        A plan within the bounds. Near either of them it is the nearest inside.

    Raises:
        ValueError: If no plan meets the bounds.

    Example:
        >>> print(plan_for(100, devices=2, device_batch_size=16))
        96 = 16 x 3 micro-batches x 2 devices
        >>> print(plan_for(100, devices=2, max_device_batch_size=32))
        100 = 25 x 2 micro-batches x 2 devices
    """
    bounds = bounds or Bounds()
    wanted = bounds.clipped(wanted)
    if device_batch_size is not None:
        unit, least = device_batch_size * devices, bounds.min_accumulation
        count = _nearest_multiple(wanted, unit, least, bounds)
        plan = None if count is None else Plan(device_batch_size, count, devices)
    else:
        plan = _fewest_micro_batches(
            wanted, devices, max_device_batch_size or 1, examples_per_row, bounds
        )
    if plan is None:
        step = "" if device_batch_size is None else f" of {device_batch_size:g} examples each"
        raise ValueError(
            f"`min_batch_size` and `max_batch_size` must leave room for a plan, got"
            f" {bounds.min_batch_size:g} to {bounds.max_batch_size:g} for {devices}"
            f" device{'s' * (devices > 1)} and at least {bounds.min_accumulation}"
            f" micro-batch{'es' * (bounds.min_accumulation > 1)}{step}."
            " Widen them, or change the batch size of the loader."
        )
    return plan


def _nearest_multiple(wanted: float, unit: float, least: int, bounds: Bounds) -> int | None:
    """How many units are nearest to `wanted`, by ratio, within the bounds."""
    below = max(math.floor(wanted / unit + 1e-9), least)
    candidates = [
        count
        for count in (below, below + 1)
        if bounds.min_batch_size <= count * unit * (1 + 1e-9)
        and count * unit <= bounds.max_batch_size * (1 + 1e-9)
    ]
    return min(candidates, key=lambda n: abs(math.log(n * unit / wanted)), default=None)


def _fewest_micro_batches(
    wanted: float, devices: int, most_rows: int, row: float, bounds: Bounds
) -> Plan | None:
    """The fewest micro-batches, of equally many rows, that come near enough."""
    unit, least = devices * row, bounds.min_accumulation
    fewest = max(math.ceil(wanted / (unit * most_rows) - 1e-9), least)
    # Multiples of so many may all miss narrow bounds that those of another number meet.
    most = bounds.max_batch_size / unit + 1e-9
    others = range(least, math.floor(most) + 1) if math.isfinite(most) else ()
    for count in (fewest, *others):
        within = min(wanted, most_rows * count * unit)
        rows = _nearest_multiple(within, count * unit, 1, bounds)
        if rows is not None and rows <= most_rows:
            return Plan(rows * row, count, devices)
    return None
