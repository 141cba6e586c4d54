# SPDX-License-Identifier: Apache-2.0
"""The answers in a few lines, and the tables below them, for terminals and pages."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from noisescale.bounded import Bounded
from noisescale.history.optimizers import has_decayed
from noisescale.prediction.costing import PredictedRow, best_row_on, candidate_rows
from noisescale.prediction.prediction import PredictionRecord
from noisescale.prediction.second_run import advice_on
from noisescale.report.answers import (
    device_counts,
    doubled,
    measuring,
    own_batch_size,
    plan,
    row_at,
    same,
    shared,
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
    two_digits,
)

STARRED = "* extrapolated: the batch size is far from the run's, or the step time was not measured."


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


class Cell(NamedTuple):
    """A value and its bounds."""

    text: str
    bounds: str = ""


@dataclass(frozen=True)
class Line:
    """A row of a table: its cells, and marks such as "this run"."""

    cells: list[Cell]
    marks: list[str]


@dataclass(frozen=True)
class Table:
    """A title, headings and lines. The first cell of a line is its name."""

    title: str
    headings: list[str]
    lines: list[Line]
    notes: list[str]


def headline(p: PredictionRecord) -> list[tuple[str, str]]:
    """Return the answers: what to do, how certain it is, and what measuring cost."""
    lines = [*_what_to_do(p), *_how_sure(p)]
    if (found := measuring(p)) is not None:
        steps, share = found
        of = f"{count(steps)} of {count(p.run.steps.sum())} steps"
        lines.append(("Measuring took", f"about {100 * share:.1f} % of the run's time ({of})"))
    return lines


def _what_to_do(p: PredictionRecord) -> Iterator[tuple[str, str]]:
    """Yield the advice for the run's devices, then for more devices."""
    best, more, twice = p.recommended, p.on_more_devices, doubled(p).row
    at_least = "" if p.resolved else " or more"
    here = _best_here(p)

    def size(row: PredictedRow) -> str:
        return f"a batch of {count(row.batch_size)}{at_least} {p.unit}{shared(row)}"

    if here is not None:
        what = f"{size(here)} is the {'fastest' if timed(p) else 'best'}: "
        what += "as in this run" if here.batch_size == p.own_batch_size else _against_run(p, here)
        if timed(p) and time_ratio(p, here).high > 1 and p.hardware.step_time_assumed(here):
            what += ". Step times are assumed: `noisescale profile` measures them"
        yield f"On {_these(p)}", what
    costed = best.cost_with_waiting.known
    shown = [here]
    if here is None or costed:
        shown.append(best)
        what = f"{plural(best.devices, 'device')}, {size(best)}: {_against_run(p, best)}"
        if best == here:
            what = f"the same, on {_these(p)}"
        yield "Cheapest with waiting" if costed else "Best of your choices", what
    elif more is not None:
        shown.append(more)
        what = f"up to {count(more.devices)} pay off, with {size(more)}: {_against_run(p, more)}"
        yield "More devices", what
    elif max(device_counts(p)) > p.own_devices:
        said = "do not pay off: the compute grows by more than the time shrinks"
        if not p.resolved:
            said = "may or may not pay off: the critical batch size is not resolved"
        yield "More devices", said
    if not any(row is not None and same(row, twice) for row in shown):
        on = plural(twice.devices, "device")
        yield "Twice the devices", f"{on}, {size(twice)}: {_against_run(p, twice)}"


def _best_here(p: PredictionRecord) -> PredictedRow | None:
    """Return the best row on the run's own devices, if there are rows for them."""
    return best_row_on(p.own_devices, candidate_rows(p.rows, p.law, p.own_batch_size), p.law)


def _against_run(p: PredictionRecord, row: PredictedRow) -> str:
    time, compute = ("time", "compute") if timed(p) else ("steps", p.unit)
    ratio = time_ratio(p, row)
    if timed(p) and row.devices == p.own_devices:
        return f"{_times(ratio)} the time and the compute of this run"
    by = row.devices / p.own_devices if timed(p) else row.batch_size / own_batch_size(p)
    return f"{_times(ratio)} the {time} and {_times(ratio * by)} the {compute} of this run"


def _times(ratio: Bounded) -> str:
    """Write a ratio with its bounds: '0.65 x (0.51 to 1.1 x)'."""
    return f"{banded(ratio, two_digits)} x"


def _these(p: PredictionRecord) -> str:
    return "this device" if p.own_devices == 1 else f"these {p.own_devices} devices"


def _how_sure(p: PredictionRecord) -> Iterator[tuple[str, str]]:
    """Yield the critical batch size with its bounds, then the parts of these bounds."""
    by_noise_scale = p.critical_batch_size_by_noise_scale
    interval = f"{100 * p.confidence:g} % interval"
    if p.second_run is not None:
        yield "Critical batch size", _bounded(p, p.critical_batch_size, interval)
        yield "  from", "two runs, each assumed to have its best learning rate"
        yield "  by the noise scale", _bounded(p, by_noise_scale, interval)
        return
    if not p.calibration.is_theory:
        yield "Critical batch size", _bounded(p, p.critical_batch_size, interval)
        yield "  by the noise scale", _bounded(p, by_noise_scale, interval)
        return
    band = p.calibration.kappa
    if band.low == band.high:
        yield "Critical batch size", _bounded(p, by_noise_scale, interval)
        yield "  theory", "has an error that depends on the optimizer, which was not recorded"
        return
    with_theory = _bounded(p, p.critical_batch_size, "with the theory's error")
    yield "Critical batch size", with_theory
    yield "  measured", f"{_bounded(p, by_noise_scale, interval)}{_at_the_end(p)}"
    kind = getattr(p.history, "optimizer", None)
    of = "this optimizer" if kind is None else kind.title
    of += " at a falling learning rate" if has_decayed(p.history) else ""
    yield "  theory", f"with {of} B_crit was {band.low:g} to {band.high:g} x the noise scale"
    yield "  more certainty", advice_on(own_batch_size(p), p.critical_batch_size.value)


def _at_the_end(p: PredictionRecord) -> str:
    """Return a remark on the last value of the progress bar. It is not the run's noise scale."""
    logged = np.asarray(p.history.get("noise_scale", ()), dtype=np.float64)
    high = np.asarray(p.history.get("high", ()), dtype=np.float64)
    if not (len(logged) and np.isfinite(logged[-1]) and np.isfinite(high[-1])):
        return ""
    return f" over the run. The progress bar shows the noise scale at its end, {number(logged[-1])}"


def _bounded(p: PredictionRecord, band: Bounded, what: str) -> str:
    """Write a critical batch size with its bounds."""
    if not math.isfinite(band.value):
        if math.isfinite(band.high):
            return f"{number(band.low)} to {number(band.high)} {p.unit}, not resolved further"
        if not band.low:
            return "not resolved, and without a lower bound"
        return f"at least {number(band.low)} {p.unit}, not resolved"
    if not band.value:
        return f"at most {number(band.high)} {p.unit}: a larger batch did not need fewer steps"
    around = f"at least {number(band.low)}"
    if math.isfinite(band.high):
        around = f"{number(band.low)} to {number(band.high)}"
    return f"{number(band.value)} {p.unit} ({what} {around})"


def tables(p: PredictionRecord) -> list[Table]:
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
    starred = [STARRED] if any(row.extrapolated for row in rows) else []
    return Table(title, [heading for heading, _ in columns], lines, [*notes, *starred])


def _hours(rows: Sequence[PredictedRow]) -> list[Column]:
    """Return the columns of hours, device-hours and cost, as far as they are known."""
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


def cell_of(found: Bounded | str) -> Cell:
    """Return a value with its bounds as a cell of a table."""
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
