# SPDX-License-Identifier: Apache-2.0
"""The figures of a prediction, in the order in which they are read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from html import unescape
from types import MappingProxyType
from typing import Any, NamedTuple

import plotly.graph_objects as go

from noisescale.prediction.prediction import PredictionRecord
from noisescale.report.noise_along_run import noise_scale_figure
from noisescale.report.speed_up import speed_up_figure
from noisescale.report.time_compute_front import front_figure

__all__ = ["FIGURES", "SETTINGS", "front_figure", "noise_scale_figure", "speed_up_figure"]

_TOP = 30
"""Pixels above the axes, for plotly's buttons."""

FIGURES: Mapping[str, tuple[str, Callable[[PredictionRecord], go.Figure]]] = MappingProxyType(
    {
        "noise-scale": ("The noise scale along the run", noise_scale_figure),
        "front": ("Time against compute", front_figure),
        "speed-up": ("What more devices buy", speed_up_figure),
    }
)
"""From an id for anchors to a heading and what draws it."""

SETTINGS: Mapping[str, object] = MappingProxyType(
    {
        "responsive": True,
        "displaylogo": False,
        "showSendToCloud": False,
        "plotlyServerURL": "",
        "modeBarButtonsToRemove": ["lasso2d", "select2d"],
    }
)
"""For `Plotly.newPlot`. By itself it offers to send the figure, with its data, to a server.

The element that a figure is drawn in needs the height of its layout, which `responsive` follows.
"""


class PlacedFigure(NamedTuple):
    """A figure as a page shows it: the page writes the title, which then wraps at any width."""

    id: str
    heading: str
    finding: str
    """What the figure shows, in a sentence. Plain text."""
    caption: str
    """How to read the figure. Plain text."""
    drawing: dict[str, Any]
    """`data` and `layout` for plotly."""

    @property
    def height(self) -> float:
        """Pixels that the drawing takes at a usual width."""
        return float(self.drawing["layout"]["height"])


def placed(name: str, heading: str, drawn: go.Figure) -> PlacedFigure:
    """Take the title out of a figure.

    Args:
        name: The id of its element.
        heading: What the page writes above it.
        drawn: What `FIGURES` or `noise_of_runs_figure` draw. It is changed.
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
    return PlacedFigure(name, heading, finding, caption, drawn.to_plotly_json())


def placed_figures(p: PredictionRecord) -> list[PlacedFigure]:
    """Return all figures of a prediction."""
    return [placed(name, heading, draw(p)) for name, (heading, draw) in FIGURES.items()]
