# SPDX-License-Identifier: Apache-2.0
"""The tables of a prediction: batch sizes on the run's devices, and more devices."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from noisescale.bounded import Bounded
from noisescale.prediction.costing import PredictedRow
from noisescale.prediction.position import Position
from noisescale.prediction.prediction import PredictionRecord
from noisescale.prediction.questions import (
    device_counts,
    fastest_timed,
    own_row,
    plan,
    priced,
    row_at,
    same,
    shows_hours,
    time_ratio,
)
from noisescale.report.document import Cell, Line, Table, cell_of
from noisescale.report.numbers import (
    bounds,
    count,
    duration_for,
    inverse,
    middle,
    plural,
    rough,
    two_digits,
    value_from_bounds,
)

STARRED = "* extrapolated: the batch size is far from the run's."
MOST_DOUBLINGS = 3
"""Doublings from the run's batch size to the farthest one of the summary: beyond is far off."""


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


def summary_of(p: PredictionRecord, position: Position) -> Table:
    """Return three to five batch sizes: steps and examples relative to the run's, and times."""
    headings = ["batch size", "steps", p.unit, "time"]
    lines = [_summary_line(p, position, size) for size in _summary_sizes(p, position)]
    return Table("", headings, lines)


def _summary_sizes(p: PredictionRecord, position: Position) -> list[float]:
    """Return the run's batch size, and doublings or halvings of it up to where saving ends."""
    own, critical = position.batch_size, position.critical
    goal = critical.value if position.resolved else critical.low
    far = round(math.log2(goal / own)) if 0 < goal < math.inf else 0
    far = max(-MOST_DOUBLINGS, min(far, MOST_DOUBLINGS))
    if position.place in ("above", "probably above"):
        powers = {1, 0, -1, far // 2, min(far, -1)}
    elif position.place == "near":
        powers = {-1, 0, 1}
    else:
        cheap = round(math.log2(position.cheap_up_to.low / own))
        powers = {0, 1, max(1, min(cheap, MOST_DOUBLINGS)), max(far, 2)}
    return [size for power in sorted(powers) if (size := own * 2.0**power) >= p.own_devices]


def _summary_line(p: PredictionRecord, position: Position, size: float) -> Line:
    row = row_at(p, size, p.own_devices)
    if size == position.batch_size:
        own = own_row(p)
        hours = own.hours
        took = "not timed"
        if hours.known:
            unit = duration_for([hours])
            took = f"{unit(middle(hours))} {unit.name}, timed"
        steps, examples = float(p.run.steps.sum()), float((p.run.steps * p.run.batch_size).sum())
        cells = [count(size), count(steps), rough(examples), took]
        return Line([*map(Cell, cells)], ["this run"])
    steps_to, examples_to = position.steps(size), position.examples(size)
    timed = row.basis == "timed"
    time = _ratio(steps_to * row.seconds_per_step * (1 / own_row(p).seconds_per_step.value))
    last = time if timed else Cell("not timed")
    return Line([Cell(count(size)), _ratio(steps_to), _ratio(examples_to), last])


def _ratio(band: Bounded) -> Cell:
    band = value_from_bounds(band)
    around = bounds(band, two_digits).replace(" to ", "–")
    if not math.isfinite(band.value):
        return Cell(f"{around} x")
    return Cell(f"{two_digits(band.value)} x", around)


def tables_of(p: PredictionRecord) -> list[Table]:
    """Return the table of batch sizes and, with several numbers of devices, a table of devices."""
    found = [_batch_sizes(p)]
    if len(device_counts(p)) > 1:
        found.append(_devices(p) if shows_hours(p) else _devices_in_steps(p))
    return found


def _batch_sizes(p: PredictionRecord) -> Table:
    devices = min(device_counts(p), key=lambda n: (abs(n - p.own_devices), n))
    rows = p.rows_for(devices)
    whose = plural(devices, "device")
    if devices == p.own_devices:
        whose = f"the run's own {whose if devices > 1 else 'device'}"
    columns = [BATCH_SIZE, STEPS, (p.unit, lambda row: row.examples), *_hours(p, rows)]
    return _table(p, f"On {whose}", rows, columns)


def _devices(p: PredictionRecord) -> Table:
    """Return the table of the best rows for each number of devices."""
    rows = [p.best_for(devices) for devices in device_counts(p)]
    hours, *compute = _hours(p, rows)
    columns = [*PLANS, STEPS, hours, _speed_up(p), *compute]
    note = "plan: device batch x accumulation x devices. speed-up: in time, relative to this run."
    return _table(p, "More devices, at the best batch size of each", rows, columns, note)


def _devices_in_steps(p: PredictionRecord) -> Table:
    """Return the table of the run with its batch size in proportion to the devices."""
    own = p.run_batch_size / p.own_devices
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


def _hours(p: PredictionRecord, rows: Sequence[PredictedRow]) -> list[Column]:
    """Return the columns of hours, device-hours and cost, and whether a step was timed."""
    unit = duration_for(row.hours for row in rows)
    if not shows_hours(p):
        return []
    found: list[tuple[str, Callable[[PredictedRow], Bounded]]] = [
        (unit.name, lambda row: unit.convert(row.hours)),
        (f"device-{unit.name}", lambda row: unit.convert(row.device_hours)),
        ("cost", lambda row: row.cost),
    ]
    known: list[Column] = [(name, of) for name, of in found if any(of(row).known for row in rows)]
    return [*known, ("step time", lambda row: row.basis or "")]


def _speed_up(p: PredictionRecord) -> Column:
    return "speed-up", lambda row: inverse(time_ratio(p, row))


def _is_doubtful(row: PredictedRow) -> bool:
    return bool(row.extrapolated) or row.basis == "assumed"


def _marks(p: PredictionRecord, row: PredictedRow) -> list[str]:
    own = row.batch_size == p.own_batch_size and row.devices == p.own_devices
    best = same(row, p.recommended) and (priced(p) or fastest_timed(p) is not None)
    found = [(own, "this run"), (best, "recommended")]
    return [mark for marked, mark in found if marked]
