# SPDX-License-Identifier: Apache-2.0
"""What the figures share: axes, bands, and the row behind a point."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Collection, Iterable, Mapping, Sequence
from html import escape, unescape
from types import MappingProxyType
from typing import Any

import numpy as np
import plotly.graph_objects as go
from numpy.typing import NDArray

from noisescale.bounded import Bounded
from noisescale.report.colours import BAND, BLACK, FAINT, GREY, GRID, PAGE
from noisescale.report.document import Figure
from noisescale.report.numbers import count

DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")
SYMBOLS = ("circle", "square", "diamond", "triangle-up", "cross", "hexagon")

LEVEL = {"tickangle": 0}
"""Settings of an axis whose labels stay level: `figures.js` leaves out those without room."""

DOTTED = {"color": GREY, "width": 1, "dash": "dot"}

FAILED_MARKER = {
    "symbol": "x-thin-open",
    "size": 8,
    "color": BLACK,
    "line": {"width": 1.5, "color": BLACK},
}
"""The marker of a training without a result."""

Point = tuple[float | None, float | None]

MOST_POINTS = 2000
"""The most points of a line. The extremes of the parts of a longer history are drawn."""

PLOT_HEIGHT, _AXIS_ROOM = 360, 58
"""Pixels between the axes, and under them for tick labels and title."""

_NAME = 40
"""Characters of a name from elsewhere; of a longer name both ends are kept."""

_FEWEST_SIZES, _MOST_SIZES = 3, 11
"""Batch sizes that have a tick."""

_NARROW = 555
"""Pixels that a legend has in the narrowest figure that is made for, one of 660."""

_FONT = "system-ui, -apple-system, 'Segoe UI', 'Liberation Sans', Arial, sans-serif"
_AXIS = {
    "showline": True,
    "linecolor": BLACK,
    "ticks": "outside",
    "tickcolor": BLACK,
    "gridcolor": GRID,
    "zeroline": False,
    "automargin": True,
}


_TOP = 30
"""Pixels above the axes of a figure on a page, for plotly's buttons."""

SETTINGS: Mapping[str, object] = MappingProxyType(
    {
        "responsive": True,
        "displaylogo": False,
        "showSendToCloud": False,
        "plotlyServerURL": "",
        "modeBarButtonsToRemove": ["lasso2d", "select2d"],
    }
)
"""Settings for `Plotly.newPlot`, which by itself offers to send figures and data to a server.

The element that a figure is drawn in needs the height of its layout, which `responsive` follows.
"""


def figure(finding: str, caption: str, x: dict[str, Any], y: dict[str, Any]) -> go.Figure:
    """Return an empty figure with its finding as title, and its caption underneath.

    The texts are also in `layout.meta`, for pages that write them above the figure themselves.
    """
    titles, captions = textwrap.wrap(finding, 70), textwrap.wrap(caption, 100)
    title = {
        "text": f"<b>{'<br>'.join(titles)}</b>",
        "font": {"size": 16},
        "subtitle": {"text": "<br>".join(captions), "font": {"size": 12, "color": FAINT}},
        "automargin": False,
        **{"x": 0, "xref": "container", "xanchor": "left"},
        **{"y": 1, "yref": "container", "yanchor": "top"},
        "pad": {"l": 12, "t": 10 + 21 * (len(titles) - 1)},
    }
    top = 48 + 21 * (len(titles) - 1) + 16 * len(captions)
    return go.Figure(
        layout={
            "template": "none",
            "meta": {"finding": finding, "caption": caption},
            "paper_bgcolor": PAGE,
            "plot_bgcolor": PAGE,
            "font": {"family": _FONT, "size": 13, "color": BLACK},
            "title": title,
            "margin": {"l": 75, "r": 25, "t": top, "b": _AXIS_ROOM},
            "hoverlabel": {"align": "left", "font": {"size": 12}},
            "xaxis": _AXIS | x,
            "yaxis": _AXIS | y,
        }
    )


def shown_name(name: str) -> str:
    """Return a name from elsewhere, such as a run's, as plotly shows it: short, and as text."""
    return shown_text(
        name if len(name) <= _NAME else f"{name[: _NAME // 2]}...{name[-_NAME // 2 :]}"
    )


def shown_text(text: str) -> str:
    """Return text as plotly shows it: without tags. Plotly does not know `&quot;`."""
    return escape(text, quote=False)


def with_legend(drawn: go.Figure, plot_height: float = PLOT_HEIGHT) -> go.Figure:
    """Put the legend under the axis title, and make room for it however narrow the page is."""
    names = [trace.name for trace in drawn.data if trace.name and trace.showlegend is not False]
    widths = [50 + 5.9 * len(name) for name in names]
    columns = max(1, int(_NARROW / max(widths)))
    rows = 1 if sum(widths) <= _NARROW else math.ceil(len(names) / columns)
    margin = drawn.layout.margin
    room = 20 * rows + 12
    margin.b = _AXIS_ROOM + room
    drawn.layout.height = height = margin.t + plot_height + margin.b
    drawn.layout.legend = {
        "orientation": "h",
        "traceorder": "normal",  # Traces of a group stand beside the others.
        "font": {"size": 12},
        **{"xref": "container", "x": 0.02, "xanchor": "left"},
        **{"yref": "container", "y": room / height, "yanchor": "top"},
    }
    return drawn


def log_axis(title: str, low: float, high: float) -> dict[str, Any]:
    """Return a logarithmic axis with whole tick labels: 1, 2, 5, 10 ..."""
    low, high = (low, high) if 0 < low < high < math.inf else (0.5, 2.0)
    decades = math.log10(high / low)
    fine = (1, 1.5, 2, 3, 4, 5, 6, 8)
    digits = (1,) if decades > 5 else (1, 2, 5) if decades > 0.8 else fine
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    ticks = [digit * 10.0**k for k in range(first, last + 1) for digit in digits]
    return {
        "title": {"text": title},
        "type": "log",
        "range": [math.log10(low), math.log10(high)],
        "tickvals": ticks,
        "ticktext": [_tick(tick) for tick in ticks],
    }


def size_axis(title: str, sizes: Collection[float], low: float, high: float) -> dict[str, Any]:
    """Return a logarithmic axis of batch sizes, with whole ticks at each doubling.

    Args:
        title: Of the axis.
        sizes: If all are the least one, a whole number, times powers of two, so are the ticks.
            Else the ticks are powers of two.
        low: The left end.
        high: The right end.

    Examples:
        >>> size_axis("batch size", [20], 3, 100)["ticktext"]
        ['5', '10', '20', '40', '80']
    """
    least = min(sizes)
    doubled = least % 1 == 0 and all(math.log2(size / least).is_integer() for size in sizes)
    base = least if doubled else 1.0
    first, last = math.ceil(math.log2(low / base)), math.floor(math.log2(high / base))
    every = max(1, math.ceil((last - first + 1) / _MOST_SIZES))
    wanted = (base * 2.0**k for k in range(first, last + 1) if k % every == 0)
    ticks = [size for size in wanted if size.is_integer()]
    axis = log_axis(title, low, high) | LEVEL
    if len(ticks) < _FEWEST_SIZES:
        return axis
    return axis | {"tickvals": ticks, "ticktext": [count(tick) for tick in ticks]}


def spread(values: Sequence[float]) -> tuple[float, float]:
    """Return the ends of a logarithmic axis around the positive and finite ones of values.

    An eighth of it is left free below them, where labels are, and a sixteenth above.
    """
    shown = [value for value in values if 0 < value < math.inf]
    low, high = (min(shown), max(shown)) if shown else (1.0, 1.0)
    span = max(high / low, 1.5)
    return low / span**0.15, high * span**0.08


def extremes(
    key: NDArray[np.float64], resolved: NDArray[np.bool_], most: int = MOST_POINTS
) -> NDArray[np.intp]:
    """Return the rows to draw: all, or of each part the least and the largest, and the last.

    Of a part whose rows are mostly resolved, these are drawn; of another part the others.
    """
    if len(key) <= most:
        return np.arange(len(key))
    kept = {len(key) - 1}
    for part in np.array_split(np.arange(len(key)), (most - 1) // 2):
        kind = part[resolved[part] == (resolved[part].mean() >= 0.5)]
        kept |= {int(kind[np.argmin(key[kind])]), int(kind[np.argmax(key[kind])])}
    return np.array(sorted(kept))


def coordinates(points: Iterable[Point]) -> dict[str, list[float | None]]:
    """Return the points of a trace as plotly takes them."""
    points = list(points)
    return {"x": [x for x, _ in points], "y": [y for _, y in points]}


def draw_area(drawn: go.Figure, name: str, outline: Iterable[Point], **style: Any) -> None:
    """Fill a polygon, or several that points of None separate."""
    style = {"line": {"width": 0}, "fillcolor": BAND, "hoverinfo": "skip"} | style
    drawn.add_scatter(name=name, mode="lines", fill="toself", **coordinates(outline), **style)


def draw_band(
    drawn: go.Figure, name: str, xs: Sequence[float], bands: Sequence[Bounded], **style: Any
) -> None:
    """Fill what is between the lower and the upper bounds at each x."""
    low = [(x, band.low) for x, band in zip(xs, bands, strict=True)]
    high = [(x, band.high) for x, band in zip(xs, bands, strict=True)]
    draw_area(drawn, name, [*low, *reversed(high)], **style)


def draw_bounds(
    drawn: go.Figure, resolved: bool, low: Sequence[Point], high: Sequence[Point], **style: Any
) -> None:
    """Fill what is between the lower and the upper points."""
    name = "between the bounds" if resolved else "only bounds yet: between them"
    style = {"legendgroup": "between the bounds"} | style
    draw_area(drawn, name, [*low, *reversed(high)], **style)


def place_figure(name: str, heading: str, drawn: go.Figure) -> Figure:
    """Take the title out of a figure.

    Args:
        name: The id of its element.
        heading: What the page writes above it.
        drawn: The figure, as `figure` begins it. It is changed.
    """
    texts = drawn.layout.meta
    layout = drawn.layout
    above, layout.margin.t = layout.margin.t, _TOP
    layout.height -= above - _TOP
    layout.legend.y *= (layout.height + above - _TOP) / layout.height
    layout.title = layout.meta = (
        None  # Plotly looks for templates in names and titles if there is `meta`.
    )
    finding, caption = (unescape(texts[what]) for what in ("finding", "caption"))
    return Figure(name, heading, finding, caption, drawn.to_plotly_json())


def _tick(value: float) -> str:
    for least, suffix in ((1e12, "T"), (1e9, "B"), (1e6, "M")):
        if value >= least:
            return f"{value / least:g}{suffix}"
    return f"{value:,.10g}" if value >= 1e-4 else f"{value:.0e}"
