# SPDX-License-Identifier: Apache-2.0
"""The tables of a prediction: batch sizes on the run's devices, and more devices."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from noisescale.bounded import Bounded
from noisescale.prediction.costing import PredictedRow
from noisescale.prediction.prediction import PredictionRecord
from noisescale.prediction.questions import (
    device_counts,
    own_batch_size,
    plan,
    row_at,
    same,
    time_ratio,
    timed,
)
from noisescale.report.document import Line, Table, cell_of
from noisescale.report.numbers import count, duration_for, inverse, plural

STARRED = "* extrapolated: the batch size is far from the run's, or the step time was not measured."


Column = tuple[str, Callable[[PredictedRow], Bounded | str]]
"""A heading, and a function from a row to its entry."""

STEPS: Column = ("steps", lambda row: row.steps)
BATCH_SIZE: Column = (
    "batch size",
    lambda row: f"{count(row.batch_size)}{'*' if _is_doubtful(row) else ''}",
)
PLANS: tuple[Column, ...] = (
    ("devices", lambda row: count(row.devices)),
    BATCH_SIZE,
    ("plan", plan),
)


def tables_of(p: PredictionRecord) -> list[Table]:
    """Return the table of batch sizes and, with several numbers of devices, a table of devices."""
    found = [_batch_sizes(p)]
    if len(device_counts(p)) > 1:
        found.append(_devices(p) if timed(p) else _devices_in_steps(p))
    return found


def _batch_sizes(p: PredictionRecord) -> Table:
    devices = min(device_counts(p), key=lambda n: (abs(n - p.own_devices), n))
    rows = p.rows_for(devices)
    whose = plural(devices, "device")
    if devices == p.own_devices:
        whose = f"the run's own {whose if devices > 1 else 'device'}"
    columns = [BATCH_SIZE, STEPS, (p.unit, lambda row: row.examples), *_hours(rows)]
    return _table(p, f"On {whose}", rows, columns)


def _devices(p: PredictionRecord) -> Table:
    """Return the table of the best rows for each number of devices."""
    rows = [p.best_for(devices) for devices in device_counts(p)]
    hours, *compute = _hours(rows)
    columns = [*PLANS, STEPS, hours, _speed_up(p), *compute]
    note = "plan: device batch x accumulation x devices. speed-up: in time, relative to this run."
    return _table(p, "More devices, at the best batch size of each", rows, columns, note)


def _devices_in_steps(p: PredictionRecord) -> Table:
    """Return the table of the run with its batch size in proportion to the devices."""
    own = own_batch_size(p) / p.own_devices
    rows = [row_at(p, own * devices, devices) for devices in device_counts(p)]
    columns = [*PLANS, STEPS, (p.unit, lambda row: row.examples), _speed_up(p)]
    note = "plan: device batch x accumulation x devices. speed-up: in steps, relative to this run."
    return _table(p, "More devices, each with the same batch", rows, columns, note)


def _table(
    p: PredictionRecord,
    title: str,
    rows: Sequence[PredictedRow],
    columns: Sequence[Column],
    *notes: str,
) -> Table:
    lines = [Line([cell_of(of(row)) for _, of in columns], _marks(p, row)) for row in rows]
    starred = [STARRED] if any(map(_is_doubtful, rows)) else []
    return Table(title, [heading for heading, _ in columns], lines, [*notes, *starred], detail=True)


def _hours(rows: Sequence[PredictedRow]) -> list[Column]:
    """Return the columns of hours, device-hours and cost, as far as they are known."""
    unit = duration_for(row.hours for row in rows)
    found: list[tuple[str, Callable[[PredictedRow], Bounded]]] = [
        (unit.name, lambda row: unit.convert(row.hours)),
        (f"device-{unit.name}", lambda row: unit.convert(row.device_hours)),
        ("cost", lambda row: row.cost),
        ("cost with waiting", lambda row: row.cost_with_waiting),
    ]
    return [(heading, of) for heading, of in found if any(of(row).known for row in rows)]


def _speed_up(p: PredictionRecord) -> Column:
    return "speed-up", lambda row: inverse(time_ratio(p, row))


def _is_doubtful(row: PredictedRow) -> bool:
    return bool(row.extrapolated) or row.basis == "assumed"


def _marks(p: PredictionRecord, row: PredictedRow) -> list[str]:
    own = row.batch_size == p.own_batch_size and row.devices == p.own_devices
    found = [(own, "this run"), (same(row, p.recommended), "recommended")]
    return [mark for marked, mark in found if marked]
