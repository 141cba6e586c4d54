# SPDX-License-Identifier: Apache-2.0
"""How much sooner the run's result is there with more devices, each with the same batch."""

from __future__ import annotations

import math
from html import escape
from typing import TYPE_CHECKING, Any

import numpy as np
import plotly.graph_objects as go

from noisescale.prediction.figures.time_compute_front import hover
from noisescale.report.colours import BLACK, BLUE, GREY, VERMILLION
from noisescale.report.drawing import (
    draw_area,
    draw_bounds,
    figure,
    log_axis,
    with_legend,
)
from noisescale.report.numbers import count, duration_for, inverse, number, plural, with_bounds
from noisescale.tradeoff.regime_marks import NOT_RESOLVED, REGIMES, draw_spans, spans_between

if TYPE_CHECKING:
    from noisescale.prediction.prediction import Prediction

PERFECT, MAXIMAL = 0.2, 5.0
"""Regimes meet at these multiples of B_crit: examples, or steps, 20 % above their least."""


def speed_up_figure(p: Prediction) -> go.Figure:
    """Draw the speed-up over the run against devices, with which the batch size grows.

    In steps from the law alone; where seconds a step are known also in hours, communication and
    all. The three regimes are those of Shallue et al. 2019, arXiv:1811.03600, who give them no
    numbers. Here scaling is perfect while examples are within 20 % of E_min (B <= B_crit/5), and
    data parallelism maximal once steps are within 20 % of S_min (B >= 5·B_crit).
    """
    low, high = _ends(p)
    own = p.run_batch_size
    sizes = [float(size) for size in np.geomspace(low, high, 121)]
    ratios = [inverse(p.position.steps(size)) for size in sizes]
    y_ends = min(ratio.low for ratio in ratios) / 1.3, max(ratio.high for ratio in ratios) * 1.6
    drawn = figure(
        _finding(p),
        _caption(p),
        {**log_axis(_x_title(p), low, high), **_ticks(p, low, high)},
        log_axis("speed-up over this run", *y_ends),
    )
    _draw_regimes(drawn, p, low, high)
    drawn.add_scatter(
        x=[low, high],
        y=[low / own, high / own],
        name="ideal: as many times the devices",
        mode="lines",
        line={"color": GREY, "width": 1.5, "dash": "dash"},
        hoverinfo="skip",
    )
    lows = [(size, ratio.low) for size, ratio in zip(sizes, ratios, strict=True)]
    highs = [(size, ratio.high) for size, ratio in zip(sizes, ratios, strict=True)]
    draw_bounds(drawn, p.resolved, lows, highs)
    if p.resolved:
        likely = [(x, inverse(p.position.steps(x, p.position.likely))) for x in sizes]
        edge = [(x, ratio.low) for x, ratio in likely]
        draw_area(drawn, "likely", [*edge, *((x, ratio.high) for x, ratio in likely[::-1])])
        drawn.add_scatter(
            x=sizes,
            y=[ratio.value for ratio in ratios],
            name="in steps",
            mode="lines",
            line={"color": BLUE, "width": 2.5},
            hovertemplate="batch size %{x:,.3g}: %{y:.3g} times in steps<extra></extra>",
        )
    if p.shows_hours:
        _draw_hours(drawn, p, low, high)
    drawn.add_scatter(
        x=[own],
        y=[1.0],
        name=f"this run: {count(own)} on {plural(p.own_devices, 'device')}",
        legendgroup="this run",
        mode="markers",
        marker={"symbol": "square-open", "size": 14, "color": BLACK, "line": {"width": 2}},
        hoverinfo="name",
    )
    return with_legend(drawn)


def _ends(p: Prediction) -> tuple[float, float]:
    """Batch sizes from a quarter of what matters to beyond maximal data parallelism."""
    own, middle = p.run_batch_size, p.critical_or_least
    around = [own, middle] if 0 < middle < math.inf else [own]
    return min(own / 4, *(x / 12 for x in around[1:]), own), max(own * 8, *(x * 12 for x in around))


def _draw_hours(drawn: go.Figure, p: Prediction, low: float, high: float) -> None:
    """Whole numbers of devices, powers of two times the run's."""
    rows = [p.row_at(size, devices) for devices, size in _counts(p, low, high)]
    speeds = [inverse(p.time_ratio(row)) for row in rows]
    unit = duration_for(row.hours for row in rows)
    texts = [
        f"{plural(row.devices, 'device')}: {with_bounds(speed)} times in hours"
        f"<br>{hover(p, row, unit)}"
        for row, speed in zip(rows, speeds, strict=True)
    ]
    drawn.add_scatter(
        x=[x for row in rows for x in (row.batch_size, row.batch_size, None)],
        y=[y for speed in speeds for y in (speed.low, speed.high, None)],
        name="in hours: between the bounds",
        mode="lines+markers",
        line={"color": VERMILLION, "width": 1.5},
        marker={"symbol": "line-ew-open", "size": 8, "color": VERMILLION, "line": {"width": 1.5}},
        hovertext=[text for text in texts for _ in range(3)],
        hoverinfo="text",
        showlegend=not p.resolved,
    )
    if p.resolved:
        symbols = ["diamond-open" if row.basis == "assumed" else "diamond" for row in rows]
        drawn.add_scatter(
            x=[row.batch_size for row in rows],
            y=[speed.value for speed in speeds],
            name="in hours, with bounds",
            mode="lines+markers",
            line={"color": VERMILLION, "width": 2, "dash": "dot"},
            marker={"symbol": symbols, "size": 9, "color": VERMILLION},
            hovertext=texts,
            hoverinfo="text",
        )


def _counts(p: Prediction, low: float, high: float) -> list[tuple[int, float]]:
    """Return half, twice, four times ... the run's devices, with batch sizes."""
    own, size = p.own_devices, p.run_batch_size
    fewer = [own // 2**k for k in range(8, 0, -1) if own % 2**k == 0 and 2**-k >= low / size]
    counts = fewer + [own * 2**k for k in range(24) if 2**k <= high / size]
    return [(devices, size * devices / own) for devices in counts]


def _draw_regimes(drawn: go.Figure, p: Prediction, low: float, high: float) -> None:
    at = p.critical_or_least
    edges = [low, PERFECT * at, MAXIMAL * at, high]
    names: tuple[str, ...] = REGIMES
    if not p.resolved:  # Known is only how far perfect scaling reaches at least.
        edges, names = [low, PERFECT * at, high], (REGIMES[0], NOT_RESOLVED)
    draw_spans(drawn, spans_between(names, edges, low, high))


def _x_title(p: Prediction) -> str:
    each = p.run_batch_size / p.own_devices
    return f"devices with {count(each)} {escape(p.unit)} each; below them the batch size"


def _ticks(p: Prediction, low: float, high: float) -> dict[str, list[Any]]:
    """Put numbers of devices over batch sizes, at whole devices, ten or fewer."""
    counts = _counts(p, low, high)
    counts = counts[:: math.ceil(len(counts) / 10)]
    labels = [f"{count(devices)}<br>{count(size)}" for devices, size in counts]
    return {"tickvals": [size for _, size in counts], "ticktext": labels}


def _finding(p: Prediction) -> str:
    twice = p.row_on(2 * p.own_devices)
    time = p.time_ratio(twice)
    if math.isfinite(time.value):
        gained = f"{number(1 / time.value)} times as fast"
    else:
        gained = f"{number(1 / time.high)} to {number(1 / time.low)} times as fast"
    measure = "" if p.shows_hours else " in steps"
    return f"Twice the devices: {gained}{measure} (batch {count(twice.batch_size)})"


def _caption(p: Prediction) -> str:
    said = (
        "Perfect scaling: examples within 20 % of their fewest (batch size up to B_crit/5)."
        " Maximal data parallelism: steps within 20 % of their fewest (5 B_crit and more)."
    )
    return said + (" Open diamonds: the step time is assumed." if p.shows_hours else "")
