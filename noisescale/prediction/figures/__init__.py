# SPDX-License-Identifier: Apache-2.0
"""The figures of a prediction, in the order in which they are read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

import plotly.graph_objects as go

from noisescale.prediction.figures.noise_along_runs import noise_scale_figure
from noisescale.prediction.figures.rows_of_groups import rows_figure
from noisescale.prediction.figures.savings import savings_figure
from noisescale.prediction.figures.speed_up import speed_up_figure
from noisescale.prediction.figures.time_compute_front import front_figure
from noisescale.prediction.two_levels import rows_are_known
from noisescale.report.document import Figure
from noisescale.report.drawing import place_figure

if TYPE_CHECKING:
    from noisescale.prediction.prediction import Prediction

__all__ = [
    "FIGURES",
    "front_figure",
    "noise_scale_figure",
    "rows_figure",
    "savings_figure",
    "speed_up_figure",
]

FIGURES: Mapping[str, tuple[str, Callable[[Prediction], go.Figure]]] = MappingProxyType(
    {
        "savings": ("What other batch sizes take", savings_figure),
        "rows": ("More groups, or more rows of each", rows_figure),
        "noise-scale": ("The noise scale along the run", noise_scale_figure),
        "front": ("Time against compute", front_figure),
        "speed-up": ("What more devices buy", speed_up_figure),
    }
)
"""The heading of each figure and what draws it, by its id for anchors.

The page shows the first two that a run has, and folds the others up. The tab shows all of them.
"""


def figures_of(p: Prediction) -> list[Figure]:
    """Return all figures of a prediction: without rows of groups where these are not known."""
    shown = {name: of for name, of in FIGURES.items() if name != "rows" or rows_are_known(p)}
    return [place_figure(name, heading, draw(p)) for name, (heading, draw) in shown.items()]
