# SPDX-License-Identifier: Apache-2.0
"""Make a wanted global batch size from device batch x accumulation x devices."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from noisescale.checks import require_count, require_positive
from noisescale.refusal import Refusal

TOLERANCE = 1.1
"""A plan with full micro-batches may miss the nearest batch size by this ratio.

Without a tolerance 61 rows would be 61 micro-batches of one row wherever 61 do not fit at once.
With 10 % every batch size has such a plan if a micro-batch takes 10 rows or more. A decision about
a batch size is never as sharp: a resolved noise scale is known to about 25 %.
"""

_ROUNDING = 1e-14
"""A bound may be missed by this share of it: examples may be counted in means, 13.7 say."""


@dataclass(frozen=True)
class Plan:
    """How the global batch of a step is made up.

    Raises:
        ValueError: If a number is not positive, or one that counts is not whole.

    Examples:
        >>> plan = Plan(device_batch_size=8, accumulation=4, devices=2)
        >>> plan.batch_size, str(plan)
        (64, '64 = 8 x 4 micro-batches x 2 devices')
    """

    device_batch_size: float
    """Examples of one micro-batch on one device; a mean over steps need not be whole."""
    accumulation: int
    """Micro-batches of each device in a step."""
    devices: int = 1
    nodes: int = 1
    """Nodes that the devices are on."""

    def __post_init__(self) -> None:
        """Check the numbers."""
        examples = "Give the examples of one micro-batch, on one device."
        require_positive("device_batch_size", self.device_batch_size, examples)
        require_count("accumulation", self.accumulation, "Give the micro-batches of a step.")
        require_count("devices", self.devices, "Give the ranks that train together.")
        require_count("nodes", self.nodes, "Give the nodes that the devices are on.")
        if self.nodes > self.devices:
            raise Refusal(
                "nodes",
                "not exceed `devices`",
                f"{self.nodes} > {self.devices}",
                "Count the devices of all nodes.",
            )

    @property
    def batch_size(self) -> float:
        """Examples of all devices in a step."""
        return self.device_batch_size * self.accumulation * self.devices

    def __str__(self) -> str:
        micro_batches = f"{self.accumulation} micro-batch{'es' * (self.accumulation > 1)}"
        devices = f"{self.devices} device{'s' * (self.devices > 1)}"
        nodes = f" on {self.nodes} nodes" if self.nodes > 1 else ""
        shares = f"{self.device_batch_size:g} x {micro_batches} x {devices}{nodes}"
        return f"{self.batch_size:g} = {shares}"


class Bounds(NamedTuple):
    """The limits of a plan.

    Args:
        min_batch_size: Least global batch, in examples.
        max_batch_size: Largest global batch, in examples.
        min_accumulation: Least micro-batches a step, for a measurement that compares them.
    """

    min_batch_size: float = 0.0
    max_batch_size: float = math.inf
    min_accumulation: int = 1

    def clip(self, batch_size: float) -> float:
        """Return the batch size within the bounds that is nearest to the wanted one."""
        return min(max(batch_size, self.min_batch_size), self.max_batch_size)


def plan_for(
    wanted: float,
    *,
    devices: int,
    nodes: int = 1,
    device_batch_size: float | None = None,
    max_device_batch_size: int | None = None,
    examples_per_row: float = 1.0,
    bounds: Bounds | None = None,
) -> Plan:
    """Return the plan whose global batch is nearest to the wanted one, by ratio, within the bounds.

    Give one of two arguments. With `device_batch_size` the micro-batches stay as they are, and the
    plan has the nearest number of them. With `max_device_batch_size` the rows of a micro-batch are
    free, but equal in all micro-batches of a step. Micro-batches of one row would reach every batch
    size. So the plan is the nearest one with *full* micro-batches: no more of them than its rows
    need, max(⌈rows / max_device_batch_size⌉, min_accumulation). If that misses the nearest possible
    batch by more than `TOLERANCE` (10 %), the plan has the nearest possible batch, with the fewest
    micro-batches that divide its rows. The same holds at a bound, if no batch lies between the
    bound and the nearest one.

    A plan's own batch size gives the same plan again, so that a policy can ask to stay.

    Args:
        wanted: Global batch, in examples.
        devices: Ranks that train together.
        nodes: Nodes that the devices are on.
        device_batch_size: Examples of a micro-batch, if micro-batches stay as they are.
        max_device_batch_size: Largest number of rows of a micro-batch.
        examples_per_row: Examples in a row of the data, if that is not one.
        bounds: The limits of the plan.

    Returns:
        A plan within the bounds. If `wanted` is beyond a bound, the bound is wanted instead.

    Raises:
        ValueError: If no plan meets the bounds, or `wanted` is not positive and finite.

    Examples:
        >>> print(plan_for(100, devices=2, device_batch_size=16))
        96 = 16 x 3 micro-batches x 2 devices
        >>> print(plan_for(100, devices=2, max_device_batch_size=32))
        100 = 25 x 2 micro-batches x 2 devices
        >>> print(plan_for(61, devices=1, max_device_batch_size=16))
        60 = 15 x 4 micro-batches x 1 device
        >>> print(plan_for(7, devices=1, max_device_batch_size=3))
        7 = 1 x 7 micro-batches x 1 device
    """
    bounds = bounds or Bounds()
    wanted = bounds.clip(require_positive("wanted", wanted, "Give the examples of a step."))
    plan = _nearest_plan(
        wanted, devices, nodes, device_batch_size, max_device_batch_size, examples_per_row, bounds
    )
    if plan is None:
        step = "" if device_batch_size is None else f" of {device_batch_size:g} examples each"
        raise Refusal(
            ("min_batch_size", "max_batch_size"),
            "leave room for a plan",
            f"{bounds.min_batch_size:g} to {bounds.max_batch_size:g} for {devices}"
            f" device{'s' * (devices > 1)} and at least {bounds.min_accumulation}"
            f" micro-batch{'es' * (bounds.min_accumulation > 1)}{step}",
            "Widen them, or change the batch size of the loader.",
        )
    return plan


def mean_plan(
    batch_size: float, *, devices: int, max_device_batch_size: float, nodes: int = 1
) -> Plan:
    """Return the plan of a mean batch size: full micro-batches, as many as it needs, all equal.

    If the micro-batches come out whole, `plan_for` returns the same plan. Otherwise this is the
    average plan of steps of nearly that batch size. Predictions use it, as they know neither rows
    nor tokens.

    Args:
        batch_size: Global, in examples, exactly.
        devices: Ranks that train together.
        max_device_batch_size: The most examples of a micro-batch.
        nodes: Nodes that the devices are on.

    Examples:
        >>> print(mean_plan(100, devices=2, max_device_batch_size=20))
        100 = 16.6667 x 3 micro-batches x 2 devices
    """
    # A mean that exceeds the largest by rounding alone is that one.
    count = max(1, math.ceil(batch_size / (devices * max_device_batch_size) - 1e-9))
    return Plan(batch_size / (devices * count), count, devices, nodes)


@lru_cache(maxsize=128, typed=True)  # a schedule asks for the same plan at every step
def _nearest_plan(
    wanted: float,
    devices: int,
    nodes: int,
    device_batch_size: float | None,
    max_device_batch_size: int | None,
    examples_per_row: float,
    bounds: Bounds,
) -> Plan | None:
    if device_batch_size is not None:
        unit = device_batch_size * devices
        count = _nearest_multiple(wanted, unit, bounds.min_accumulation, bounds)
        return None if count is None else Plan(device_batch_size, count, devices, nodes)
    most, unit = max_device_batch_size or 1, devices * examples_per_row
    found = _full_micro_batches(wanted, unit, most, bounds)
    return found and Plan(found[0] * examples_per_row, found[1], devices, nodes)


def _nearest_multiple(wanted: float, unit: float, least: int, bounds: Bounds) -> int | None:
    """Return the number of units that is nearest to `wanted`, by ratio, within the bounds."""
    below = max(math.floor(wanted / unit + _ROUNDING), least)
    return _nearest((below, below + 1), wanted, unit, bounds)


def _nearest(counts: Iterable[int], wanted: float, unit: float, bounds: Bounds) -> int | None:
    """Return the count of units within the bounds that is nearest to `wanted`, by ratio."""
    candidates = [
        count
        for count in counts
        if bounds.min_batch_size <= count * unit * (1 + _ROUNDING)
        and count * unit <= bounds.max_batch_size * (1 + _ROUNDING)
    ]
    return min(candidates, key=lambda n: abs(math.log(n * unit / wanted)), default=None)


def _full_micro_batches(
    wanted: float, unit: float, most_rows: int, bounds: Bounds
) -> tuple[int, int] | None:
    """Return rows and number of micro-batches of the nearest plan with no more than its rows need.

    With k micro-batches a device has up to k·most_rows rows, in multiples of k; with one fewer it
    has up to (k - 1)·most_rows. So the neighbours of a number of rows that needs k are the
    multiples of k beside it, or, below, (k - 1)·most_rows.
    """
    least = bounds.min_accumulation

    def micro_batches_of(rows: int) -> int:
        return max(-(-rows // most_rows), least)

    nearest = _nearest_multiple(wanted, unit, least, bounds)
    if nearest is None:
        return None
    count = micro_batches_of(nearest)
    at_a_bound = ((nearest - 1) * unit < bounds.min_batch_size and bounds.min_batch_size > 0) or (
        (nearest + 1) * unit > bounds.max_batch_size
    )
    tolerance = 1.0 if at_a_bound else TOLERANCE
    above = -(-nearest // count) * count
    below = max(nearest // count * count, (count - 1) * most_rows if count > least else 0)
    near = [rows for rows in (below, above) if 1 / tolerance <= rows / nearest <= tolerance]
    rows = _nearest(near, wanted, unit, bounds)
    if rows is None:
        device_rows = _largest_divisor(nearest, min(most_rows, nearest // least))
        return device_rows, nearest // device_rows
    return rows // micro_batches_of(rows), micro_batches_of(rows)


def _largest_divisor(number: int, most: int) -> int:
    """Return the largest divisor that is not above `most`, by trying factors up to the root."""
    root = math.isqrt(number)
    if most > root:  # then its partner is the smallest divisor from number / most on
        for partner in range(-(-number // most), root + 1):
            if number % partner == 0:
                return number // partner
    return next(n for n in range(min(most, root), 0, -1) if number % n == 0)
