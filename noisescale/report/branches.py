# SPDX-License-Identifier: Apache-2.0
"""Branches of a run: what they will cost, and what they say."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import NamedTuple

import numpy as np

from noisescale import __version__
from noisescale.bounded import Bounded
from noisescale.history.segments import Array
from noisescale.prediction.branches import Branch, BranchedRun
from noisescale.report.numbers import banded, count, duration_for, number
from noisescale.report.records import finite
from noisescale.report.tables import Cell, Line, Table


class Planned(NamedTuple):
    """Branches of one batch size before they are trained."""

    batch_size: float
    steps: Bounded
    factor: float
    """On the learning rate."""


def cost_lines(
    start: float, end: float, planned: Sequence[Planned], orders: int, device_hours: Bounded
) -> list[str]:
    """Return what is about to be trained and what it costs, in whole sentences."""
    each = "; ".join(
        f"{count(one.batch_size)} (learning rate x {number(one.factor)}, about"
        f" {banded(one.steps)} steps)"
        for one in planned
    )
    lines = [
        f"Branches from step {count(start)} to the loss of step {count(end)}, {orders} of each"
        f" batch size: {each}."
    ]
    if math.isnan(device_hours.value):
        return [*lines, "What they cost is not known: the run's steps were not timed."]
    unit = duration_for([device_hours])
    return [
        *lines,
        f"They cost about {banded(unit.of(device_hours))} device-{unit.name}, at the run's own time"
        " an example; evaluations come on top.",
    ]


def headline(
    branched: BranchedRun, history: Mapping[str, Array], unit: str = "examples"
) -> list[tuple[str, str]]:
    """Return what the branches say, up to half of the way and to its end, and what the run said."""
    lines = [("Critical batch size", f"{_said(branched, None)} {unit} by branches")]
    if branched.half is not None:
        lines.append(("  up to half of the way", f"{_said(branched, branched.half)} {unit}"))
    by_noise_scale = branched.by_noise_scale(history)
    said = "not resolved over the same steps"
    if math.isfinite(by_noise_scale.value):
        said = f"{banded(by_noise_scale)} {unit}, over the same steps"
    lines.append(("  by the noise scale", said))
    return lines


def branches_table(branched: BranchedRun) -> Table:
    """Return the steps of the branches to half of the way and to its end."""
    ends = [x for x in (branched.half, branched.course[-1]) if x is not None]
    headings = ["batch size", "learning rate", "orders", *(f"to step {x[0]:,.0f}" for x in ends)]
    own = [f"{step - branched.start:,.0f}" for step, _ in ends]
    lines = [
        Line([Cell(count(branched.batch_size)), Cell("x 1"), Cell("the run"), *map(Cell, own)], [])
    ]
    for size in sorted({branch.batch_size for branch in branched.branches}):
        alike = [branch for branch in branched.branches if branch.batch_size == size]
        cells = [_steps(alike, loss) for _, loss in ends]
        factor = f"x {number(alike[0].learning_rate_factor)}"
        lines.append(Line([Cell(count(size)), Cell(factor), Cell(str(len(alike))), *cells], []))
    return Table("Steps to the loss that the run had", headings, lines, [])


def as_json(branched: BranchedRun, history: Mapping[str, Array]) -> str:
    """Return everything as JSON, bounds and None as in `Prediction.to_dict`."""
    half = None if branched.half is None else branched.critical_batch_size(branched.half)
    found = {
        "version": __version__,
        "critical_batch_size": branched.critical_batch_size(),
        "critical_batch_size_half_way": half,
        "critical_batch_size_by_noise_scale": branched.by_noise_scale(history),
        **asdict(branched),
        "warnings": branched.doubts,
    }
    return json.dumps(finite(found), indent=2, allow_nan=False)


def _said(branched: BranchedRun, until: tuple[float, float] | None) -> str:
    try:
        found = branched.critical_batch_size(until)
    except ValueError:
        return "not known: no branch reached the loss;"
    if not math.isfinite(found.value):
        return f"at least {number(found.low)}"
    if not found.value:
        return f"at most {number(found.high)}"
    return banded(found)


def _steps(branches: Sequence[Branch], loss: float) -> Cell:
    reached = [steps for branch in branches if (steps := branch.steps_to(loss)) is not None]
    if not reached:
        return Cell("not reached")
    mean = math.exp(float(np.mean(np.log(reached))))
    around = f"{number(min(reached))}–{number(max(reached))}"
    missed = len(branches) - len(reached)
    return Cell(number(mean), around + (f", {missed} not" if missed else ""))
