# SPDX-License-Identifier: Apache-2.0
"""The front of time against compute: what each batch size and number of devices takes of both."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

import numpy as np
import plotly.graph_objects as go

from noisescale.bounded import Bounded
from noisescale.prediction.costing import PredictedRow
from noisescale.prediction.tables import plan
from noisescale.report.colours import BLACK, BLUE, EDGE, GREY, ORANGE, SERIES, VERMILLION
from noisescale.report.drawing import (
    DASHES,
    SYMBOLS,
    Point,
    coordinates,
    draw_area,
    draw_bounds,
    figure,
    log_axis,
    spread,
    with_legend,
)
from noisescale.report.numbers import (
    Duration,
    count,
    duration_for,
    number,
    plural,
    value_from_bounds,
    with_bounds,
)

if TYPE_CHECKING:
    from noisescale.prediction.prediction import Prediction


@dataclass(frozen=True)
class Axes:
    """What is compute and what is time, for one prediction."""

    x: Callable[[PredictedRow], Bounded]
    y: Callable[[PredictedRow], Bounded]
    x_title: str
    y_title: str
    unit: Duration
    """The unit of the hours."""

    def point(self, row: PredictedRow) -> tuple[float, float]:
        """Return where a row lies; NaN where only bounds are known."""
        return value_from_bounds(self.x(row)).value, value_from_bounds(self.y(row)).value

    def low(self, row: PredictedRow) -> tuple[float, float]:
        """Return its lower bounds."""
        return self.x(row).low, self.y(row).low

    def high(self, row: PredictedRow) -> tuple[float, float]:
        """Return its upper bounds."""
        return self.x(row).high, self.y(row).high


def axes_of(p: Prediction) -> Axes:
    """Return what a prediction has to be drawn by."""
    unit = duration_for(row.hours for row in p.rows)
    examples = f"compute: {escape(p.unit)} processed"
    if not p.shows_hours:
        steps = "time: optimizer steps"
        return Axes(lambda row: row.examples, lambda row: row.steps, examples, steps, unit)

    def against_hours(x: Callable[[PredictedRow], Bounded], x_title: str) -> Axes:
        return Axes(x, lambda row: unit.convert(row.hours), x_title, f"time ({unit.name})", unit)

    if len(p.device_counts) == 1:
        return against_hours(lambda row: row.examples, examples)
    if p.priced:
        return against_hours(lambda row: row.cost, "cost (currency of the price)")
    return against_hours(
        lambda row: unit.convert(row.device_hours), f"compute (device-{unit.name})"
    )


def front_figure(p: Prediction) -> go.Figure:
    """Draw time against compute for all rows, on logarithmic axes.

    With seconds a step known: hours against cost, or against device-hours; on one number of
    devices those are proportional, and hours are drawn against examples. Without: steps against
    examples, which is the hyperbola (S/S_min - 1)·(E/E_min - 1) = 1 of McCandlish et al. 2018.
    """
    axes = axes_of(p)
    front = _front(p, axes)
    bounded = p.rows if len(p.device_counts) == 1 else front
    marked = [row for row in (p.own_row, p.recommended, _critical_row(p)) if row]
    corners = [axes.point(row) for row in (*p.rows, *marked)]
    corners += [end for row in bounded for end in (axes.low(row), axes.high(row))]
    if p.resolved and not p.shows_hours:
        corners.append((p.law.middle.min_examples, p.law.middle.min_steps))
    drawn = figure(
        _finding(p, axes),
        _caption(p),
        log_axis(axes.x_title, *spread([x for x, _ in corners])),
        log_axis(axes.y_title, *spread([y for _, y in corners])),
    )
    _draw_band(drawn, p, axes, bounded)
    if p.resolved and not p.shows_hours:
        _draw_law(drawn, p)
    for k, devices in enumerate(p.device_counts if p.shows_hours else [front[0].devices]):
        _draw_rows(drawn, p, axes, devices, k % len(SYMBOLS))
    if p.resolved:
        _draw_front(drawn, p, axes, front)
    _draw_marked(drawn, p, axes)
    return with_legend(drawn)


def _critical_row(p: Prediction) -> PredictedRow | None:
    """Return the row of the critical batch size on the run's devices; None if it is not known."""
    critical = p.critical_batch_size.value
    return p.row_at(critical, p.own_devices) if 0 < critical < math.inf else None


def _front(p: Prediction, axes: Axes) -> list[PredictedRow]:
    """Return the rows that no other beats; if nothing is resolved the best of each device count."""
    if not p.shows_hours:
        nearest = min(p.device_counts, key=lambda n: abs(n - p.own_devices))
        return p.rows_for(nearest)
    if p.resolved:
        return pareto(p.rows, axes.point)
    if len(p.device_counts) == 1:
        return list(p.rows)
    return [p.best_for(devices) for devices in p.device_counts]


def pareto(
    rows: Sequence[PredictedRow], at: Callable[[PredictedRow], tuple[float, float]]
) -> list[PredictedRow]:
    """Return the rows that no other row beats on both axes, in rising order on the first axis.

    Each row is below all rows before it on the second axis, or at the same place as the row before.
    """
    placed = [(here, row) for row in rows if all(map(math.isfinite, here := at(row)))]
    left: list[tuple[tuple[float, float], PredictedRow]] = []
    for here, row in sorted(placed, key=lambda pair: pair[0]):
        if not left or here[1] < left[-1][0][1] or here == left[-1][0]:
            left.append((here, row))
    return [row for _, row in left]


def _draw_band(drawn: go.Figure, p: Prediction, axes: Axes, rows: Sequence[PredictedRow]) -> None:
    """Fill what is between the bounds of the rows and, over it, what is likely."""
    sizes = [row.batch_size for row in rows]
    low, high = [axes.low(row) for row in rows], [axes.high(row) for row in rows]
    if not p.shows_hours:
        sizes = _fine(sizes)
        bands = [p.law.steps(size) for size in sizes]
        low = [(s.low * size, s.low) for s, size in zip(bands, sizes, strict=True)]
        high = [(s.high * size, s.high) for s, size in zip(bands, sizes, strict=True)]
    draw_bounds(drawn, p.resolved, low, high, line={"width": 1, "color": EDGE})
    if _has_likely(p):  # both axes are proportional to the steps
        steps, likely = p.position.steps, p.position.likely
        lower = [steps(size, likely).low / steps(size).low for size in sizes]
        upper = [steps(size, likely).high / steps(size).high for size in sizes]
        edge = [(x * by, y * by) for (x, y), by in zip(low, lower, strict=True)]
        back = [(x * by, y * by) for (x, y), by in zip(high, upper, strict=True)]
        draw_area(drawn, "likely", [*edge, *reversed(back)])


def _draw_law(drawn: go.Figure, p: Prediction) -> None:
    """Draw the hyperbola and what it approaches: the fewest steps and the fewest examples."""
    law, sizes = p.law.middle, _fine([row.batch_size for row in p.rows])
    drawn.add_scatter(
        **coordinates((law.steps(size) * size, law.steps(size)) for size in sizes),
        mode="lines",
        line={"color": BLUE, "width": 2},
        showlegend=False,
        hoverinfo="skip",
    )
    style = {"color": GREY, "width": 1.5, "dash": "dash"}
    drawn.add_hline(y=law.min_steps, line=style)
    drawn.add_vline(x=law.min_examples, line=style)
    corner = {"x": math.log10(law.min_examples), "y": math.log10(law.min_steps)}
    label = corner | {"showarrow": False, "xanchor": "left", "yanchor": "bottom"}
    label["font"] = {"color": GREY, "size": 12}
    drawn.add_annotation(text="fewest steps S<sub>min</sub>", xshift=26, **label)
    fewest = f"fewest {escape(p.unit)} E<sub>min</sub>"
    drawn.add_annotation(text=fewest, textangle=-90, yshift=4, **label)


def _draw_rows(drawn: go.Figure, p: Prediction, axes: Axes, devices: int, k: int) -> None:
    """Draw a point for each row; where only bounds are known a line from one to the other."""
    rows = p.rows_for(devices)
    alone = not p.shows_hours
    points: list[Point] = [axes.point(row) for row in rows]
    if not p.resolved:
        if len(p.device_counts) > 1 and not alone:  # All of them would lie on one line.
            rows = [p.best_for(devices)]
        points = [at for row in rows for at in (axes.low(row), axes.high(row), (None, None))]
        rows = [row for row in rows for _ in range(3)]
    drawn.add_scatter(
        **coordinates(points),
        name="batch sizes" if alone else plural(devices, "device"),
        showlegend=not (alone and p.resolved),
        mode="markers" if alone and p.resolved else "lines+markers",
        line={"color": SERIES[k], "width": 1.5, "dash": DASHES[k]},
        marker={"symbol": SYMBOLS[k], "size": 7, "color": SERIES[k]},
        hovertext=[hover(p, row, axes.unit) for row in rows],
        hoverinfo="text",
    )


def _draw_front(drawn: go.Figure, p: Prediction, axes: Axes, front: Sequence[PredictedRow]) -> None:
    """Mark the rows that no other beats, with their batch sizes; without hours all rows."""
    many = p.shows_hours and len(p.device_counts) > 1
    name = f"Pareto-optimal: batch{' on devices' if many else ' size'}"
    texts = [f"{count(row.batch_size)} on {row.devices}" for row in front]
    drawn.add_scatter(
        **coordinates(map(axes.point, front)),
        text=texts if many else [count(row.batch_size) for row in front],
        name=name if p.shows_hours else "batch sizes",
        mode="lines+markers+text" if many else "markers+text",
        textposition="bottom left",
        textfont={"size": 12},
        line={"color": BLACK, "width": 3.5},
        marker={"symbol": "circle-open", "size": 11, "color": BLACK, "line": {"width": 2}},
        hoverinfo="skip",
    )


def _draw_marked(drawn: go.Figure, p: Prediction, axes: Axes) -> None:
    """Mark the run itself, the recommended row, the critical batch size."""
    own, critical = p.own_row, _critical_row(p)
    best = f"{'' if p.resolved else 'at least '}{named_row(p.recommended)}"
    both = own.is_same_choice(p.recommended)
    what = "this run, and recommended" if both else "recommended"
    marks = [
        (None if both else own, f"this run: {named_row(own)}", "square-open", BLACK, 2),
        (p.recommended, f"{what}: {best}", "star", ORANGE, 1),
        (critical, f"critical: {with_bounds(p.critical_batch_size)}", "x-thin-open", VERMILLION, 3),
    ]
    for row, name, symbol, colour, width in marks:
        if row is None or any(map(math.isnan, at := axes.point(row))):
            continue
        edge = {"width": width, "color": BLACK if symbol == "star" else colour}
        drawn.add_scatter(
            **coordinates([at]),
            name=name,
            mode="markers",
            marker={"symbol": symbol, "size": 16, "color": colour, "line": edge},
            hovertext=[f"{name}<br>{hover(p, row, axes.unit)}"],
            hoverinfo="text",
        )


def _finding(p: Prediction, axes: Axes) -> str:
    best = p.recommended
    what = f"Batch size {named_row(best)}"
    if not p.resolved:
        return f"{what}, or more: there is only a lower bound of the noise scale yet"
    if not p.shows_hours:
        steps, examples = number(best.steps.value), number(best.examples.value)
        return f"Batch size {count(best.batch_size)}: {steps} steps, {examples} {escape(p.unit)}"
    time = f"{axes.unit(best.hours.value)} {axes.unit.name}"
    if p.priced:
        return f"{what}: {time}, cost {number(best.cost.value)}"
    compute = f"{axes.unit(best.device_hours.value)} device-{axes.unit.name}"
    return f"{what}: {time}, {compute}"


def _caption(p: Prediction) -> str:
    areas = " Areas: likely and, lighter, between the bounds." if _has_likely(p) else ""
    if not p.shows_hours:
        return (
            "Steps and examples to the run's result. At the critical batch size both are twice"
            f" their fewest; beyond it a step saved costs ever more.{areas}"
        )
    return (
        "Each point is one batch size to the run's result; nearer to the lower left is better."
        f" Point at one for its whole row.{areas}"
    )


def _has_likely(p: Prediction) -> bool:
    """Return whether what is likely is of the whole run, as the bounds are."""
    return p.resolved and not p.position.at_end


def _fine(sizes: Sequence[float]) -> list[float]:
    """Batch sizes from the least to the largest, close together."""
    return [float(size) for size in np.geomspace(min(sizes), max(sizes), 121)]


def hover(p: Prediction, row: PredictedRow, unit: Duration) -> str:
    """Write a whole row for the label under the pointer."""
    lines = [
        f"<b>batch size {named_row(row)}</b>",
        f"device batch x accumulation x devices: {plan(row)}",
        f"steps: {with_bounds(row.steps)}",
        f"{escape(p.unit)}: {with_bounds(row.examples)}",
    ]
    if row.hours.known:
        lines.append(f"{unit.name}: {with_bounds(unit.convert(row.hours))}")
        lines.append(f"device-{unit.name}: {with_bounds(unit.convert(row.device_hours))}")
    if row.cost.known:
        lines.append(f"cost: {with_bounds(row.cost)}")
    if row.basis is not None:
        lines.append(f"step time: {row.basis}")
    if row.extrapolated:
        lines.append(f"extrapolated: {', '.join(row.extrapolated)}")
    return "<br>".join(lines)


def named_row(row: PredictedRow) -> str:
    """Return a batch size with its devices: '64 on 4 devices'."""
    return f"{count(row.batch_size)} on {plural(row.devices, 'device')}"
