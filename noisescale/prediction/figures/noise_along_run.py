# SPDX-License-Identifier: Apache-2.0
"""The noise scale along a run, with its interval, beside the batch size."""

from __future__ import annotations

import math
from html import escape
from typing import TYPE_CHECKING

import numpy as np
import plotly.graph_objects as go

from noisescale.prediction.figures.noise_curve import NoiseCurve
from noisescale.report.colours import BLACK, BLUE, GREY, NOTHING, VERMILLION
from noisescale.report.drawing import DOTTED, draw_area, extremes, figure, log_axis, with_legend
from noisescale.report.numbers import count, number, with_bounds

if TYPE_CHECKING:
    from noisescale.prediction.prediction import Prediction


def noise_scale_figure(p: Prediction) -> go.Figure:
    """Draw the noise scale that is predicted from, the batch size and the critical one.

    The line is the noise scale of each time of the run. What was shown then is drawn thinly beside
    it. Where the noise scale is not resolved there is no line,
    and the area from its lower bound to the top of the figure is hatched.
    """
    curve = NoiseCurve(p)
    resolved = curve.resolved
    floor, top = curve.range()
    unit = escape(p.unit)
    drawn = figure(
        _finding(p),
        f"Line: of each time of the run. Shaded: its {100 * p.confidence:g} % interval; open"
        " upwards where the noise scale is not resolved.",
        {"title": {"text": "optimizer steps"}, "rangemode": "tozero"},
        log_axis(f"noise scale, batch size ({unit})", floor, top),
    )
    if resolved.any():
        draw_area(drawn, f"{100 * p.confidence:g} % interval", curve.band(floor, top))
    if not resolved.all():
        draw_area(
            drawn,
            "not resolved: above",
            curve.open_band(floor, top),
            fillcolor=NOTHING,
            fillpattern={"shape": "/", "fgcolor": GREY, "size": 9, "solidity": 0.12},
            line=DOTTED,
        )
    _draw_logged(drawn, curve)
    if resolved.any():
        drawn.add_scatter(
            **curve.line(),
            name="noise scale",
            mode=curve.mode,
            line={"color": BLUE} | curve.shape,
            hovertemplate=f"step %{{x:,}}: noise scale %{{y:,.3g}} {unit}<extra></extra>",
        )
    drawn.add_scatter(
        **curve.batch_size(),
        name="batch size of the run",
        mode="lines",
        line={"color": BLACK, "width": 2, "shape": "vh"},
        hovertemplate="step %{x:,}: batch size %{y:,.4g}<extra></extra>",
    )
    _draw_critical(drawn, curve)
    return with_legend(drawn)


def _draw_logged(drawn: go.Figure, curve: NoiseCurve) -> None:
    """Draw the estimates as they were logged, where others are predicted from."""
    p = curve.p
    value, high = p.history["noise_scale"], p.history["high"]
    resolved = np.isfinite(value) & np.isfinite(high)
    if p.run.as_logged or not resolved.any():
        return
    rows = extremes(np.where(resolved, value, 0.0), resolved)
    drawn.add_scatter(
        **curve.values(value, resolved, rows),
        name="as shown at the time",
        mode="lines",
        line=DOTTED,
        hovertemplate="step %{x:,}: logged %{y:,.3g}<extra></extra>",
    )


def _draw_critical(drawn: go.Figure, curve: NoiseCurve) -> None:
    p = curve.p
    if not 0 < (at := p.critical_or_least) < math.inf:
        return
    drawn.add_scatter(
        x=[0.0, curve.end],
        y=[at, at],
        name=f"critical batch size {with_bounds(p.critical_batch_size)}",
        legendgroup="critical batch size",
        mode="lines",
        line={"color": VERMILLION, "width": 2, "dash": "dash" if p.resolved else "dot"},
        hoverinfo="name",
    )


def _finding(p: Prediction) -> str:
    own, unit, now = p.own_batch_size, escape(p.unit), p.noise_scale_now
    beside = f", batch size {count(own)}" if own else ""
    if not now.known:
        return f"Noise scale not measured{beside}"
    of = f" of {of_steps}" if (of_steps := p.steps_of_noise_scale) else " now"
    if math.isnan(now.value):
        return f"Noise scale{of}: at least {number(now.low)} {unit}{beside}"
    beside = f", {number(now.value / own)} times the batch size" if own else ""
    return f"Noise scale{of}: {with_bounds(now)} {unit}{beside}"
