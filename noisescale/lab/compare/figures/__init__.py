# SPDX-License-Identifier: Apache-2.0
"""The figures of a comparison, in the order in which they are read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import plotly.graph_objects as go

from noisescale.lab.compare.figures.curves_of_trials import curves_figure
from noisescale.lab.compare.figures.learning_rates import learning_rates_figure
from noisescale.lab.compare.figures.profile_of_workloads import profile_figure
from noisescale.lab.compare.figures.steps_against_batch import steps_figure
from noisescale.report.document import Figure
from noisescale.report.drawing import place_figure

if TYPE_CHECKING:
    from noisescale.lab.compare.comparison import Comparison

_EACH_WORKLOAD = (
    ("curves", "{metric} along the runs", curves_figure),
    ("steps", "Steps to the goal against batch size", steps_figure),
    ("learning-rates", "The best learning rate of each batch size", learning_rates_figure),
)


def figures_of(c: Comparison) -> list[Figure]:
    """Return the figures that have something to show: of all workloads, then of each."""
    return [
        place_figure(name, heading, drawn)
        for name, heading, drawn in _drawings_of(c)
        if drawn is not None
    ]


def _drawings_of(c: Comparison) -> Iterator[tuple[str, str, go.Figure | None]]:
    """Yield the id, the heading and the drawing of each figure; None if it has nothing to show."""
    yield "profile", "All workloads together", profile_figure(c)
    for k, workload in enumerate(c.workloads):
        for name, heading, draw in _EACH_WORKLOAD:
            said = heading.format(metric=c.goals[workload].metric)
            whole = f"{said}: {workload}" if workload else said
            yield (f"{name}-{k}" if k else name), whole, draw(c, workload)
