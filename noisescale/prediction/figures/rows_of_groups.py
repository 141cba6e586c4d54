# SPDX-License-Identifier: Apache-2.0
"""Steps against the rows of a step, with half, as many and twice the rows of each group."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import plotly.graph_objects as go

from noisescale.prediction.decision import ratio_text
from noisescale.prediction.statements import band_text
from noisescale.prediction.two_levels import best_split, steps_at, words_of
from noisescale.report.colours import BANDS, BLACK, SERIES
from noisescale.report.drawing import draw_band, figure, log_axis, size_axis, with_legend
from noisescale.report.numbers import count

if TYPE_CHECKING:
    from noisescale.prediction.prediction import Prediction

FACTORS = (0.5, 1.0, 2.0)
"""Rows of a group over those of the run: farther off |G|² is another."""

REACH = 8.0
"""The axis goes to this many times the rows of the run's steps, and as far below."""


def rows_figure(p: Prediction) -> go.Figure:
    """Draw the steps to the run's result against the rows of a step.

    Each curve keeps the rows of a group and varies the groups. Areas are the likely ranges.
    """
    assert p.levels is not None
    levels, words = p.levels, words_of(p)
    n = levels.rows_per_group
    own = levels.groups * n
    rows = [float(x) for x in np.geomspace(own / REACH, own * REACH, 49)]
    factors = [x for x in FACTORS if n * x > 1 or not p.has_centred_advantages]
    curves = [[steps_at(p, levels, x / (own * factor), factor) for x in rows] for factor in factors]
    ends = [x for bands in curves for band in bands for x in (band.low, band.high)]
    of_groups, of_rows = steps_at(p, levels, 2, 1), steps_at(p, levels, 1, 2)
    drawn = figure(
        f"Twice the {words.rows}: likely {ratio_text(of_groups)} times the steps by more"
        f" {words.groups}, {ratio_text(of_rows)} by more {words.rows} of each",
        "Steps to the result of this run, divided by the run's. Areas: likely."
        f" {best_split(p, levels)}.",
        size_axis(f"{words.rows} a step", [own], rows[0], rows[-1]),
        log_axis("relative to this run", min(ends) / 1.2, max(ends) * 1.2),
    )
    for factor, bands, colour, fill in zip(factors, curves, SERIES, BANDS, strict=False):
        name = f"{round(n * factor, 1):g} {words.rows} a {words.group}"
        style = {"fillcolor": fill, "legendgroup": name, "showlegend": False}
        draw_band(drawn, f"{name}: likely", rows, bands, **style)
        drawn.add_scatter(
            x=rows,
            y=[band.value for band in bands],
            name=name,
            legendgroup=name,
            mode="lines",
            line={"color": colour, "width": 2.5},
            hovertext=[f"{band_text(band)} x the steps" for band in bands],
            hovertemplate="%{x:,.3g} a step: %{hovertext}<extra></extra>",
        )
    drawn.add_scatter(
        x=[own],
        y=[1.0],
        name=f"this run: {count(round(levels.groups))} {words.groups} of {round(n, 1):g}",
        mode="markers",
        marker={"symbol": "square-open", "size": 14, "color": BLACK, "line": {"width": 2}},
        hoverinfo="name",
    )
    return with_legend(drawn)
