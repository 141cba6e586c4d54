# SPDX-License-Identifier: Apache-2.0
"""The tables of a prediction: batch sizes on the run's devices, and more devices."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from noisescale.bounded import Bounded
from noisescale.prediction.costing import FAR, PredictedRow
from noisescale.prediction.decision import ratio_text
from noisescale.prediction.position import MOST_DOUBLINGS
from noisescale.report.document import Cell, Line, Table, cell_of
from noisescale.report.numbers import (
    count,
    duration_for,
    inverse,
    middle,
    plural,
    rough,
)

if TYPE_CHECKING:
    from noisescale.prediction.prediction import Prediction

STARRED = f"* extrapolated: more than {FAR:g} times larger or smaller than the run's batch size."


def plan(row: PredictedRow) -> str:
    """Return how the devices share a batch: device batch x accumulation x devices."""
    shares = (count(row.device_batch_size), count(row.accumulation), count(row.devices))
    return " x ".join(shares)


Column = tuple[str, Callable[[PredictedRow], Bounded | str]]
"""A heading, and a function from a row to its entry."""

STEPS: Column = ("steps", lambda row: row.steps)
BATCH_SIZE: Column = (
    "batch size",
    lambda row: f"{count(row.batch_size)}{'*' if row.extrapolated else ''}",
)
PLANS: tuple[Column, ...] = (
    ("devices", lambda row: count(row.devices)),
    BATCH_SIZE,
    ("plan", plan),
)


def summary_of(p: Prediction) -> Table:
    """Return three to five batch sizes: what is likely of steps, examples and time."""
    lines = {size: _summary_line(p, size) for size in _other_sizes(p)}
    lines[p.position.batch_size] = _own_line(p)
    headings = ["batch size", "steps", p.unit, "time"]
    return Table("", headings, [lines[size] for size in sorted(lines)])


def _other_sizes(p: Prediction) -> set[float]:
    """Return the suggested batch size, and halvings or doublings around it and the run's own."""
    own, suggested = p.position.batch_size, p.decision.batch_size or p.position.batch_size
    power = round(math.log2(suggested / own))
    powers = {-1, 1, power} if power <= 0 else {1, power, min(power + 1, MOST_DOUBLINGS)}
    sizes = {own * 2.0**k for k in powers - {power}}
    if round(own) != suggested:
        sizes.add(float(suggested))
    return {size for size in sizes - {own} if size >= p.own_devices}


def _own_line(p: Prediction) -> Line:
    hours = p.own_row.hours
    took = "not timed"
    if hours.known:
        unit = duration_for([hours])
        took = f"{unit(middle(hours))} {unit.name}, timed"
    cells = [_own_size(p), count(round(p.run.steps.sum())), rough(p.run.examples), took]
    return Line([*map(Cell, cells)], ["this run"])


def _own_size(p: Prediction) -> str:
    if p.own_batch_size is not None:
        return count(round(p.own_batch_size))
    sizes = [size for size, _ in p.position.course]
    return f"{count(min(sizes))} to {count(max(sizes))}"


def _summary_line(p: Prediction, size: float) -> Line:
    row, likely = p.row_at(size, p.own_devices), p.position.likely
    timed = row.basis == "timed"
    time = f"{ratio_text(p.hours_ratio(row, likely))} x" if timed else "not timed"
    steps, examples = p.position.steps(size, likely), p.position.examples(size, likely)
    cells = [count(round(size)), f"{ratio_text(steps)} x", f"{ratio_text(examples)} x", time]
    return Line([*map(Cell, cells)], ["suggested"] if size == p.decision.batch_size else [])


def tables_of(p: Prediction) -> list[Table]:
    """Return the table of batch sizes and, with several numbers of devices, a table of devices."""
    found = [_batch_sizes(p)]
    if len(p.device_counts) > 1:
        found.append(_devices(p) if p.shows_hours else _devices_in_steps(p))
    return found


def _batch_sizes(p: Prediction) -> Table:
    devices = min(p.device_counts, key=lambda n: (abs(n - p.own_devices), n))
    rows = p.rows_for(devices)
    whose = plural(devices, "device")
    if devices == p.own_devices:
        whose = f"the run's own {whose if devices > 1 else 'device'}"
    columns = [BATCH_SIZE, STEPS, (p.unit, lambda row: row.examples), *_hours(p, rows)]
    return _table(p, f"On {whose}", rows, columns)


def _devices(p: Prediction) -> Table:
    """Return the table of the best rows for each number of devices."""
    rows = [p.best_for(devices) for devices in p.device_counts]
    hours, *compute = _hours(p, rows)
    columns = [*PLANS, STEPS, hours, _speed_up(p), *compute]
    note = "plan: device batch x accumulation x devices. speed-up: in time, relative to this run."
    return _table(p, "More devices, at the best batch size of each", rows, columns, note)


def _devices_in_steps(p: Prediction) -> Table:
    """Return the table of the run with its batch size in proportion to the devices."""
    own = p.run_batch_size / p.own_devices
    rows = [p.row_at(own * devices, devices) for devices in p.device_counts]
    columns = [*PLANS, STEPS, (p.unit, lambda row: row.examples), _speed_up(p)]
    note = "plan: device batch x accumulation x devices. speed-up: in steps, relative to this run."
    return _table(p, "More devices, each with the same batch", rows, columns, note)


def _table(
    p: Prediction,
    title: str,
    rows: Sequence[PredictedRow],
    columns: Sequence[Column],
    *notes: str,
) -> Table:
    lines = [
        Line([cell_of(of(row), whole=name == "steps") for name, of in columns], marks)
        for row, marks in zip(rows, _marks(p, rows), strict=True)
    ]
    starred = [STARRED] if any(row.extrapolated for row in rows) else []
    return Table(title, [heading for heading, _ in columns], lines, [*notes, *starred], detail=True)


def _hours(p: Prediction, rows: Sequence[PredictedRow]) -> list[Column]:
    """Return the columns of hours, device-hours and cost, and whether a step was timed."""
    unit = duration_for(row.hours for row in rows)
    if not p.shows_hours:
        return []
    found: list[tuple[str, Callable[[PredictedRow], Bounded]]] = [
        (unit.name, lambda row: unit.convert(row.hours)),
        (f"device-{unit.name}", lambda row: unit.convert(row.device_hours)),
        ("cost", lambda row: row.cost),
    ]
    known: list[Column] = [(name, of) for name, of in found if any(of(row).known for row in rows)]
    return [*known, ("step time", lambda row: row.basis or "")]


def _speed_up(p: Prediction) -> Column:
    return "speed-up", lambda row: inverse(p.time_ratio(row))


def _marks(p: Prediction, rows: Sequence[PredictedRow]) -> list[list[str]]:
    """Return what is said of each row: this run, recommended, the nearest to the best one."""
    own_devices = [row for row in rows if row.devices == p.own_devices]

    def distance(row: PredictedRow) -> float:
        return abs(math.log2(row.batch_size / p.best_batch_size.value))

    nearest = min(own_devices, key=distance) if own_devices and p.best_batch_size.known else None
    found = []
    for row in rows:
        own = row.batch_size == p.own_batch_size and row.devices == p.own_devices
        best = row.is_same_choice(p.recommended) and (p.priced or p.fastest_timed is not None)
        budget = row is nearest and distance(row) <= 0.5
        marks = [(own, "this run"), (best, "recommended"), (budget, "best for budget")]
        found.append([mark for marked, mark in marks if marked])
    return found
