# SPDX-License-Identifier: Apache-2.0
"""The noise scale along a run, with its interval, beside the batch size."""

from __future__ import annotations

import math

import numpy as np
import plotly.graph_objects as go
from numpy.typing import NDArray

from noisescale.history.segments import Array
from noisescale.prediction.prediction import PredictionRecord
from noisescale.report.drawing import (
    BLACK,
    BLUE,
    GREY,
    VERMILLION,
    area,
    escaped,
    figure,
    log_axis,
    with_legend,
)
from noisescale.report.numbers import banded, count, number

MOST_POINTS = 2000
"""A longer history is drawn by the extremes of its parts."""


def noise_scale_figure(p: PredictionRecord) -> go.Figure:
    """Draw the noise scale that is predicted from, the batch size and the critical one.

    That is the noise scale of each time of the run; what was logged then averages over what had
    been, and is drawn thinly beside it. Where the noise scale is not resolved there is no line,
    and the area from its lower bound to the top of the figure is hatched.
    """
    step, value, low = p.history["step"], p.run.noise_scale, p.run.low
    resolved = p.run.resolved > 0
    shown = _extremes(np.where(resolved, value, low), resolved)
    floor, top = _range(p, resolved)
    x_axis = {"title": {"text": "optimizer steps"}, "rangemode": "tozero"}
    unit = escaped(p.unit)
    shape = "linear" if p.run.as_logged else "vh"
    drawn = figure(
        _finding(p),
        f"Line: of each time of the run. Shaded: its {100 * p.confidence:g} % interval; open"
        " upwards where the noise scale is not resolved.",
        x_axis,
        log_axis(f"noise scale, batch size ({unit})", floor, top),
    )
    if resolved.any():
        name = f"{100 * p.confidence:g} % interval"
        drawn.add_trace(_band(p, shown, resolved, floor, top, name))
    if not resolved.all():
        drawn.add_trace(_open_band(p, shown, resolved, floor, top))
    _draw_logged(drawn, p)
    if resolved.any():
        drawn.add_scatter(
            x=step[shown].tolist(),
            y=[v if ok else None for v, ok in zip(value[shown], resolved[shown], strict=True)],
            name="noise scale",
            mode="lines" if resolved.sum() > 1 else "markers",
            line={"color": BLUE, "width": 2 if len(shown) == len(value) else 1, "shape": shape},
            hovertemplate=f"step %{{x:,}}: noise scale %{{y:,.3g}} {unit}<extra></extra>",
        )
    _draw_batch_size(drawn, p)
    _draw_critical(drawn, p)
    return with_legend(drawn)


def _extremes(key: Array, resolved: NDArray[np.bool_]) -> NDArray[np.intp]:
    """Indices of the rows to draw: all, or of each part the least and the largest.

    A part whose rows are mostly resolved is told by those, else by those that are not.
    """
    if len(key) <= MOST_POINTS:
        return np.arange(len(key))
    kept: set[int] = set()
    for part in np.array_split(np.arange(len(key)), MOST_POINTS // 2):
        kind = part[resolved[part] == (resolved[part].mean() >= 0.5)]
        kept |= {int(kind[np.argmin(key[kind])]), int(kind[np.argmax(key[kind])])}
    return np.array(sorted(kept))


def _range(p: PredictionRecord, resolved: NDArray[np.bool_]) -> tuple[float, float]:
    """Ends of the axis: all but the outliers, and no more than needed of wide intervals."""
    value, low, high = p.run.noise_scale, p.run.low, p.run.high
    centres = [p.run.batch_size, value[resolved], low[~resolved]]
    sure = _positive(np.array([*np.concatenate(centres), p.critical_batch_size.low]))
    least, most = np.quantile(sure, [0.002, 0.998]) if sure.size else (1.0, 1.0)
    lows, highs = _positive(low), _positive(high[resolved])
    floor = max(np.quantile(lows, 0.02), least / 4) if lows.size else least
    top = min(np.quantile(highs, 0.98), most * 4) if highs.size else most
    room = 1.5 if resolved.all() else 3.0
    return float(min(floor, least)) / 1.5, float(max(top, most)) * room


def _positive(values: Array) -> Array:
    return values[(values > 0) & np.isfinite(values)]


def _segments(
    p: PredictionRecord, shown: NDArray[np.intp], kind: NDArray[np.bool_]
) -> list[tuple[Array, NDArray[np.intp]]]:
    """Neighbouring rows of one kind: each with the steps from before its first row on."""
    step = p.history["step"]
    before = np.concatenate([[0.0], step[shown][:-1]])
    ends = np.flatnonzero(np.diff(kind[shown].astype(int), prepend=0, append=0))
    return [
        (np.concatenate([[before[a]], step[shown[a:b]]]), shown[a:b])
        for a, b in zip(ends[::2], ends[1::2], strict=True)
    ]


def _band(
    p: PredictionRecord,
    shown: NDArray[np.intp],
    resolved: NDArray[np.bool_],
    floor: float,
    top: float,
    name: str,
) -> go.Scatter:
    x: list[float | None] = []
    y: list[float | None] = []
    for steps, rows in _segments(p, shown, resolved):
        low, high = (end[rows].clip(floor / 10, top * 10) for end in (p.run.low, p.run.high))
        x += [*steps, *steps[::-1], None]
        y += [low[0], *low, *high[::-1], high[0], None]
    return area(name, x, y)


def _open_band(
    p: PredictionRecord,
    shown: NDArray[np.intp],
    resolved: NDArray[np.bool_],
    floor: float,
    top: float,
) -> go.Scatter:
    """From the lower bound to the top of the axis, and beyond."""
    x: list[float | None] = []
    y: list[float | None] = []
    for steps, rows in _segments(p, shown, ~resolved):
        low = p.run.low[rows].clip(floor / 10, top)
        x += [*steps, steps[-1], steps[0], None]
        y += [low[0], *low, top * 10, top * 10, None]
    return area(
        "not resolved: above",
        x,
        y,
        fillcolor="rgba(0, 0, 0, 0)",
        fillpattern={"shape": "/", "fgcolor": GREY, "size": 9, "solidity": 0.12},
        line={"color": GREY, "width": 1, "dash": "dot"},
    )


def _draw_logged(drawn: go.Figure, p: PredictionRecord) -> None:
    """The estimates as they were logged, where others are predicted from."""
    value, high = p.history["noise_scale"], p.history["high"]
    resolved = np.isfinite(value) & np.isfinite(high)
    if p.run.as_logged or not resolved.any():
        return
    rows = _extremes(np.where(resolved, value, 0.0), resolved)
    drawn.add_scatter(
        x=p.history["step"][rows].tolist(),
        y=[v if ok else None for v, ok in zip(value[rows], resolved[rows], strict=True)],
        name="as logged: averaged over what had been",
        mode="lines",
        line={"color": GREY, "width": 1, "dash": "dot"},
        hovertemplate="step %{x:,}: logged %{y:,.3g}<extra></extra>",
    )


def _draw_batch_size(drawn: go.Figure, p: PredictionRecord) -> None:
    size = p.run.batch_size
    rows = _extremes(size, np.ones(len(size), dtype=bool))
    step = p.history["step"][rows]
    drawn.add_scatter(
        x=[step[0] - p.run.steps[rows[0]], *step.tolist()],
        y=[size[rows[0]], *size[rows].tolist()],
        name="batch size of the run",
        mode="lines",
        line={"color": BLACK, "width": 2, "shape": "vh"},
        hovertemplate="step %{x:,}: batch size %{y:,.4g}<extra></extra>",
    )


def _draw_critical(drawn: go.Figure, p: PredictionRecord) -> None:
    critical = p.critical_batch_size
    at = critical.value if p.resolved else critical.low
    if not 0 < at < math.inf:
        return
    drawn.add_scatter(
        x=[0.0, float(p.history["step"][-1])],
        y=[at, at],
        name=f"critical batch size {banded(critical)}",
        mode="lines",
        line={"color": VERMILLION, "width": 2, "dash": "dash" if p.resolved else "dot"},
        hoverinfo="name",
    )


def _finding(p: PredictionRecord) -> str:
    own = p.own_batch_size
    unit = escaped(p.unit)
    if not p.resolved:
        least = p.critical_batch_size.low / p.calibration.kappa.low
        beside = f", batch size {count(own)}" if own else ""
        known = f": at least {number(least)} {unit}" if least else ""
        return f"Noise scale not resolved{known}{beside}"
    # What is not resolved is above its bound: without it the median would be one of low values.
    typical = float(np.median(np.where(np.isnan(p.run.noise_scale), math.inf, p.run.noise_scale)))
    if math.isinf(typical):
        return f"Noise scale mostly not resolved{f', batch size {count(own)}' if own else ''}"
    beside = f", {number(typical / own)} times the batch size" if own else ""
    return f"Noise scale {number(typical)} {unit} (median){beside}"
