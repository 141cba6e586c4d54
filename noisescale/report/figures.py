# SPDX-License-Identifier: Apache-2.0
"""The figures of a prediction, in the order in which they are read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import plotly.graph_objects as go

from noisescale.prediction.prediction import PredictionRecord
from noisescale.report.noise_along_run import noise_scale_figure
from noisescale.report.speed_up import speed_up_figure
from noisescale.report.time_compute_front import front_figure

__all__ = ["FIGURES", "SETTINGS", "front_figure", "noise_scale_figure", "speed_up_figure"]

FIGURES: Mapping[str, tuple[str, Callable[[PredictionRecord], go.Figure]]] = MappingProxyType(
    {
        "front": ("Time against compute", front_figure),
        "noise-scale": ("The noise scale along the run", noise_scale_figure),
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

The element that a figure is drawn in needs the height of its layout: `responsive` goes by that.
"""
