# SPDX-License-Identifier: Apache-2.0
"""The noise scales of several runs in one figure."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

import plotly.graph_objects as go

from noisescale.prediction.figures.noise_curve import NoiseCurve
from noisescale.prediction.prediction import Prediction
from noisescale.report.colours import RUN_BANDS, RUNS
from noisescale.report.drawing import DASHES, draw_area, figure, log_axis, shown_name, with_legend
from noisescale.report.numbers import number

MOST_BANDS = 4
"""The most runs with intervals. Intervals of more runs would hide each other."""

_AXES = {"step": "optimizer steps", "examples": "{unit} processed"}


def noise_of_runs_figure(
    runs: Sequence[tuple[str, Prediction, int]], across: str = "step"
) -> go.Figure:
    """Draw the noise scale of each run over the steps, or over the examples.

    Args:
        runs: The name of each run, what is predicted from it, and the number of its colour. At
            least one.
        across: "step" or "examples". Runs at different batch sizes compare at equal examples.
    """
    curves = [(name, NoiseCurve(p, across), colour) for name, p, colour in runs]
    ends = [curve.range() for _, curve, _ in curves]
    floor, top = min(low for low, _ in ends), max(high for _, high in ends)
    unit = escape(", ".join(sorted({p.unit for _, p, _ in runs})))
    drawn = figure(
        _finding(curves, unit),
        _caption(curves),
        {"title": {"text": _AXES[across].format(unit=unit)}, "rangemode": "tozero"},
        log_axis(f"noise scale, batch size ({unit})", floor, top),
    )
    for name, curve, colour in curves:
        _draw_run(drawn, name, curve, colour, (floor, top), intervals=len(runs) <= MOST_BANDS)
    return with_legend(drawn)


def _finding(curves: Sequence[tuple[str, NoiseCurve, int]], unit: str) -> str:
    """Name the runs with the least and the largest critical batch size."""
    known = [
        (curve.p.critical_batch_size.value, shown_name(name))
        for name, curve, _ in curves
        if curve.p.resolved
    ]
    if not known:
        return "The critical batch size of no run is resolved"
    (least, low), (most, high) = min(known), max(known)
    if low == high:
        return f"The critical batch size of {low} is {number(least)} {unit}"
    return f"Critical batch sizes from {number(least)} ({low}) to {number(most)} {unit} ({high})"


def _caption(curves: Sequence[tuple[str, NoiseCurve, int]]) -> str:
    said = ["Thick lines: noise scale.", "Thin lines: batch size."]
    if len(curves) <= MOST_BANDS:
        said.insert(1, f"Areas: {100 * curves[0][1].p.confidence:g} % intervals.")
    if any(not curve.resolved.all() for _, curve, _ in curves):
        said.append("Dotted: the lower bound, where the noise scale is not resolved.")
    return " ".join(said)


def _draw_run(
    drawn: go.Figure,
    name: str,
    curve: NoiseCurve,
    colour_number: int,
    ends: tuple[float, float],
    *,
    intervals: bool,
) -> None:
    """All traces of a run are shown and hidden together."""
    shown = shown_name(name)
    again, k = divmod(colour_number, len(RUNS))
    colour, dash = RUNS[k], DASHES[again % len(DASHES)]
    where = {"legendgroup": name, "name": shown}
    at = "%{fullData.name}<br>" + {"step": "step", "examples": "example"}[curve.across] + " %{x:,}"
    if intervals and curve.resolved.any():
        fill = {"fillcolor": RUN_BANDS[k], "legendgroup": name, "showlegend": False}
        draw_area(drawn, shown, curve.band(*ends), **fill)
    drawn.add_scatter(
        **curve.batch_size(),
        **where,
        showlegend=False,
        mode="lines",
        line={"color": colour, "width": 1, "shape": "vh"},
        hovertemplate=f"{at}: batch size %{{y:,.4g}}<extra></extra>",
    )
    if not curve.resolved.all():
        drawn.add_scatter(
            **curve.values(curve.p.run.low, ~curve.resolved, curve.rows),
            **where,
            showlegend=False,
            mode="lines",
            line={"color": colour, "width": 1.5, "dash": "dot"},
            hovertemplate=f"{at}: noise scale at least %{{y:,.3g}}<extra></extra>",
        )
    drawn.add_scatter(
        **curve.line(),
        **where,
        mode=curve.mode,
        line={"color": colour, "dash": dash} | curve.shape | {"width": 2.5},
        marker={"color": colour},
        hovertemplate=f"{at}: noise scale %{{y:,.3g}}<extra></extra>",
    )
