# SPDX-License-Identifier: Apache-2.0
"""The answers in a few lines and the tables under them, for a terminal as for a page."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from noisescale.bounded import Bounded
from noisescale.prediction.costing import PredictedRow
from noisescale.prediction.prediction import PredictionRecord
from noisescale.report.answers import (
    device_counts,
    doubled,
    measuring,
    own_batch_size,
    plan,
    row_at,
    same,
    time_ratio,
    timed,
)
from noisescale.report.numbers import (
    banded,
    count,
    duration_for,
    inverse,
    number,
    plural,
    rough,
    settled,
)

STARRED = "* outside of what was measured: a far batch size, or a step time that was not timed."


Column = tuple[str, Callable[[PredictedRow], Bounded | str]]
"""A heading, and what a row says under it."""

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


class Cell(NamedTuple):
    """A value, and what it may be instead."""

    text: str
    bounds: str = ""


@dataclass(frozen=True)
class Line:
    """A row of a table: its cells, and the words that mark it."""

    cells: list[Cell]
    marks: list[str]


@dataclass(frozen=True)
class Table:
    """Headings over lines; the first cell of a line names it."""

    title: str
    headings: list[str]
    lines: list[Line]
    notes: list[str]


def headline(p: PredictionRecord) -> list[tuple[str, str]]:
    """Return what to use, how sure that is, what twice the devices buy, what measuring took."""
    best, critical, twice = p.recommended, p.critical_batch_size, doubled(p)
    more = "" if p.resolved else " or more"
    interval = f"{100 * p.confidence:g} % interval "
    sure = f"at least {number(critical.low)} {p.unit}, not resolved"
    if not critical.low:
        sure = "not resolved, without a lower bound either"
    if p.resolved:
        around = "" if math.isinf(critical.high) else f" to {number(critical.high)}"
        start = "" if around else "at least "
        sure = f"{number(critical.value)} {p.unit}"
        sure += f" ({interval}{start}{number(critical.low)}{around})"
    time, compute = ("time", "compute") if timed(p) else ("steps", p.unit)
    lines = [
        (
            "Recommended batch size",
            f"{count(best.batch_size)}{more} {p.unit} on {plural(best.devices, 'device')}:"
            f" {plan(best)} (device batch x accumulation x devices)",
        ),
        ("Critical batch size", sure),
        (
            "Twice the devices",
            f"{banded(twice.time)} x the {time}, {banded(twice.compute)} x the {compute} of this"
            f" run (batch size {count(twice.row.batch_size)}"
            f" on {plural(twice.row.devices, 'device')})",
        ),
    ]
    if (found := measuring(p)) is not None:
        steps, share = found
        of = f"{count(steps)} of {count(p.run.steps.sum())} steps were measured"
        said = f"about {100 * share:.1f} % of its time, estimated: {of}"
        lines.append(("Measuring this run took", said))
    return lines


def tables(p: PredictionRecord) -> list[Table]:
    """Return the table of batch sizes and, with several numbers of devices, that of devices."""
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
    """The best row of each number of devices."""
    rows = [p.best_for(devices) for devices in device_counts(p)]
    hours, *compute = _hours(rows)
    columns = [*PLANS, STEPS, hours, _speed_up(p), *compute]
    note = "plan: device batch x accumulation x devices. speed-up: in time, over this run."
    return _table(p, "More devices, at the best batch size of each", rows, columns, note)


def _devices_in_steps(p: PredictionRecord) -> Table:
    """The run with its batch size in proportion to the devices."""
    own = own_batch_size(p) / p.own_devices
    rows = [row_at(p, own * devices, devices) for devices in device_counts(p)]
    columns = [*PLANS, STEPS, (p.unit, lambda row: row.examples), _speed_up(p)]
    note = "plan: device batch x accumulation x devices. speed-up: in steps, over this run."
    return _table(p, "More devices, each with the same batch", rows, columns, note)


def _table(
    p: PredictionRecord,
    title: str,
    rows: Sequence[PredictedRow],
    columns: Sequence[Column],
    *notes: str,
) -> Table:
    lines = [Line([_cell(of(row)) for _, of in columns], _marks(p, row)) for row in rows]
    starred = [STARRED] if any(row.extrapolated for row in rows) else []
    return Table(title, [heading for heading, _ in columns], lines, [*notes, *starred])


def _hours(rows: Sequence[PredictedRow]) -> list[Column]:
    """Columns of hours, device-hours and cost, as far as they are known."""
    unit = duration_for(row.hours for row in rows)
    found: list[tuple[str, Callable[[PredictedRow], Bounded]]] = [
        (unit.name, lambda row: unit.of(row.hours)),
        (f"device-{unit.name}", lambda row: unit.of(row.device_hours)),
        ("cost", lambda row: row.cost),
        ("cost with waiting", lambda row: row.cost_with_waiting),
    ]
    return [(heading, of) for heading, of in found if any(of(row).known for row in rows)]


def _speed_up(p: PredictionRecord) -> Column:
    return "speed-up", lambda row: inverse(time_ratio(p, row))


def _cell(found: Bounded | str) -> Cell:
    if isinstance(found, str):
        return Cell(found)
    band = settled(found)
    if not band.known:
        return Cell("")
    low, high = rough(band.low), rough(band.high)
    around = f">= {low}" if math.isinf(band.high) else f"{low}–{high}"
    if not math.isfinite(band.value):
        return Cell(around)
    return Cell(number(band.value), "" if low == high else around)


def _marks(p: PredictionRecord, row: PredictedRow) -> list[str]:
    own = row.batch_size == p.own_batch_size and row.devices == p.own_devices
    found = [(own, "this run"), (same(row, p.recommended), "recommended")]
    return [mark for marked, mark in found if marked]
