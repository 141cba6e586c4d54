# SPDX-License-Identifier: Apache-2.0
"""The noise scale along a run, with its interval, beside the batch size."""

from __future__ import annotations

import math
from collections.abc import Iterator
from html import escape

import numpy as np
import plotly.graph_objects as go
from numpy.typing import NDArray

from noisescale.history.segments import Array
from noisescale.prediction.prediction import PredictionRecord
from noisescale.report.answers import critical_or_least
from noisescale.report.drawing import (
    BLACK,
    BLUE,
    DOTTED,
    GREY,
    VERMILLION,
    Point,
    draw_area,
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
    value, resolved = p.run.noise_scale, p.run.resolved > 0
    shown = _extremes(np.where(resolved, value, p.run.low), resolved)
    floor, top = _range(p, resolved)
    unit = escape(p.unit)
    drawn = figure(
        _finding(p),
        f"Line: of each time of the run. Shaded: its {100 * p.confidence:g} % interval; open"
        " upwards where the noise scale is not resolved.",
        {"title": {"text": "optimizer steps"}, "rangemode": "tozero"},
        log_axis(f"noise scale, batch size ({unit})", floor, top),
    )
    if resolved.any():
        name = f"{100 * p.confidence:g} % interval"
        draw_area(drawn, name, _band(p, shown, resolved, floor, top))
    if not resolved.all():
        draw_area(
            drawn,
            "not resolved: above",
            _open_band(p, shown, ~resolved, floor, top),
            fillcolor="rgba(0, 0, 0, 0)",
            fillpattern={"shape": "/", "fgcolor": GREY, "size": 9, "solidity": 0.12},
            line=DOTTED,
        )
    _draw_logged(drawn, p)
    if resolved.any():
        width, shape = 2 if len(shown) == len(value) else 1, "linear" if p.run.as_logged else "vh"
        drawn.add_scatter(
            **_where(resolved, p, value, shown),
            name="noise scale",
            mode="lines" if resolved.sum() > 1 else "markers",
            line={"color": BLUE, "width": width, "shape": shape},
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


def _where(
    known: NDArray[np.bool_], p: PredictionRecord, value: Array, rows: NDArray[np.intp]
) -> dict[str, list[float | None]]:
    """Values over their steps, with gaps where they are not known."""
    y = [v if ok else None for v, ok in zip(value[rows], known[rows], strict=True)]
    return {"x": p.history["step"][rows].tolist(), "y": y}


def _segments(
    p: PredictionRecord, shown: NDArray[np.intp], kind: NDArray[np.bool_]
) -> Iterator[tuple[list[float], NDArray[np.intp]]]:
    """Neighbouring rows of one kind: each with the steps from before its first row on."""
    steps = [0.0, *p.history["step"][shown]]
    ends = np.flatnonzero(np.diff(kind[shown].astype(int), prepend=0, append=0))
    for first, end in zip(ends[::2], ends[1::2], strict=True):
        yield steps[first : end + 1], shown[first:end]


def _band(
    p: PredictionRecord, shown: NDArray[np.intp], kind: NDArray[np.bool_], floor: float, top: float
) -> Iterator[Point]:
    for steps, rows in _segments(p, shown, kind):
        low, high = (end[rows].clip(floor / 10, top * 10) for end in (p.run.low, p.run.high))
        yield from zip(steps, [low[0], *low], strict=True)
        yield from zip(steps[::-1], [*high[::-1], high[0]], strict=True)
        yield None, None


def _open_band(
    p: PredictionRecord, shown: NDArray[np.intp], kind: NDArray[np.bool_], floor: float, top: float
) -> Iterator[Point]:
    """From the lower bound to the top of the axis, and beyond."""
    for steps, rows in _segments(p, shown, kind):
        low = p.run.low[rows].clip(floor / 10, top)
        yield from zip(steps, [low[0], *low], strict=True)
        yield from ((steps[-1], top * 10), (steps[0], top * 10), (None, None))


def _draw_logged(drawn: go.Figure, p: PredictionRecord) -> None:
    """The estimates as they were logged, where others are predicted from."""
    value, high = p.history["noise_scale"], p.history["high"]
    resolved = np.isfinite(value) & np.isfinite(high)
    if p.run.as_logged or not resolved.any():
        return
    rows = _extremes(np.where(resolved, value, 0.0), resolved)
    drawn.add_scatter(
        **_where(resolved, p, value, rows),
        name="as logged: averaged over what had been",
        mode="lines",
        line=DOTTED,
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
    if not 0 < (at := critical_or_least(p)) < math.inf:
        return
    drawn.add_scatter(
        x=[0.0, float(p.history["step"][-1])],
        y=[at, at],
        name=f"critical batch size {banded(p.critical_batch_size)}",
        mode="lines",
        line={"color": VERMILLION, "width": 2, "dash": "dash" if p.resolved else "dot"},
        hoverinfo="name",
    )


def _finding(p: PredictionRecord) -> str:
    own, unit = p.own_batch_size, escape(p.unit)
    beside = f", batch size {count(own)}" if own else ""
    if not math.isfinite(p.critical_batch_size_by_noise_scale.value):
        least = p.critical_batch_size_by_noise_scale.low
        known = f": at least {number(least)} {unit}" if least else ""
        return f"Noise scale not resolved{known}{beside}"
    # What is not resolved is above its bound: without it the median would be one of low values.
    typical = float(np.median(np.where(np.isnan(p.run.noise_scale), math.inf, p.run.noise_scale)))
    if math.isinf(typical):
        return f"Noise scale mostly not resolved{beside}"
    beside = f", {number(typical / own)} times the batch size" if own else ""
    return f"Noise scale {number(typical)} {unit} (median){beside}"
