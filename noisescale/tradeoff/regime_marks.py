# SPDX-License-Identifier: Apache-2.0
"""The three regimes of batch sizes in a figure: shaded spans, and borders with their bounds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import plotly.graph_objects as go

from noisescale.bounded import Bounded
from noisescale.report.colours import SHADES
from noisescale.report.drawing import DOTTED
from noisescale.report.numbers import number, with_bounds
from noisescale.tradeoff.regimes import Regimes

REGIMES = ("perfect scaling", "diminishing returns", "maximal data parallelism")
NOT_RESOLVED = "not resolved"

NAME_HEIGHT = 50
"""Pixels that the names of regimes take at the top of a figure, up to three lines each."""

_SHORT = 0.17
"""A span on a smaller share of the axis has its name below the names of the others."""


class Span(NamedTuple):
    """Batch sizes of one regime, as far as they are in sight."""

    name: str
    left: float
    right: float
    shade: int
    """A number of `SHADES`. All but the first begin with a dotted line."""
    row: int = 0
    """The row of the name, from the top."""
    anchor: str = "center"
    """The side of the span at which its name is written."""


def spans_between(
    names: Sequence[str], edges: Sequence[float], low: float, high: float
) -> list[Span]:
    """Return the spans that are in sight between the ends of an axis.

    Args:
        names: Of the regimes, by rising batch size.
        edges: Where each begins, and where the last one ends.
        low: Lower end of the axis.
        high: Its upper end.
    """
    clipped = [min(max(edge, low), high) for edge in edges]
    pairs = zip(names, clipped, clipped[1:], strict=False)
    return [
        Span(name, left, right, shade)
        for shade, (name, left, right) in enumerate(pairs)
        if left < right
    ]


def spans_of(found: Regimes, low: float, high: float) -> list[Span]:
    """Return the spans of a sweep, those that are short with their names in a row below."""
    perfect, maximal = meeting(found)
    names, edges = [NOT_RESOLVED], [low]
    if is_seen(found.perfect_up_to):
        names, edges = [REGIMES[0], NOT_RESOLVED], [low, perfect]
    if is_seen(found.maximal_from):
        names, edges = [*names, REGIMES[2]], [*edges, maximal]
        if len(names) == 3:
            names[1] = REGIMES[1]
    spans = spans_between(names, [*edges, high], low, high)
    whole = math.log(high / low)
    return [
        span._replace(row=1, anchor=_side(span, low, high))
        if math.log(span.right / span.left) < _SHORT * whole
        else span
        for span in spans
    ]


def meeting(found: Regimes) -> tuple[float, float]:
    """Return the batch sizes at which perfect scaling ends and maximal data parallelism begins.

    Both are B_crit where the steps bend so sharply that there are no diminishing returns.
    """
    perfect, maximal = found.perfect_up_to.value, found.maximal_from.value
    critical = found.critical_batch_size.value
    return (perfect, maximal) if perfect <= maximal else (critical, critical)


def _side(span: Span, low: float, high: float) -> str:
    if span.left == low:
        return "left"
    return "right" if span.right == high else "center"


def draw_spans(drawn: go.Figure, spans: Sequence[Span]) -> None:
    """Shade spans, with dotted lines between them and their names at the top."""
    for name, left, right, shade, row, anchor in spans:
        drawn.add_vrect(x0=left, x1=right, fillcolor=SHADES[shade], layer="below", line_width=0)
        if shade:
            drawn.add_vline(x=left, line=DOTTED)
        at = {"left": left, "right": right, "center": math.sqrt(left * right)}[anchor]
        aside: dict[str, Any] = {} if anchor == "center" else {"xanchor": anchor, "align": anchor}
        if row:
            aside["yshift"] = -row * NAME_HEIGHT
        drawn.add_annotation(
            text=name.replace(" ", "<br>"),
            font={"size": 12},
            x=math.log10(at),
            y=1,
            yref="paper",
            yanchor="top",
            showarrow=False,
            **aside,
        )


def is_seen(border: Bounded) -> bool:
    """Return whether a sweep shows a border from either side."""
    return border.known and (border.low > 0 or border.high < math.inf)


def is_within(border: Bounded, swept: tuple[float, float]) -> bool:
    """Return whether a sweep between two batch sizes shows the value of a border."""
    return is_seen(border) and swept[0] <= border.value <= swept[1]


def border_text(border: Bounded, swept: tuple[float, float]) -> str:
    """Write a border as far as a sweep shows it, such as "235 (at least 115)"."""
    if border.low > 0 and border.high < math.inf:
        return with_bounds(border)
    known = (
        f"at most {number(border.high)}" if border.low == 0 else f"at least {number(border.low)}"
    )
    return f"{number(border.value)} ({known})" if is_within(border, swept) else known


def draw_border(
    drawn: go.Figure,
    border: Bounded,
    at: float,
    ends: tuple[float, float],
    symbol: str,
    colour: str,
    **style: Any,
) -> None:
    """Draw a border with its bounds on a horizontal line; an arrow is an open end.

    Args:
        drawn: The figure. It is changed.
        border: In examples.
        at: Height of the line.
        ends: Ends of the axis.
        symbol: Of the value, which is left out where it is not in sight.
        colour: Of all of it.
        **style: Of the trace.
    """
    low, high = ends
    inset = (high / low) ** 0.012  # arrows on the ends of the axis would be cut
    points = [
        (max(border.low, low * inset), "line-ns-open" if border.low else "arrow-left", 9),
        (
            min(border.high, high / inset),
            "line-ns-open" if border.high < math.inf else "arrow-right",
            9,
        ),
    ]
    if low < border.value < high:  # first, for the legend
        points.insert(0, (border.value, symbol, 11))
    drawn.add_scatter(
        x=[x for x, _, _ in points],
        y=[at for _ in points],
        mode="lines+markers",
        line={"color": colour, "width": 1.5},
        marker={
            "symbol": [symbol for _, symbol, _ in points],
            "size": [size for _, _, size in points],
            "color": colour,
            "line": {"width": 1.5, "color": colour},
        },
        hoverinfo="text",
        **style,
    )
