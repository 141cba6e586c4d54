# SPDX-License-Identifier: Apache-2.0
"""Steps to the goal against batch size: the runs, the fitted curve, the three regimes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import plotly.graph_objects as go

from noisescale.bounded import Bounded
from noisescale.lab.compare.figures.styles import Style, styles_of
from noisescale.lab.compare.swept import Swept, SweptBatch
from noisescale.report.colours import BANDS, BLACK, GREY, GRID, SERIES
from noisescale.report.drawing import (
    PLOT_HEIGHT,
    Point,
    coordinates,
    draw_area,
    figure,
    log_axis,
    shown_text,
    size_axis,
    with_legend,
)
from noisescale.report.numbers import count, number, plural, two_digits, with_bounds
from noisescale.tradeoff.regime_marks import (
    NAME_HEIGHT,
    REGIMES,
    border_text,
    draw_border,
    draw_spans,
    is_seen,
    is_within,
    meeting,
    spans_of,
)

if TYPE_CHECKING:
    from noisescale.lab.compare.comparison import Comparison

_MARGIN, _MISSED, _ROW = 16.0, 22.0, 26.0
"""Pixels inside the axes: around the points, for batch sizes that missed the goal, and for the
borders of each submission."""

_POINTS = 290
"""Pixels that the points have at least."""

_NAMED = 3
"""Submissions that the finding names."""


class _Frame(NamedTuple):
    """The ends of the axes, with room below the points for borders, and above them for names."""

    left: float
    right: float
    bottom: float
    top: float
    height: float
    """Pixels between the axes."""
    floor: float
    """Steps below which there are only borders."""

    def above(self, pixels: float) -> float:
        """Return the steps that are drawn this far above the axis of batch sizes."""
        return float(self.bottom * (self.top / self.bottom) ** (pixels / self.height))

    def below(self, pixels: float) -> float:
        """Return the steps that are drawn this far below the upper end."""
        return self.above(self.height - pixels)


def steps_figure(c: Comparison, workload: str) -> go.Figure | None:
    """Draw the steps to the goal against the batch size; None if it was reached at no batch size.

    The regimes are those of Shallue et al. 2019, arXiv:1811.03600. Where they meet is said by
    `find_regimes`. Of one submission they are shaded, of several only their borders are marked.
    """
    sweeps = [each for each in c.sweeps if each.workload == workload]
    if not any(batch.steps for each in sweeps for batch in each.batches):
        return None
    of, alone = styles_of(c), len(sweeps) == 1
    sizes = [batch.batch_size for each in sweeps for batch in each.batches]
    around = max((max(sizes) / min(sizes)) ** 0.07, 1.2)
    left, right = min(sizes) / around, max(sizes) * around
    found = sweeps[0].regimes if alone else None
    spans = [] if found is None else spans_of(found, left, right)
    names = NAME_HEIGHT * (1 + max((span.row for span in spans), default=-1))
    frame = _frame(sweeps, left, right, names)
    drawn = figure(
        _finding(sweeps, of),
        _caption(sweeps, c.confidence),
        size_axis("batch size (examples)", sizes, left, right),
        _y_axis(f"steps to {shown_text(str(c.goals[workload]))}", frame),
    )
    draw_spans(drawn, spans)
    if frame.floor > frame.bottom:
        drawn.add_hline(y=frame.floor, line={"color": GRID, "width": 1})
    for each in sweeps:
        style = of[each.submission]
        _draw_band(drawn, each, style, alone=alone)
        _draw_perfect(drawn, each, style, frame, alone=alone)
        _draw_course(drawn, each, style, alone=alone)
        _draw_runs(drawn, each, style, alone=alone)
        _draw_missed(drawn, each, style, frame.below(names + 10))
    known = [(each, each.regimes) for each in sweeps if each.regimes is not None]
    for row, (each, regimes) in enumerate(reversed(known)):
        borders = regimes.perfect_up_to, regimes.maximal_from
        _draw_borders(drawn, each, borders, of[each.submission], frame, row, alone=alone)
    return with_legend(drawn, frame.height)


def _frame(sweeps: Sequence[Swept], left: float, right: float, names: float) -> _Frame:
    """Return ends that give points their margins in pixels, whatever decades they cover."""
    batches = [batch for each in sweeps for batch in each.batches]
    steps = [each for batch in batches for each in batch.steps]
    for each in sweeps:
        steps += [end for _, band in _band(each) for end in (band.low, band.high)]
    missed = any(batch.best.reached is None for batch in batches)
    above = _MARGIN + names + _MISSED * missed
    below = _MARGIN + _ROW * sum(each.regimes is not None for each in sweeps)
    height = max(PLOT_HEIGHT, _POINTS + above + below)
    inside = height - above - below
    spread = max(max(steps) / min(steps), 2.0)
    low = math.sqrt(max(steps) * min(steps) / spread)
    bottom, top = low / spread ** (below / inside), low * spread ** (1 + above / inside)
    return _Frame(left, right, bottom, top, height, low / spread ** (_MARGIN / inside))


def _y_axis(title: str, frame: _Frame) -> dict[str, Any]:
    """Return an axis without ticks beside the borders."""
    axis = log_axis(title, frame.bottom, frame.top)
    ticks = zip(axis["tickvals"], axis["ticktext"], strict=True)
    kept = [(tick, text) for tick, text in ticks if tick >= frame.floor]
    return axis | {
        "title": {"text": title, "standoff": 12},
        "tickvals": [tick for tick, _ in kept],
        "ticktext": [text for _, text in kept],
    }


def _draw_perfect(
    drawn: go.Figure, each: Swept, style: Style, frame: _Frame, *, alone: bool
) -> None:
    """Draw half the steps at twice the batch size: of the fitted curve, or from the first point."""
    known = [batch for batch in each.batches if batch.steps]
    if not known:
        return
    examples = known[0].batch_size * known[0].best.at("steps")
    if each.regimes is not None and 0 < each.regimes.min_examples.value < math.inf:
        examples = each.regimes.min_examples.value
    right = min(frame.right, examples / frame.floor)
    drawn.add_scatter(
        x=[frame.left, right],
        y=[examples / frame.left, examples / right],
        name="perfect scaling: half the steps at twice the batch size",
        legendgroup="perfect scaling" if alone else style.name,
        showlegend=alone,
        mode="lines",
        opacity=1.0 if alone else 0.6,
        line={"color": GREY if alone else style.colour, "width": 1.5, "dash": "dash"},
        hoverinfo="skip",
    )


def _draw_band(drawn: go.Figure, each: Swept, style: Style, *, alone: bool) -> None:
    """Fill the area in which the fitted curve may lie."""
    band = _band(each)
    if not band:
        return
    lower = [(size, steps.low) for size, steps in band]
    upper = [(size, steps.high) for size, steps in band]
    draw_area(
        drawn,
        "bounds of the curve" if alone else style.label,
        [*lower, *reversed(upper)],
        legendgroup="fitted curve" if alone else style.name,
        showlegend=alone,
        fillcolor=BANDS[SERIES.index(style.colour)],
    )


def _band(each: Swept) -> list[tuple[float, Bounded]]:
    """Return the fitted curve with its bounds, over the batch sizes that count."""
    if each.regimes is None:
        return []
    counting = [batch.batch_size for batch in each.batches if batch.counts]
    sizes: list[float] = np.geomspace(min(counting), max(counting), 121).tolist()
    return [(size, each.regimes.steps_with_bounds(size)) for size in sizes]


def _draw_course(drawn: go.Figure, each: Swept, style: Style, *, alone: bool) -> None:
    """Draw the fitted curve, or without one a thin line from each batch size to the next."""
    found = each.regimes
    if found is None:
        known = [batch for batch in each.batches if batch.steps]
        points: list[Point] = [(batch.batch_size, batch.best.at("steps")) for batch in known]
        line: dict[str, Any] = {"width": 1, "dash": "dot"}
    else:
        points = [(size, steps.value) for size, steps in _band(each)]
        line = {"width": 2.5}
    drawn.add_scatter(
        **coordinates(points),
        name="fitted curve" if alone else style.label,
        legendgroup="fitted curve" if alone else style.name,
        showlegend=alone and found is not None,
        mode="lines",
        line={"color": style.colour} | line,
        hoverinfo="skip",
    )


def _draw_runs(drawn: go.Figure, each: Swept, style: Style, *, alone: bool) -> None:
    """Mark each repetition of the best setting of each batch size; hollow if it does not count."""
    runs = [(batch, steps) for batch in each.batches for steps in batch.steps]
    drawn.add_scatter(
        **coordinates((batch.batch_size, steps) for batch, steps in runs),
        name="runs at the best setting" if alone else style.label,
        legendgroup="runs" if alone else style.name,
        mode="markers",
        marker={
            "symbol": [style.symbol if b.counts else f"{style.symbol}-open" for b, _ in runs],
            "size": 9,
            "color": style.colour,
            "line": {"width": 1.5, "color": style.colour},
        },
        hovertext=[
            f"{_hover_text(batch, style)}<br>{plural(steps, 'step')}{_fitted_text(each, batch)}"
            for batch, steps in runs
        ],
        hoverinfo="text",
    )


def _draw_missed(drawn: go.Figure, each: Swept, style: Style, at: float) -> None:
    """Batch sizes at which the goal was missed, at the upper end."""
    missed = [batch for batch in each.batches if batch.best.reached is None]
    if not missed:
        return
    drawn.add_scatter(
        x=[batch.batch_size for batch in missed],
        y=[at] * len(missed),
        name=style.label,
        legendgroup=style.name,
        showlegend=False,
        mode="markers",
        marker={
            "symbol": "x-thin-open",
            "size": 10,
            "color": style.colour,
            "line": {"width": 2.5, "color": style.colour},
        },
        hovertext=[f"{_hover_text(batch, style)}<br>goal not reached" for batch in missed],
        hoverinfo="text",
    )


def _draw_borders(
    drawn: go.Figure,
    each: Swept,
    borders: tuple[Bounded, Bounded],
    style: Style,
    frame: _Frame,
    row: int,
    *,
    alone: bool,
) -> None:
    """Draw where perfect scaling ends, and below it where maximal data parallelism begins."""
    marks = (
        (f"{REGIMES[0]} up to", "triangle-left", 18),
        (f"{REGIMES[2]} from", "triangle-right", 7),
    )
    for border, (what, symbol, height) in zip(borders, marks, strict=True):
        if not is_seen(border):
            continue
        said = f"{what} {border_text(border, each.ends)}"
        draw_border(
            drawn,
            border,
            frame.above(_ROW * row + height),
            (frame.left, frame.right),
            symbol,
            BLACK if alone else style.colour,
            name=said if alone else style.label,
            legendgroup=what if alone else style.name,
            showlegend=alone,
            hovertext=said if alone else f"{style.label}<br>{said}",
        )


def _hover_text(batch: SweptBatch, style: Style) -> str:
    """Write what was tried at a batch size, for a label under the pointer."""
    said = [f"<b>batch size {count(batch.batch_size)}</b>"]
    if style.name:
        said.insert(0, style.label)
    rate = batch.best.trial.learning_rate
    if rate > 0 and batch.steps:
        edge = {"low": ", the lowest of all", "high": ", the highest of all"}.get(batch.edge, "")
        said.append(f"learning rate {rate:.3g}{edge}")
    said.append(f"{count(batch.reached)} of {plural(batch.tried, 'run')} reached the goal")
    if batch.diverged:
        said.append(f"{count(batch.diverged)} diverged or failed")
    return "<br>".join(said)


def _fitted_text(each: Swept, batch: SweptBatch) -> str:
    """Write the fitted curve with its bounds, for a label under the pointer."""
    if each.regimes is None or not batch.counts:
        return ""
    return f"<br>fitted curve: {with_bounds(each.regimes.steps_with_bounds(batch.batch_size))}"


def _finding(sweeps: Sequence[Swept], of: dict[str, Style]) -> str:
    if len(sweeps) == 1:
        return _finding_of_one(sweeps[0])
    fewest = {
        each.submission: min((batch for batch in each.batches if batch.steps), key=_steps)
        for each in sweeps
        if any(batch.steps for batch in each.batches)
    }
    ranked = sorted(fewest.items(), key=lambda item: _steps(item[1]))
    return "Fewest steps: " + ", ".join(
        f"{count(_steps(batch))} with {of[submission].label} at batch size"
        f" {count(batch.batch_size)}"
        for submission, batch in ranked[:_NAMED]
    )


def _finding_of_one(each: Swept) -> str:
    found = each.regimes
    if found and all(is_within(b, each.ends) for b in (found.perfect_up_to, found.maximal_from)):
        perfect, maximal = map(number, meeting(found))
        if perfect == maximal:
            return f"Scaling is perfect up to a batch size of about {perfect}, where it ends"
        return (
            f"Scaling is perfect up to a batch size of about {perfect}. Beyond about {maximal}"
            " larger batches save few steps"
        )
    known = [batch for batch in each.batches if batch.steps]
    first, last = known[0], known[-1]
    if first is last:
        return f"The goal is reached at batch size {count(first.batch_size)} alone"
    times = count(round(last.batch_size / first.batch_size, 6))
    ratio = _steps(last) / _steps(first)
    share = f"1/{two_digits(1 / ratio)} of" if ratio < 1 else f"{two_digits(ratio)} times"
    sizes = f"from {count(first.batch_size)} to {count(last.batch_size)}"
    return f"{times} times the batch size, {sizes}, takes {share} the steps"


def _steps(batch: SweptBatch) -> float:
    return batch.best.at("steps")


def _caption(sweeps: Sequence[Swept], confidence: float) -> str:
    batches = [batch for each in sweeps for batch in each.batches]
    alone = len(sweeps) == 1
    said = []
    if not alone:
        said.append("Lines: the curve fitted to each submission. Dashed: its perfect scaling.")
    if any(each.regimes is not None for each in sweeps):
        said.append(
            f"Band: where the curve may lie at each batch size ({100 * confidence:.4g} %). Runs"
            " scatter around it, and may lie outside."
        )
    if any(batch.counts and not batch.searched for batch in batches):
        said.append("Better learning rates may need fewer steps: they were not searched.")
    if any(batch.edge for batch in batches):
        said.append(
            "Hollow: not counted, the best learning rate is at the edge of those that were tried."
        )
    if any(batch.unsearched for batch in batches):
        said.append("Hollow: not counted, at most one learning rate is known.")
    if any(batch.best.reached is None for batch in batches):
        said.append("Crosses: goal not reached.")
    if any(
        is_seen(border)
        for each in sweeps
        if each.regimes is not None
        for border in (each.regimes.perfect_up_to, each.regimes.maximal_from)
    ):
        said.append(
            "Triangles at the foot: where perfect scaling ends (to the left) and maximal data"
            " parallelism begins (to the right), with bounds; an arrow is an open end."
        )
    return " ".join(said) or "Each point is a run at the best setting of its batch size."
