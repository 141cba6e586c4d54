# SPDX-License-Identifier: Apache-2.0
"""The metric along all trials of a workload, and where each submission reached the goal."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import plotly.graph_objects as go

from noisescale.lab.compare.figures.styles import Style, styles_of
from noisescale.lab.compare.measurements import Array
from noisescale.lab.compare.names import Clock, clock_of
from noisescale.lab.compare.outcomes import Outcome, Standing
from noisescale.lab.compare.statements import statement_of_workload
from noisescale.report.colours import BLACK
from noisescale.report.drawing import (
    FAILED_MARKER,
    LEVEL,
    extremes,
    figure,
    log_axis,
    shown_name,
    shown_text,
    with_legend,
)
from noisescale.report.numbers import number, plural

if TYPE_CHECKING:
    from noisescale.lab.compare.comparison import Comparison

MOST_CURVES = 60
"""The most trials that are drawn. The best are drawn: others would hide them."""

MOST_POINTS = 500
"""The most points of a curve. A longer one is drawn by its ends and the extremes of its parts."""

_WIDE = 10.0
"""A falling metric whose values differ by this factor has a logarithmic axis, as have times."""

_BEFORE = 30.0
"""A logarithmic axis of times begins at most this factor before the goal was reached."""

_FARTHEST = 1e300
"""The largest end of an axis: the length of a longer one might not be finite."""

_TITLES = {
    "steps": "optimizer steps",
    "examples": "examples processed",
    "epochs": "epochs",
}

_BEST, _COUNTING, _OTHER = range(3)
"""A trial is the submission's time, or one of those that its time is the middle of, or neither."""


class _Curve(NamedTuple):
    """A trial, with times in the unit of the axis."""

    outcome: Outcome
    style: Style
    x: Array
    y: Array
    at: float
    """When it reached the goal; infinite if it missed it."""
    rank: int


def curves_figure(c: Comparison, workload: str) -> go.Figure | None:
    """Draw the metric of every trial against the clock that counts; None if none is known."""
    standings, goal = c.standings_of(workload), c.goals[workload]
    # Where no goal was reached, a clock may count that is not known of any trial.
    clock, every = clock_of(c, c.clock), _curves(c, standings, clock_of(c, c.clock))
    if not every:
        clock, every = clock_of(c, "steps"), _curves(c, standings, clock_of(c, "steps"))
    if not every:
        return None
    curves = sorted(every, key=_order)[:MOST_CURVES]
    x_axis = _x_axis(curves, clock)
    drawn = figure(
        shown_text(f"{goal}: {statement_of_workload(c, workload).sentence}"),
        _caption(standings, clock, curves, len(every)),
        x_axis,
        _y_axis(curves, goal.value, falls=goal.side == "<"),
    )
    for place, curve in reversed([*enumerate(curves)]):  # the best on top, and first in the legend
        _draw_curve(drawn, curve, clock, place)
    drawn.add_scatter(
        x=[
            10 ** x_axis["range"][0] if "range" in x_axis else 0.0,
            max(float(curve.x[-1]) for curve in curves),
        ],
        y=[goal.value, goal.value],
        name=f"goal: {shown_text(str(goal))}",
        mode="lines",
        line={"color": BLACK, "width": 1.5, "dash": "dash"},
        hoverinfo="skip",
    )
    for curve in curves:
        if curve.rank == _BEST and curve.outcome.reached is not None:
            _draw_reached(drawn, curve, curve.outcome.reached.value, clock)
    _draw_diverged(drawn, [curve for curve in curves if curve.outcome.trial.diverged])
    return with_legend(drawn)


def _curves(c: Comparison, standings: Sequence[Standing], clock: Clock) -> list[_Curve]:
    """Return the trials whose metric and clock are known at some evaluation."""
    of, found = styles_of(c), []
    for standing in standings:
        for outcome in standing.outcomes:
            times = outcome.trial.measurements.clock(clock.name)
            values = outcome.trial.measurements.values
            known = np.isfinite(values) & np.isfinite(math.nan if times is None else times)
            if times is None or not known.any():
                continue
            rank = _COUNTING if outcome in standing.counting else _OTHER
            rank = _BEST if outcome is standing.best else rank
            x, at = clock.factor * times[known], clock.factor * outcome.at(clock.name)
            found.append(_Curve(outcome, of[standing.submission], x, values[known], at, rank))
    return found


def _order(curve: _Curve) -> tuple[float, ...]:
    """Order by what counts, then by when the goal was reached, then by how near it was."""
    return curve.rank, curve.at, curve.outcome.rank("steps")[1]


def _x_axis(curves: Sequence[_Curve], clock: Clock) -> dict[str, Any]:
    """Return an axis from 0, or a logarithmic one where the fastest would be lost on it."""
    title = _TITLES.get(clock.name, f"time ({clock.unit.name})")
    near = min([curve.at for curve in curves if curve.at < math.inf], default=math.inf)
    far = max(float(curve.x[-1]) for curve in curves)
    if not 0 < _WIDE * near <= far:
        return {"title": {"text": title}, "rangemode": "tozero"}
    first = min(float(curve.x[curve.x > 0][0]) for curve in curves if curve.x[-1] > 0)
    return LEVEL | log_axis(title, max(first, near / _BEFORE) / 1.1, far * 1.1)


def _y_axis(curves: Sequence[_Curve], goal: float, *, falls: bool) -> dict[str, Any]:
    """Return an axis from the best value of all to the worst of the trials that count.

    A trial that diverged may leave it.
    """
    whole = [curve for curve in curves if not curve.outcome.trial.diverged] or curves
    least = min(curve.rank for curve in whole)
    ends = [goal]
    for curve in curves:
        ends.append(float(curve.y.min() if falls else curve.y.max()))
    for curve in whole:
        if curve.rank == least:
            ends.append(float(curve.y.max() if falls else curve.y.min()))
    low, high = np.clip([min(ends), max(ends)], -_FARTHEST, _FARTHEST).tolist()
    title = shown_text(curves[0].outcome.goal.metric)
    if falls and low > 0 and high >= _WIDE * low:
        around = (high / low) ** 0.05
        return log_axis(title, low / around, high * around)
    around = 0.05 * ((high - low) or abs(high) or 1.0)
    return {"title": {"text": title}, "range": [low - around, high + around]}


def _draw_curve(drawn: go.Figure, curve: _Curve, clock: Clock, place: int) -> None:
    rows = extremes(curve.y, np.ones(len(curve.y), dtype=bool), MOST_POINTS - 2)
    rows = np.union1d(rows, [0, len(curve.y) - 1])
    style, outcome = curve.style, curve.outcome
    when = "not reached" if outcome.reached is None else clock.say(outcome.at(clock.name))
    digits = 3 if clock.name == "seconds" else 6
    drawn.add_scatter(
        x=curve.x[rows].tolist(),
        y=curve.y[rows].tolist(),
        name=f"{style.label}: {when}",
        legendgroup=style.name,
        legendrank=place + 1,
        showlegend=curve.rank == _BEST,
        mode="lines" if len(rows) > 1 else "markers",
        opacity=(1.0, 0.75, 0.3)[curve.rank],
        line={"color": style.colour, "width": (2.5, 1.5, 1)[curve.rank], "dash": style.dash},
        marker={"color": style.colour},
        text=shown_name(outcome.trial.name),
        hovertemplate=f"%{{fullData.text}}<br>%{{x:,.{digits}~r}} {clock.unit_name}:"
        " %{y:,.4~r}<extra></extra>",
    )


def _draw_reached(drawn: go.Figure, curve: _Curve, value: float, clock: Clock) -> None:
    style, when = curve.style, clock.say(curve.outcome.at(clock.name))
    drawn.add_scatter(
        x=[curve.at],
        y=[value],
        name=style.label,
        legendgroup=style.name,
        showlegend=False,
        mode="markers",
        marker={
            "symbol": style.symbol,
            "size": 11,
            "color": style.colour,
            "line": {"width": 1.5, "color": BLACK},
        },
        hovertext=[f"{style.label}<br>reached the goal: {when}, {number(value)}"],
        hoverinfo="text",
    )


def _draw_diverged(drawn: go.Figure, curves: Sequence[_Curve]) -> None:
    """Draw a cross where a trial ended, or at the edge of the figure if it ended beyond."""
    if not curves:
        return
    axis = drawn.layout.yaxis
    ends = [10**end if axis.type == "log" else end for end in axis.range]
    drawn.add_scatter(
        x=[float(curve.x[-1]) for curve in curves],
        y=[float(np.clip(curve.y[-1], *ends)) for curve in curves],
        name="diverged or failed",
        mode="markers",
        cliponaxis=False,
        marker=FAILED_MARKER,
        hovertext=[
            f"{shown_name(curve.outcome.trial.name)}<br>diverged or failed; the last number is"
            f" {number(float(curve.y[-1]))}"
            for curve in curves
        ],
        hoverinfo="text",
    )


def _caption(
    standings: Sequence[Standing], clock: Clock, curves: Sequence[_Curve], known: int
) -> str:
    every = sum(len(standing.outcomes) for standing in standings)
    said = []
    if len({curve.rank for curve in curves}) > 1:
        said.append("Thick: the run that stands for its submission. Thin: the other runs.")
    if any(standing.best.reached is not None for standing in standings):
        said.append("Large symbols: where the goal was reached.")
    if known > len(curves):
        said.append(f"Drawn are the best {len(curves)} of {plural(known, 'run')}.")
    if every > known:
        what = "the metric" if clock.name == "steps" else f"the metric or its {clock.name}"
        said.append(f"{plural(every - known, 'run is', 'runs are')} left out: {what} is not known.")
    return " ".join(said) or "One line for each run."
