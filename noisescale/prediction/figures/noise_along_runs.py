# SPDX-License-Identifier: Apache-2.0
"""The noise scale along one run, or along several, with its interval, beside the batch size."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from html import escape
from typing import TYPE_CHECKING

import numpy as np
import plotly.graph_objects as go
from numpy.typing import NDArray

from noisescale.history.segments import Array
from noisescale.report.colours import (
    BLACK,
    BLUE,
    GREY,
    NOTHING,
    RUN_BANDS,
    RUNS,
    VERMILLION,
)
from noisescale.report.drawing import (
    DASHES,
    DOTTED,
    Point,
    draw_area,
    extremes,
    figure,
    shown_name,
    size_axis,
    with_legend,
)
from noisescale.report.numbers import count, number, with_bounds

if TYPE_CHECKING:
    from noisescale.prediction.prediction import Prediction

ACROSS = ("step", "examples")
"""Columns of a history that a run can be drawn over."""

MOST_BANDS = 4
"""The most runs with intervals. Intervals of more runs would hide each other."""

_AXES = {"step": "optimizer steps", "examples": "{unit} processed"}


@dataclass(frozen=True)
class NoiseCurve:
    """The noise scale as it was shown at each row of a run, with gaps where none was shown."""

    p: Prediction
    across: str = "step"
    """One of `ACROSS`."""

    @cached_property
    def estimates(self) -> tuple[Array, Array, Array]:
        """The noise scale, and the lower and the upper end of its interval."""
        value, low, high = (self.p.history[name] for name in ("noise_scale", "low", "high"))
        return value, low, high

    @cached_property
    def resolved(self) -> NDArray[np.bool_]:
        """Rows whose noise scale is resolved."""
        return np.asarray(np.isfinite(self.estimates).all(axis=0))

    @cached_property
    def is_open(self) -> NDArray[np.bool_]:
        """Rows that have a lower bound alone."""
        return np.isfinite(self.estimates[1]) & ~self.resolved

    @cached_property
    def rows(self) -> NDArray[np.intp]:
        """Rows that are drawn."""
        value, low, _ = self.estimates
        return extremes(np.where(self.resolved, value, np.nan_to_num(low)), self.resolved)

    @property
    def end(self) -> float:
        """The last place on the axis."""
        return float(self.p.history[self.across][-1])

    @property
    def width(self) -> int:
        """The width of the line: thin where not all rows are drawn."""
        return 2 if len(self.rows) == len(self.resolved) else 1

    @property
    def mode(self) -> str:
        """Lines; a marker for a single point, which is no line."""
        return "markers" if self.resolved.sum() == 1 else "lines"

    def line(self) -> dict[str, list[float | None]]:
        """Return the resolved noise scale."""
        return self.values(self.estimates[0], self.resolved)

    def batch_size(self) -> dict[str, list[float | None]]:
        """Return the batch size, from the start of the run on."""
        size = self.p.run.batch_size
        rows = extremes(size, np.ones(len(size), dtype=bool))
        places = [self._place_before(rows[0]), *self.p.history[self.across][rows].tolist()]
        return {"x": places, "y": [size[rows[0]], *size[rows].tolist()]}

    def least(self) -> dict[str, list[float | None]]:
        """Return the lower bound, where nothing else is known."""
        return self.values(self.estimates[1], self.is_open)

    def values(self, value: Array, known: NDArray[np.bool_]) -> dict[str, list[float | None]]:
        """Return any value of the rows, with gaps where it is not known."""
        rows = self.rows
        y = [v if ok else None for v, ok in zip(value[rows], known[rows], strict=True)]
        return {"x": self.p.history[self.across][rows].tolist(), "y": y}

    def range(self) -> tuple[float, float]:
        """Return the ends of an axis for all but outliers, without most of wide intervals."""
        (value, low, high), resolved = self.estimates, self.resolved
        centres = [self.p.run.batch_size, value[resolved], low[self.is_open]]
        sure = _positive(np.array([*np.concatenate(centres), self.p.critical_batch_size.low]))
        least, most = np.quantile(sure, [0.002, 0.998]) if sure.size else (1.0, 1.0)
        lows, highs = _positive(low), _positive(high[resolved])
        floor = max(np.quantile(lows, 0.02), least / 4) if lows.size else least
        top = min(np.quantile(highs, 0.98), most * 4) if highs.size else most
        room = 3.0 if self.is_open.any() else 1.5
        return float(min(floor, least)) / 1.5, float(max(top, most)) * room

    def band(self, floor: float, top: float) -> Iterator[Point]:
        """Yield the outline of the intervals, where the noise scale is resolved.

        Args:
            floor: Lower end of the axis.
            top: Its upper end.
        """
        for places, rows in self._segments(self.resolved):
            low, high = (end[rows].clip(floor / 10, top * 10) for end in self.estimates[1:])
            yield from zip(places, [low[0], *low], strict=True)
            yield from zip(places[::-1], [*high[::-1], high[0]], strict=True)
            yield None, None

    def open_band(self, floor: float, top: float) -> Iterator[Point]:
        """Yield the outline from the lower bound to beyond the axis, where it is not resolved."""
        for places, rows in self._segments(self.is_open):
            low = self.estimates[1][rows].clip(floor / 10, top)
            yield from zip(places, [low[0], *low], strict=True)
            yield from ((places[-1], top * 10), (places[0], top * 10), (None, None))

    def _segments(self, kind: NDArray[np.bool_]) -> Iterator[tuple[list[float], NDArray[np.intp]]]:
        """Neighbouring rows of one kind: each with the places from before its first row on."""
        places = [0.0, *self.p.history[self.across][self.rows]]
        ends = np.flatnonzero(np.diff(kind[self.rows].astype(int), prepend=0, append=0))
        for first, end in zip(ends[::2], ends[1::2], strict=True):
            yield places[first : end + 1], self.rows[first:end]

    def _place_before(self, row: np.intp) -> float:
        run = self.p.run
        done = run.steps[row] * (run.batch_size[row] if self.across == "examples" else 1.0)
        return float(self.p.history[self.across][row] - done)


def noise_scale_figure(p: Prediction) -> go.Figure:
    """Draw the noise scale as it was shown, the batch size and the critical one.

    Where the noise scale is not resolved there is no line, and the area from its lower bound to
    the top of the figure is hatched.
    """
    curve = NoiseCurve(p)
    resolved = curve.resolved
    floor, top = curve.range()
    unit = escape(p.unit)
    drawn = figure(
        _finding_of_one(p),
        f"Line: as it was shown at each step. Shaded: its {100 * p.confidence:g} % interval then;"
        " open upwards where there was only a lower bound.",
        {"title": {"text": "optimizer steps"}, "rangemode": "tozero"},
        size_axis(f"noise scale, batch size ({unit})", [p.run_batch_size], floor, top),
    )
    if resolved.any():
        draw_area(drawn, f"{100 * p.confidence:g} % interval", curve.band(floor, top))
    if curve.is_open.any():
        draw_area(
            drawn,
            "only a lower bound yet: above",
            curve.open_band(floor, top),
            fillcolor=NOTHING,
            fillpattern={"shape": "/", "fgcolor": GREY, "size": 9, "solidity": 0.12},
            line=DOTTED,
        )
    if resolved.any():
        drawn.add_scatter(
            **curve.line(),
            name="noise scale",
            mode=curve.mode,
            line={"color": BLUE, "width": curve.width},
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


def _finding_of_one(p: Prediction) -> str:
    own, unit, now = p.own_batch_size, escape(p.unit), p.noise_scale_now
    beside = f", batch size {count(own)}" if own else ""
    if not now.known:
        return f"Noise scale not measured{beside}"
    of = f" of {of_steps}" if (of_steps := p.steps_of_noise_scale) else " now"
    if math.isnan(now.value):
        return f"Noise scale{of}: at least {number(now.low)} {unit}{beside}"
    beside = f", {number(now.value / own)} times the batch size" if own else ""
    return f"Noise scale{of}: {with_bounds(now)} {unit}{beside}"


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
        size_axis(
            f"noise scale, batch size ({unit})", [p.run_batch_size for _, p, _ in runs], floor, top
        ),
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
    if any(curve.is_open.any() for _, curve, _ in curves):
        said.append("Dotted: the lower bound, where there is no more.")
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
    if curve.is_open.any():
        drawn.add_scatter(
            **curve.least(),
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
        line={"color": colour, "dash": dash, "width": 2.5},
        marker={"color": colour},
        hovertemplate=f"{at}: noise scale %{{y:,.3g}}<extra></extra>",
    )


def _positive(values: Array) -> Array:
    return values[(values > 0) & np.isfinite(values)]
