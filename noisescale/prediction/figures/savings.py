# SPDX-License-Identifier: Apache-2.0
"""Steps and examples at other batch sizes, both relative to the run."""

from __future__ import annotations

import math
from html import escape
from typing import TYPE_CHECKING

import numpy as np
import plotly.graph_objects as go

from noisescale.bounded import Bounded
from noisescale.prediction.position import Position
from noisescale.prediction.statements import band_text
from noisescale.report.colours import BANDS, BLACK, BLUE, GREY, VERMILLION
from noisescale.report.drawing import draw_area, figure, log_axis, size_axis, with_legend
from noisescale.report.numbers import count, two_digits

if TYPE_CHECKING:
    from noisescale.prediction.prediction import Prediction

REACH = 16.0
"""The axis goes to this many times the run's batch size, or the critical one if that is farther."""


def savings_figure(p: Prediction) -> go.Figure:
    """Draw steps and examples to the run's result against the batch size, with their bounds.

    Both are 1 at the run's own batch size. Marks show this batch size, the one up to which the
    examples are at most 1.2 times the run's, and the critical one.
    """
    position = p.position
    own = position.batch_size
    marks = _marks(p)
    near = [own, *(at for at, _, _ in marks)]
    low, high = min(near) / 4, min(max(max(near) * 2, own * 4), own * REACH * 4)
    sizes = [float(size) for size in np.geomspace(low, high, 97)]
    curves = [
        ("steps", [position.steps(size) for size in sizes], BLUE, BANDS[0]),
        (escape(p.unit), [position.examples(size) for size in sizes], VERMILLION, BANDS[1]),
    ]
    every = [band for _, bands, *_ in curves for band in bands]
    drawn = figure(
        _finding(p, position),
        _caption(position),
        size_axis(f"batch size ({escape(p.unit)})", [own], low, high),
        log_axis("relative to this run", *_ends(every)),
    )
    for name, bands, colour, fill in curves:
        edge = [(x, band.low) for x, band in zip(sizes, bands, strict=True)]
        edge += [(x, band.high) for x, band in zip(sizes[::-1], bands[::-1], strict=True)]
        style = {"fillcolor": fill, "legendgroup": name, "showlegend": not position.resolved}
        draw_area(drawn, f"{name}: between the bounds", edge, **style)
        if position.resolved:
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
    twice = 2 * position.batch_size
    steps, examples = position.steps(twice), position.examples(twice)
    return (
        f"Batch size {count(twice)}: {band_text(steps)} times the steps,"
        f" {band_text(examples)} times the {escape(p.unit)}"
    )


def _caption(position: Position) -> str:
    said = "Steps and examples to the result of this run, divided by the run's. Areas: bounds."
    if position.resolved:
        said += (
            " Up to the first mark the examples are at most 1.2 times the run's. Beyond the last"
            " one each doubling saves less than a quarter of the steps."
        )
    return said
