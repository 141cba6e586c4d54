# SPDX-License-Identifier: Apache-2.0
"""Steps and examples at other batch sizes, both relative to the run."""

from __future__ import annotations

import math
from html import escape
from typing import TYPE_CHECKING

import numpy as np
import plotly.graph_objects as go

from noisescale.bounded import Bounded
from noisescale.prediction.decision import ratio_text
from noisescale.prediction.position import Position
from noisescale.prediction.statements import band_text
from noisescale.report.colours import BANDS, BLACK, BLUE, GREY, VERMILLION
from noisescale.report.drawing import draw_band, figure, log_axis, size_axis, with_legend
from noisescale.report.numbers import count, two_digits

if TYPE_CHECKING:
    from noisescale.prediction.prediction import Prediction

REACH = 16.0
"""The axis goes to this many times the run's batch size, or the critical one if that is farther."""


def savings_figure(p: Prediction) -> go.Figure:
    """Draw steps and examples to the run's result against the batch size.

    Both are 1 at the run's own batch size. Areas are the likely ranges and, lighter, those between
    the bounds. Marks show the run's batch size, the suggested one and the critical one.
    """
    position = p.position
    own = position.batch_size
    marks = _marks(p)
    near = [own, *(at for at, _, _ in marks)]
    low, high = min(near) / 4, min(max(max(near) * 2, own * 4), own * REACH * 4)
    sizes = [float(size) for size in np.geomspace(low, high, 97)]
    curves = [
        ("steps", position.steps, BLUE, BANDS[0]),
        (escape(p.unit), position.examples, VERMILLION, BANDS[1]),
    ]
    every = [of(size) for _, of, *_ in curves for size in sizes]
    drawn = figure(
        _finding(p, position),
        _caption(position),
        size_axis(f"batch size ({escape(p.unit)})", [own], low, high),
        log_axis("relative to this run", *_ends(every)),
    )
    for name, of, colour, fill in curves:
        bands, likely = [of(x) for x in sizes], [of(x, position.likely) for x in sizes]
        style = {"fillcolor": fill, "legendgroup": name, "showlegend": not position.resolved}
        draw_band(drawn, f"{name}: between the bounds", sizes, bands, **style)
        if position.resolved:
            draw_band(drawn, f"{name}: likely", sizes, likely, **style)
            drawn.add_scatter(
                x=sizes,
                y=[band.value for band in bands],
                name=name,
                legendgroup=name,
                mode="lines",
                line={"color": colour, "width": 2.5},
                hovertext=[f"{band_text(band)} x the {name}" for band in bands],
                hovertemplate="batch size %{x:,.3g}: %{hovertext}<extra></extra>",
            )
    drawn.add_vline(x=own, line={"color": BLACK, "width": 1.5})
    for at, _, dash in marks:
        drawn.add_vline(x=at, line={"color": GREY, "width": 1.5, "dash": dash})
    drawn.add_scatter(
        x=[own],
        y=[1.0],
        name=f"this run: {count(own)}",
        mode="markers",
        marker={"symbol": "square-open", "size": 14, "color": BLACK, "line": {"width": 2}},
        hoverinfo="name",
    )
    for _, name, dash in marks:
        drawn.add_scatter(
            x=[None], y=[None], name=name, mode="lines",
            line={"color": GREY, "width": 1.5, "dash": dash},
        )  # fmt: skip
    return with_legend(drawn)


def _marks(p: Prediction) -> list[tuple[float, str, str]]:
    """Return batch sizes that decide, with their names and dashes."""
    position, suggested = p.position, p.decision.batch_size
    found = []
    if suggested is not None and suggested != round(position.batch_size):
        found.append((float(suggested), f"suggested: {count(suggested)}", "dot"))
    if position.resolved:
        critical = position.critical.value
        found.append((critical, f"costly from: {two_digits(critical)}", "dash"))
    return [mark for mark in found if mark[0] > 0]


def _ends(bands: list[Bounded]) -> tuple[float, float]:
    lows = [x for band in bands for x in (band.low, band.high) if 0 < x < math.inf]
    return min(lows) / 1.3, max(lows) * 1.3


def _finding(p: Prediction, position: Position) -> str:
    size = p.decision.batch_size or round(position.batch_size)
    size = 2 * size if size == round(position.batch_size) else size
    steps, examples = (of(size, position.likely) for of in (position.steps, position.examples))
    return (
        f"Batch size {count(size)}: likely {ratio_text(steps)} times the steps,"
        f" {ratio_text(examples)} times the {escape(p.unit)}"
    )


def _caption(position: Position) -> str:
    said = "Steps and examples to the result of this run, divided by the run's. "
    if not position.resolved:
        return f"{said}Areas: between the bounds."
    return (
        f"{said}Areas: likely and, lighter, between the bounds. From the last mark on each doubling"
        " saves less than a quarter of the steps."
    )
