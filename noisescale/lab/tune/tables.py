# SPDX-License-Identifier: Apache-2.0
"""The tables of a search: the front of cost and result, the laws along it, the failures."""

from __future__ import annotations

import math

from noisescale.bounded import Bounded
from noisescale.lab.parameters import Value
from noisescale.lab.tune.cost_front import CostFront, Setting
from noisescale.lab.tune.scaling_laws import LEAST, PowerLaw
from noisescale.report.document import Cell, Line, Table
from noisescale.report.numbers import Duration, count, duration_for, four_digits, plural

OWN = "your own settings"


def tables_of(found: CostFront) -> list[Table]:
    """Return the tables that have a line: the front, the scaling laws, the failures."""
    tables = [front_table(found)] if found.front else []
    if found.laws and len(found.front) >= LEAST:
        tables.append(laws_table(found))
    if found.failures:
        tables.append(failures_table(found))
    return tables


def front_table(found: CostFront, most: int | None = None) -> Table:
    """Return the table of the settings that are the best for their cost.

    Args:
        found: The search.
        most: The number of lines, the best results; None for all.
    """
    unit = cost_unit(found)
    shown = found.front if most is None else found.front[-most:]
    repeated = any(len(each.trials) > 1 for each in shown)
    headings = [f"device-{unit.name}", found.metric, *(each.name for each in found.searched)]
    headings += [*(["trainings"] if repeated else []), "trial"]
    lines = []
    for each in shown:
        cells = [unit(each.cost / 3600), four_digits(each.value)]
        cells += [write_value(each.first.parameters[name.name]) for name in found.searched]
        cells += [*([count(len(each.trials))] if repeated else []), str(each.first.number)]
        marks = [OWN] if each.first.number == 0 else []
        lines.append(Line([Cell(text) for text in cells], marks))
    left = len(found.front) - len(shown)
    notes = ["Each line has the best result of all trainings that cost as much or less."]
    notes += [f"{plural(left, 'cheaper line')} left out."] if left else []
    if most is None and found.laws and len(found.front) < LEAST:
        notes.append(f"With fewer than {LEAST} lines no scaling law can be had. Search longer.")
    return Table("The front of cost and result", headings, lines, notes)


def laws_table(found: CostFront) -> Table:
    """Return the table of how each parameter grows with the cost along the front."""
    lines = []
    for name, law in found.laws.items():
        power = f"{law.power:.2f}" if law else ""
        around = f"{law.low:.2f} to {law.high:.2f}" if law else ""
        cells = [Cell(name), Cell(power), Cell(around), Cell(describe_law(found, name, law))]
        lines.append(Line(cells))
    headings = ["parameter", "power of the cost", "95 % interval", "so it"]
    notes = [
        "By least squares on logarithms, along the front. Its points were chosen for their results:"
        " the intervals are rather too narrow than too wide."
    ]
    return Table("Scaling laws", headings, lines, notes)


def failures_table(found: CostFront) -> Table:
    """Return the table of trainings without a result."""
    headings = ["trial", *(each.name for each in found.searched), "ended"]
    lines = [
        Line(
            [
                Cell(str(trial.number)),
                *(Cell(write_value(trial.parameters[each.name])) for each in found.searched),
                Cell(trial.reason or trial.ended),
            ]
        )
        for trial in found.failures
    ]
    return Table("Trainings without a result", headings, lines)


def describe_law(found: CostFront, name: str, law: PowerLaw | None) -> str:
    """Return what a law means, in a few words."""
    values = found.along_front(name)
    if max(values) == min(values):
        return "is the same in all"
    if law is None:
        return "has no law: a value is not positive" if min(values) <= 0 else "has no law"
    if not law.resolved:
        return "is not resolved: it may grow or fall"
    return "grows with the cost" if law.power > 0 else "falls with the cost"


def settings_of(found: CostFront, each: Setting) -> str:
    """Write the parameters of a setting."""
    values = each.first.parameters
    return ", ".join(f"{name.name} {write_value(values[name.name])}" for name in found.searched)


def cost_unit(found: CostFront) -> Duration:
    """Choose the unit of costs."""
    hours = [each.cost / 3600 for each in found.front]
    return duration_for(Bounded(each, each, each) for each in hours if math.isfinite(each))


def write_value(value: Value) -> str:
    """Write a parameter.

    Examples:
        >>> write_value(2048), write_value(0.1), write_value("relu"), write_value(True)
        ('2,048', '0.1', 'relu', 'true')
    """
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int):
        return f"{value:,}"
    return four_digits(value) if isinstance(value, float) else value
