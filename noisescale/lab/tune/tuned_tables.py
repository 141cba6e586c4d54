# SPDX-License-Identifier: Apache-2.0
"""What a search along the front of cost and result found: answers and tables."""

from __future__ import annotations

import math

from noisescale.bounded import Bounded
from noisescale.lab.tune.cost_front import CostFront, Setting, Value
from noisescale.lab.tune.scaling_laws import LEAST, PowerLaw
from noisescale.report.document import Cell, Line, Table
from noisescale.report.numbers import Duration, count, duration_for, number, plural

OWN = "your own settings"


def front_tables(found: CostFront) -> list[Table]:
    """Return the tables of the front and of the scaling laws, and that of the failures."""
    tables = [front_table(found)] if found.front else []
    if found.laws and len(found.front) >= LEAST:
        tables.append(laws_table(found))
    if found.failed:
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
        cells = [unit(each.cost / 3600), number_of(each.value)]
        cells += [shown_value(each.first.parameters[name.name]) for name in found.searched]
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
        cells = [Cell(name), Cell(power), Cell(around), Cell(reading(found, name, law))]
        lines.append(Line(cells, []))
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
                *(Cell(shown_value(trial.parameters[each.name])) for each in found.searched),
                Cell(trial.reason or trial.ended),
            ],
            [],
        )
        for trial in found.failed
    ]
    return Table("Trainings without a result", headings, lines, [])


def reading(found: CostFront, name: str, law: PowerLaw | None) -> str:
    """Say what a law means, in a few words."""
    values = found.along_front(name)
    if max(values) == min(values):
        return "is the same in all"
    if law is None:
        return "has no law: a value is not positive" if min(values) <= 0 else "has no law"
    if not law.resolved:
        return "is not resolved: it may grow or fall"
    return "grows with the cost" if law.power > 0 else "falls with the cost"


def front_answers(found: CostFront) -> list[tuple[str, str]]:
    """Return the answers in a few lines: the best, and what it is worth."""
    best = found.best
    if best is None:
        return [("Best", "no training has a result yet")]
    unit = cost_unit(found)
    answers = [("Best", f"{found.metric} {_priced(found, best, unit)}")]
    answers.append(("  with", settings_of(found, best)))
    own = next((s for s in found.settings if s.first.number == 0), None)
    if own is None:
        return answers
    answers.append(("Your own settings", f"{found.metric} {_priced(found, own, unit)}"))
    sign = -1.0 if found.maximize else 1.0
    as_good = next(s for s in found.front if sign * s.value <= sign * own.value)
    if as_good.cost < own.cost / 1.05:
        less = f"{own.cost / as_good.cost:.1f} times less cost: {_priced(found, as_good, unit)}"
        answers += [("As good for less", less), ("  with", settings_of(found, as_good))]
    return answers


def settings_of(found: CostFront, each: Setting) -> str:
    """Write the parameters of a setting."""
    values = each.first.parameters
    return ", ".join(f"{name.name} {shown_value(values[name.name])}" for name in found.searched)


def _priced(found: CostFront, each: Setting, unit: Duration) -> str:
    return f"{number_of(each.value)} for {unit(each.cost / 3600)} device-{unit.name}"


def cost_unit(found: CostFront) -> Duration:
    """Choose the unit of costs."""
    hours = [each.cost / 3600 for each in found.front]
    return duration_for(Bounded(each, each, each) for each in hours if math.isfinite(each))


def number_of(value: float) -> str:
    """Write a result or a parameter with four significant digits.

    Examples:
        >>> number_of(0.0123456), number_of(123456.0)
        ('0.01235', '123,456')
    """
    return number(value) if abs(value) >= 1e4 else f"{value:.4g}"


def shown_value(value: Value) -> str:
    """Write a parameter.

    Examples:
        >>> shown_value(2048), shown_value(0.1), shown_value("relu"), shown_value(True)
        ('2,048', '0.1', 'relu', 'true')
    """
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int):
        return f"{value:,}"
    return number_of(value) if isinstance(value, float) else value
