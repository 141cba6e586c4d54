# SPDX-License-Identifier: Apache-2.0
"""The figures of a search: the front of cost and result, and each parameter along it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import plotly.graph_objects as go

from noisescale.lab.parameters import LOG, POW2, Parameter
from noisescale.lab.tune.cost_front import CostFront, Setting
from noisescale.lab.tune.tables import (
    OWN,
    cost_unit,
    describe_law,
    settings_of,
    write_value,
)
from noisescale.report.colours import BLUE, GREY, VERMILLION
from noisescale.report.document import Figure
from noisescale.report.drawing import (
    FAILED_MARKER,
    coordinates,
    draw_area,
    figure,
    log_axis,
    place_figure,
    shown_name,
    size_axis,
    spread,
    with_legend,
)
from noisescale.report.numbers import Duration, four_digits, plural

_WIDE = 20.0
"""The ratio of results above which their axis is logarithmic."""

_TICKS = 11
"""Whole numbers that have a tick each."""

_LINE = 25
"""Points of a law's line."""


def figures_of(found: CostFront) -> list[Figure]:
    """Return the figures that have something to show."""
    if not found.front:
        return []
    drawn = [place_figure("front", f"{found.metric} against cost", front_figure(found))]
    drawn += [
        place_figure(
            f"parameter-{k}", f"{each.name} along the front", parameter_figure(found, each)
        )
        for k, each in enumerate(found.searched)
    ]
    return drawn


def front_figure(found: CostFront) -> go.Figure:
    """Draw all trainings, and the front as a step line. Failures stand at the upper edge."""
    unit = cost_unit(found)
    values = [each.value for each in found.settings]
    low, high, axis = _result_axis(found, values)
    drawn = figure(_front_finding(found, unit), _front_caption(found), _cost_axis(found), axis)
    others = [each for each in found.settings if each not in found.front]

    def result(each: Setting) -> float:
        return each.value

    _draw_settings(drawn, found, others, result, unit, "not on the front", GREY, 7)
    _draw_settings(drawn, found, found.front, result, unit, "on the front", BLUE, 10, line="hv")
    _draw_own(drawn, found, result, unit)
    edge = low if found.maximize else high
    _draw_failures(drawn, found, unit, [edge] * len(found.failures))
    return with_legend(drawn)


def parameter_figure(found: CostFront, searched: Parameter) -> go.Figure:
    """Draw a parameter against the cost: all trainings, the front, and its power law."""
    unit, name = cost_unit(found), searched.name

    def value(each: Setting) -> Any:
        one = each.first.parameters[name]
        return one if searched.is_number else write_value(one)

    drawn = figure(
        _law_finding(found, searched), _law_caption(found, name), _cost_axis(found),
        _parameter_axis(searched, [value(each) for each in found.settings]),
    )  # fmt: skip
    law = found.laws.get(name)
    if law is not None:
        costs = [each.cost for each in found.front]
        along = np.geomspace(min(costs), max(costs), _LINE).tolist()
        lines = [law.value_at(cost) for cost in along]
        x = [_shown_cost(cost, unit) for cost in along]
        outline = [
            *zip(x, (low for _, low, _ in lines), strict=True),
            *reversed(list(zip(x, (high for *_, high in lines), strict=True))),
        ]
        draw_area(drawn, "95 % interval of the line", outline)
        drawn.add_scatter(
            x=x,
            y=[middle for middle, *_ in lines],
            name=f"cost to the power {law.power:.2f}",
            mode="lines",
            line={"color": BLUE, "width": 1.5, "dash": "dash"},
            hoverinfo="skip",
        )
    others = [each for each in found.settings if each not in found.front]
    _draw_settings(drawn, found, others, value, unit, "not on the front", GREY, 7)
    _draw_settings(drawn, found, found.front, value, unit, "on the front", BLUE, 10)
    _draw_own(drawn, found, value, unit)
    at = [trial.parameters[name] for trial in found.failures]
    _draw_failures(drawn, found, unit, at if searched.is_number else list(map(write_value, at)))
    return with_legend(drawn)


def _draw_settings(
    drawn: go.Figure,
    found: CostFront,
    settings: Sequence[Setting],
    value: Callable[[Setting], Any],
    unit: Duration,
    name: str,
    colour: str,
    size: int,
    line: str = "",
) -> None:
    if not settings:
        return
    drawn.add_scatter(
        x=[_shown_cost(each.cost, unit) for each in settings],
        y=[value(each) for each in settings],
        name=name,
        mode="lines+markers" if line else "markers",
        line={"color": colour, "width": 1.5, **({"shape": line} if line else {})},
        marker={"size": size, "color": colour},
        hovertext=[_hover_text(found, each, unit) for each in settings],
        hoverinfo="text",
    )


def _draw_own(
    drawn: go.Figure, found: CostFront, value: Callable[[Setting], Any], unit: Duration
) -> None:
    own = [each for each in found.settings if each.first.number == 0]
    drawn.add_scatter(
        x=[_shown_cost(each.cost, unit) for each in own],
        y=[value(each) for each in own],
        name=OWN,
        mode="markers",
        marker={
            "symbol": "diamond-open",
            "size": 15,
            "color": VERMILLION,
            "line": {"width": 2, "color": VERMILLION},
        },
        hoverinfo="skip",
    )


def _draw_failures(drawn: go.Figure, found: CostFront, unit: Duration, at: Sequence[Any]) -> None:
    """Draw the failures whose cost is known. A training that crashed has no cost."""
    points = [
        (_shown_cost(trial.cost, unit), y)
        for trial, y in zip(found.failures, at, strict=True)
        if trial.cost > 0
    ]
    if points:
        drawn.add_scatter(
            **coordinates(points),
            name="without a result",
            mode="markers",
            marker=FAILED_MARKER,
            hovertemplate="without a result<extra></extra>",
        )


def _shown_cost(cost: float, unit: Duration) -> float:
    return cost / 3600 * unit.each_hour


def _cost_axis(found: CostFront) -> dict[str, Any]:
    unit = cost_unit(found)
    costs = [_shown_cost(trial.cost, unit) for trial in found.trials if trial.cost > 0]
    low, high = min(costs), max(costs)
    margin = max((high / low) ** 0.05, 1.1)
    return log_axis(f"device-{unit.name} of training", low / margin, high * margin)


def _result_axis(found: CostFront, values: Sequence[float]) -> tuple[float, float, dict[str, Any]]:
    """Return where failures stand at either end of the axis of results, and the axis."""
    title = shown_name(found.metric)
    if min(values) > 0 and max(values) / min(values) > _WIDE:
        low, high = spread(values)
        inside = (high / low) ** 0.02
        return low * inside, high / inside, log_axis(title, low, high)
    room = 0.1 * (max(values) - min(values)) or 0.1 * abs(max(values)) or 1.0
    low, high = min(values) - room, max(values) + room
    axis = {"title": {"text": title}, "range": [low, high]}
    return low + 0.3 * room, high - 0.3 * room, axis


def _parameter_axis(searched: Parameter, values: Sequence[Any]) -> dict[str, Any]:
    title = shown_name(searched.name)
    if not searched.is_number:
        return {"title": {"text": title}, "type": "category"}
    low, high = searched.low, searched.high
    if searched.kind in (LOG, POW2):
        margin = max((high / low) ** 0.04, 1.05)
        low, high = low / margin, high * margin
        if all(isinstance(each, int) for each in values) and len(set(values)) <= _TICKS:
            return size_axis(title, values, low, high)
        return log_axis(title, low, high)
    room = 0.05 * (high - low)
    return {"title": {"text": title}, "range": [low - room, high + room]}


def _hover_text(found: CostFront, each: Setting, unit: Duration) -> str:
    numbers = ", ".join(str(trial.number) for trial in each.trials)
    lines = [
        f"<b>trial {numbers}</b>",
        f"{shown_name(found.metric)} {four_digits(each.value)}",
        f"{unit(each.cost / 3600)} device-{unit.name}",
        *(shown_name(part) for part in settings_of(found, each).split(", ")),
    ]
    return "<br>".join(lines)


def _front_finding(found: CostFront, unit: Duration) -> str:
    first, last = found.front[0], found.front[-1]
    if first is last:
        return f"One training is the best and the cheapest: {four_digits(first.value)}"
    worst, best = four_digits(first.value), four_digits(last.value)
    return (
        f"From {unit(first.cost / 3600)} to {unit(last.cost / 3600)} device-{unit.name}"
        f" {shown_name(found.metric)} goes from {worst} to {best}"
    )


def _front_caption(found: CostFront) -> str:
    said = "The line: the best result that a cost buys."
    if any(math.isfinite(trial.cost) for trial in found.failures):
        edge = "lower" if found.maximize else "upper"
        said += f" Crosses at the {edge} edge: trainings without a result."
    return said


def _law_finding(found: CostFront, searched: Parameter) -> str:
    name, law = shown_name(searched.name), found.laws.get(searched.name)
    if not searched.is_number or law is None:
        return f"{name} of {plural(len(found.front), 'setting')} on the front"
    said = f"Along the front {name} {describe_law(found, searched.name, law)}"
    return f"{said}: power {law.power:.2f} ({law.low:.2f} to {law.high:.2f})"


def _law_caption(found: CostFront, name: str) -> str:
    if found.laws.get(name) is None:
        return "Blue: the settings that are the best for their cost."
    return "Blue: the settings that are the best for their cost, and the power law through them."
