# SPDX-License-Identifier: Apache-2.0
"""The front of time against compute: what each batch size and number of devices takes of both."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

import numpy as np
import plotly.graph_objects as go

from noisescale.prediction.costing import PredictedRow
from noisescale.prediction.figures.front_axes import Axes, axes_of
from noisescale.prediction.figures.hover import hover
from noisescale.prediction.prediction import PredictionRecord
from noisescale.prediction.questions import (
    batch_on_devices,
    critical_row,
    device_counts,
    own_row,
    pareto,
    priced,
    same,
    shows_hours,
)
from noisescale.report.colours import BLACK, BLUE, EDGE, GREY, ORANGE, SERIES, VERMILLION
from noisescale.report.drawing import (
    DASHES,
    SYMBOLS,
    Point,
    coordinates,
    draw_bounds,
    figure,
    log_axis,
    spread,
    with_legend,
)
from noisescale.report.numbers import count, number, plural, with_bounds


def front_figure(p: PredictionRecord) -> go.Figure:
    """Draw time against compute for all rows, on logarithmic axes.

    With seconds a step known: hours against cost, or against device-hours; on one number of
    devices those are proportional, and hours are drawn against examples. Without: steps against
    examples, which is the hyperbola (S/S_min - 1)·(E/E_min - 1) = 1 of McCandlish et al. 2018.
    """
    axes = axes_of(p)
    front = _front(p, axes)
    bounded = p.rows if len(device_counts(p)) == 1 else front
    marked = [row for row in (own_row(p), p.recommended, critical_row(p)) if row]
    corners = [axes.point(row) for row in (*p.rows, *marked)]
    corners += [end for row in bounded for end in (axes.low(row), axes.high(row))]
    if p.resolved and not shows_hours(p):
        corners.append((p.law.middle.min_examples, p.law.middle.min_steps))
    drawn = figure(
        _finding(p, axes),
        _caption(p),
        log_axis(axes.x_title, *spread([x for x, _ in corners])),
        log_axis(axes.y_title, *spread([y for _, y in corners])),
    )
    _draw_band(drawn, p, axes, bounded)
    if p.resolved and not shows_hours(p):
        _draw_law(drawn, p)
    for k, devices in enumerate(device_counts(p) if shows_hours(p) else [front[0].devices]):
        _draw_rows(drawn, p, axes, devices, k % len(SYMBOLS))
    if p.resolved:
        _draw_front(drawn, p, axes, front)
    _draw_marked(drawn, p, axes)
    return with_legend(drawn)


def _front(p: PredictionRecord, axes: Axes) -> list[PredictedRow]:
    """Return the rows that no other beats; if nothing is resolved the best of each device count."""
    if not shows_hours(p):
        nearest = min(device_counts(p), key=lambda n: abs(n - p.own_devices))
        return p.rows_for(nearest)
    if p.resolved:
        return pareto(p.rows, axes.point)
    if len(device_counts(p)) == 1:
        return list(p.rows)
    return [p.best_for(devices) for devices in device_counts(p)]


def _draw_band(
    drawn: go.Figure, p: PredictionRecord, axes: Axes, rows: Sequence[PredictedRow]
) -> None:
    """Fill what is between the lower and the upper bounds of the rows."""
    low, high = [axes.low(row) for row in rows], [axes.high(row) for row in rows]
    if not shows_hours(p):
        sizes = _fine([row.batch_size for row in rows])
        bands = [p.law.steps(size) for size in sizes]
        low = [(s.low * size, s.low) for s, size in zip(bands, sizes, strict=True)]
        high = [(s.high * size, s.high) for s, size in zip(bands, sizes, strict=True)]
    draw_bounds(drawn, p.resolved, low, high, line={"width": 1, "color": EDGE})


def _draw_law(drawn: go.Figure, p: PredictionRecord) -> None:
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


def _draw_rows(drawn: go.Figure, p: PredictionRecord, axes: Axes, devices: int, k: int) -> None:
    """Draw a point for each row; where only bounds are known a line from one to the other."""
    rows = p.rows_for(devices)
    alone = not shows_hours(p)
    points: list[Point] = [axes.point(row) for row in rows]
    if not p.resolved:
        if len(device_counts(p)) > 1 and not alone:  # All of them would lie on one line.
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


def _draw_front(
    drawn: go.Figure, p: PredictionRecord, axes: Axes, front: Sequence[PredictedRow]
) -> None:
    """Mark the rows that no other beats, with their batch sizes; without hours all rows."""
    many = shows_hours(p) and len(device_counts(p)) > 1
    name = f"Pareto-optimal: batch{' on devices' if many else ' size'}"
    texts = [f"{count(row.batch_size)} on {row.devices}" for row in front]
    drawn.add_scatter(
        **coordinates(map(axes.point, front)),
        text=texts if many else [count(row.batch_size) for row in front],
        name=name if shows_hours(p) else "batch sizes",
        mode="lines+markers+text" if many else "markers+text",
        textposition="bottom left",
        textfont={"size": 12},
        line={"color": BLACK, "width": 3.5},
        marker={"symbol": "circle-open", "size": 11, "color": BLACK, "line": {"width": 2}},
        hoverinfo="skip",
    )


def _draw_marked(drawn: go.Figure, p: PredictionRecord, axes: Axes) -> None:
    """Mark the run itself, the recommended row, the critical batch size."""
    own, critical = own_row(p), critical_row(p)
    best = f"{'' if p.resolved else 'at least '}{batch_on_devices(p.recommended)}"
    both = same(own, p.recommended)
    what = "this run, and recommended" if both else "recommended"
    marks = [
        (None if both else own, f"this run: {batch_on_devices(own)}", "square-open", BLACK, 2),
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


def _finding(p: PredictionRecord, axes: Axes) -> str:
    best = p.recommended
    what = f"Batch size {batch_on_devices(best)}"
    if not p.resolved:
        return f"{what}, or more: the noise scale is not resolved"
    if not shows_hours(p):
        steps, examples = number(best.steps.value), number(best.examples.value)
        return f"Batch size {count(best.batch_size)}: {steps} steps, {examples} {escape(p.unit)}"
    time = f"{axes.unit(best.hours.value)} {axes.unit.name}"
    if priced(p):
        return f"{what}: {time}, cost {number(best.cost.value)}"
    compute = f"{axes.unit(best.device_hours.value)} device-{axes.unit.name}"
    return f"{what}: {time}, {compute}"


def _caption(p: PredictionRecord) -> str:
    if not shows_hours(p):
        return (
            "Steps and examples to the run's result. At the critical batch size both are twice"
            " their fewest; beyond it a step saved costs ever more."
        )
    return (
        "Each point is one batch size to the run's result; nearer to the lower left is better."
        " Point at one for its whole row."
    )


def _fine(sizes: Sequence[float]) -> list[float]:
    """Batch sizes from the least to the largest, close together."""
    return [float(size) for size in np.geomspace(min(sizes), max(sizes), 121)]
