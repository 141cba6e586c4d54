# SPDX-License-Identifier: Apache-2.0
"""Branches of a run in words: their cost before training, and their results."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import NamedTuple

import numpy as np

from noisescale._version import __version__
from noisescale.bounded import Bounded
from noisescale.history.segments import Array
from noisescale.prediction.branches import Branch, BranchedRun
from noisescale.report.document import Cell, Line, Table
from noisescale.report.numbers import banded, count, duration_for, number
from noisescale.report.records import finite


class Planned(NamedTuple):
    """Branches of one batch size before they are trained."""

    batch_size: float
    steps: Bounded
    factor: float
    """The factor on the learning rate."""


def cost_lines(
    start: float, end: float, planned: Sequence[Planned], orders: int, device_hours: Bounded
) -> list[str]:
    """Return the branches to train and their cost, in whole sentences."""
    each = "; ".join(
        f"{count(one.batch_size)} (learning rate x {number(one.factor)}, about"
        f" {banded(one.steps)} steps)"
        for one in planned
    )
    lines = [
        f"Branches start at step {count(start)} and train until the loss of step {count(end)},"
        f" {orders} at each batch size: {each}."
    ]
    if math.isnan(device_hours.value):
        return [*lines, "Their cost is not known: the run's steps were not timed."]
    unit = duration_for([device_hours])
    return [
        *lines,
        f"They cost about {banded(unit.of(device_hours))} device-{unit.name}, at the run's speed."
        " This includes evaluations of the loss.",
    ]


def headline(
    branched: BranchedRun, history: Mapping[str, Array], unit: str = "examples"
) -> list[tuple[str, str]]:
    """Return B_crit from the branches, half way and at their end, and from the noise scale."""
    lines = [("Critical batch size", _said(branched, None, f" {unit}, by branches"))]
    if branched.half is not None:
        lines.append(("  half way", _said(branched, branched.half, f" {unit}")))
    by_noise_scale = branched.by_noise_scale(history)
    said = "not resolved in the same steps of the run"
    if math.isfinite(by_noise_scale.value):
        said = f"{banded(by_noise_scale)} {unit}, in the same steps of the run"
    lines.append(("  by the noise scale", said))
    return lines


def branches_table(branched: BranchedRun) -> Table:
    """Return a table of the steps of the branches, half way and to their end."""
    ends = [x for x in (branched.half, branched.falling[-1]) if x is not None]
    headings = ["batch size", "learning rate", "orders", *(f"to step {x[0]:,.0f}" for x in ends)]
    own = [f"{step - branched.start:,.0f}" for step, _ in ends]
    lines = [
        Line([Cell(count(branched.batch_size)), Cell("x 1"), Cell("the run"), *map(Cell, own)], [])
    ]
    for size in sorted({branch.batch_size for branch in branched.branches}):
        alike = [branch for branch in branched.branches if branch.batch_size == size]
        cells = [_steps(alike, loss) for _, loss in ends]
        used = sorted({branch.learning_rate_factor for branch in alike})
        factor = f"x {' and '.join(map(number, used))}"
        lines.append(Line([Cell(count(size)), Cell(factor), Cell(str(len(alike))), *cells], []))
    return Table("Steps to the loss of the run", headings, lines, [])


def as_json(branched: BranchedRun, history: Mapping[str, Array]) -> str:
    """Return everything as JSON. Bounds and None are as in `Prediction.to_dict`."""
    half = None if branched.half is None else _known(branched, branched.half)
    found = {
        "version": __version__,
        "critical_batch_size": _known(branched, None),
        "critical_batch_size_half_way": half,
        "critical_batch_size_by_noise_scale": branched.by_noise_scale(history),
        **asdict(branched),
        "warnings": branched.doubts,
    }
    return json.dumps(finite(found), indent=2, allow_nan=False)


def _known(branched: BranchedRun, until: tuple[float, float] | None) -> Bounded | None:
    """Return the critical batch size; None if no branch reached the loss."""
    with suppress(ValueError):
        return branched.critical_batch_size(until)
    return None


def _said(branched: BranchedRun, until: tuple[float, float] | None, of_what: str) -> str:
    found = _known(branched, until)
    if found is None:
        return "not known: no branch at another batch size reached the loss"
    if not math.isfinite(found.value):
        return f"at least {number(found.low)}{of_what}"
    if not found.value:
        return f"at most {number(found.high)}{of_what}"
    return f"{banded(found)}{of_what}"


def _steps(branches: Sequence[Branch], loss: float) -> Cell:
    reached = [steps for branch in branches if (steps := branch.steps_to(loss)) is not None]
    if not reached:
        return Cell("not reached")
    mean = math.exp(float(np.mean(np.log(reached))))
    around = f"{number(min(reached))}–{number(max(reached))}" if len(reached) > 1 else ""
    missed = len(branches) - len(reached)
    return Cell(number(mean), ", ".join(filter(None, (around, f"{missed} not" if missed else ""))))
