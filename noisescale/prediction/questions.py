# SPDX-License-Identifier: Apache-2.0
"""The first questions to a prediction: the run itself, twice its devices, the best choice."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from noisescale.bounded import Bounded
from noisescale.prediction.costing import PredictedRow, fastest_row
from noisescale.prediction.position import position_of
from noisescale.prediction.prediction import PredictionRecord
from noisescale.report.numbers import count, plural


def shows_hours(p: PredictionRecord) -> bool:
    """Return whether hours are shown: prices need them, or other rows than the run's were timed."""
    own = (p.run_batch_size, p.own_devices)
    others = (row for row in p.rows if (row.batch_size, row.devices) != own)
    return priced(p) or any(row.basis == "timed" for row in others)


def priced(p: PredictionRecord) -> bool:
    """Return whether costs are known."""
    return p.hardware.price_per_device_hour is not None


def device_counts(p: PredictionRecord) -> list[int]:
    """Return the numbers of devices that have rows."""
    return sorted({row.devices for row in p.rows})


def row_at(p: PredictionRecord, batch_size: float, devices: int) -> PredictedRow:
    """Return the row of a batch size, even if the tables do not have it."""
    return p.hardware.row(p.law, batch_size, devices, far=False)


def own_row(p: PredictionRecord) -> PredictedRow:
    """Return the row of the run itself."""
    return row_at(p, p.run_batch_size, p.own_devices)


def critical_row(p: PredictionRecord) -> PredictedRow | None:
    """Return the row of the critical batch size on the run's devices; None if it is not known."""
    critical = p.critical_batch_size.value
    return row_at(p, critical, p.own_devices) if 0 < critical < math.inf else None


def critical_or_least(p: PredictionRecord) -> float:
    """Return the critical batch size, or its lower bound if it is not resolved."""
    return p.critical_batch_size.value if p.resolved else p.critical_batch_size.low


def steps_ratio(p: PredictionRecord, batch_size: float) -> Bounded:
    """Return the steps at a batch size divided by those at the run's batch size."""
    return position_of(p).steps(batch_size)


def time_ratio(p: PredictionRecord, row: PredictedRow) -> Bounded:
    """Return the hours of a row divided by the run's, or the steps if hours are not shown."""
    ratio = steps_ratio(p, row.batch_size)
    own_seconds = own_row(p).seconds_per_step.value
    return ratio * row.seconds_per_step * (1 / own_seconds) if shows_hours(p) else ratio


def timed_rows(p: PredictionRecord) -> list[PredictedRow]:
    """Return the rows on the run's own devices whose step time was timed, by rising batch size."""
    return [row for row in p.rows_for(p.own_devices) if row.basis == "timed"]


def fastest_timed(p: PredictionRecord) -> PredictedRow | None:
    """Return the row with the fewest hours of those that were timed; None if only one was."""
    rows = timed_rows(p)
    return fastest_row(rows, p.law) if len(rows) > 1 else None


def on_devices(p: PredictionRecord) -> str:
    """Return the devices of the run in words."""
    return "this device" if p.own_devices == 1 else f"these {p.own_devices} devices"


def measuring(p: PredictionRecord) -> tuple[float, float] | None:
    """Return the measured steps and their share of the run's time; None if not recorded."""
    unknown = np.full_like(p.run.steps, math.nan)
    columns = (p.history.get(name, unknown) for name in ("measured_steps", "measuring_cost"))
    steps, cost = (float(column[-1]) for column in columns)
    if not (math.isfinite(steps) and math.isfinite(cost)):
        return None
    return steps, cost / (float(p.run.steps.sum()) + cost)


def row_on(p: PredictionRecord, devices: int) -> PredictedRow:
    """Return the row of a number of devices, each with the same plan as in the run.

    A batch size that is the mean of several becomes one of equal micro-batches of whole examples.
    """
    each, most = p.run_batch_size / p.own_devices, p.hardware.max_device_batch_size
    if each % 1 and each > most:
        each = most * round(each / most)
    elif each % 1:
        each = max(1.0, round(each))
    return row_at(p, each * devices, devices)


def on_many_devices(p: PredictionRecord) -> PredictedRow:
    """Return the row of the most devices whose batch size is at most the critical one.

    Each device has the same plan as in the run. If the batch size is above the critical one on all
    numbers of devices beyond the run's, return the row of the smallest of these numbers.
    """
    more = [row_on(p, devices) for devices in device_counts(p) if devices > p.own_devices]
    useful = [row for row in more if row.batch_size <= critical_or_least(p)]
    return useful[-1] if useful else more[0]


def on_twice_the_devices(p: PredictionRecord) -> PredictedRow:
    """Return the row of twice the devices: twice the batch size, the same plan for each device."""
    return row_on(p, 2 * p.own_devices)


def pareto(
    rows: Sequence[PredictedRow], at: Callable[[PredictedRow], tuple[float, float]]
) -> list[PredictedRow]:
    """Return the rows that no other row beats on both axes, in rising order on the first axis.

    Each row is below all rows before it on the second axis, or at the same place as the row before.
    """
    placed = [(here, row) for row in rows if all(map(math.isfinite, here := at(row)))]
    left: list[tuple[tuple[float, float], PredictedRow]] = []
    for here, row in sorted(placed, key=lambda pair: pair[0]):
        if not left or here[1] < left[-1][0][1] or here == left[-1][0]:
            left.append((here, row))
    return [row for _, row in left]


def same(row: PredictedRow, other: PredictedRow) -> bool:
    """Return whether two rows have the same batch size on the same number of devices."""
    return row.batch_size == other.batch_size and row.devices == other.devices


def plan(row: PredictedRow, cross: str = "x") -> str:
    """Return how the devices share a batch: device batch x accumulation x devices."""
    shares = (count(row.device_batch_size), count(row.accumulation), count(row.devices))
    return f" {cross} ".join(shares)


def batch_on_devices(row: PredictedRow) -> str:
    """Return a batch size with its devices: '64 on 4 devices'."""
    return f"{count(row.batch_size)} on {plural(row.devices, 'device')}"
