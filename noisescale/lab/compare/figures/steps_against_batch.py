# SPDX-License-Identifier: Apache-2.0
"""Steps to the goal against batch size: the runs, the fitted curve, the three regimes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import plotly.graph_objects as go

from noisescale.bounded import Bounded
from noisescale.lab.compare.figures.styles import Style, hover_text, styles_of
from noisescale.lab.compare.statements import statements_of_sweep
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
from noisescale.report.numbers import plural, with_bounds
from noisescale.tradeoff.regime_marks import (
    NAME_HEIGHT,
    REGIMES,
    border_text,
    draw_border,
    draw_spans,
    is_seen,
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


class _Sweep(NamedTuple):
    """A sweep, and how it is drawn."""

    swept: Swept
    style: Style
    alone: bool
    """Whether it is the only one. Then its parts are named, else the submission."""

    @property
    def reached_sizes(self) -> list[SweptBatch]:
        """The batch sizes that reached the goal."""
        return [batch for batch in self.swept.batches if batch.steps]

    def legend(self, part: str, group: str, *, shown: bool | None = None) -> dict[str, Any]:
        """Return what the legend says of a part, which it shows of the only sweep by default."""
        name, group = (part, group) if self.alone else (self.style.label, self.style.name)
        shown = self.alone if shown is None else shown
        return {"name": name, "legendgroup": group, "showlegend": shown}

    def band(self) -> list[tuple[float, Bounded]]:
        """Return the fitted curve with its bounds, over the batch sizes that count."""
        if self.swept.regimes is None:
            return []
        counting = [batch.batch_size for batch in self.swept.batches if batch.counts]
        sizes: list[float] = np.geomspace(min(counting), max(counting), 121).tolist()
        return [(size, self.swept.regimes.steps_with_bounds(size)) for size in sizes]


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
    swept, of = [each for each in c.sweeps if each.workload == workload], styles_of(c)
    sweeps = [_Sweep(each, of[each.submission], len(swept) == 1) for each in swept]
    if not any(each.reached_sizes for each in sweeps):
        return None
    sizes = [batch.batch_size for each in swept for batch in each.batches]
    around = max((max(sizes) / min(sizes)) ** 0.07, 1.2)
    left, right = min(sizes) / around, max(sizes) * around
    known = [(each, each.swept.regimes) for each in sweeps if each.swept.regimes is not None]
    spans = spans_of(known[0][1], left, right) if known and len(sweeps) == 1 else []
    names = NAME_HEIGHT * (1 + max((span.row for span in spans), default=-1))
    frame = _frame(sweeps, left, right, names)
    drawn = figure(
        _finding(sweeps),
        _caption(swept, c.confidence),
        size_axis("batch size (examples)", sizes, left, right),
        _y_axis(f"steps to {shown_text(str(c.goals[workload]))}", frame),
    )
    draw_spans(drawn, spans)
    if frame.floor > frame.bottom:
        drawn.add_hline(y=frame.floor, line={"color": GRID, "width": 1})
    for each in sweeps:
        _draw_band(drawn, each)
        _draw_perfect(drawn, each, frame)
        _draw_course(drawn, each)
        _draw_runs(drawn, each)
        _draw_missed(drawn, each, frame.below(names + 10))
    for row, (each, regimes) in enumerate(reversed(known)):
        borders = regimes.perfect_up_to, regimes.maximal_from
        _draw_borders(drawn, each, borders, frame, row)
    return with_legend(drawn, frame.height)


def _frame(sweeps: Sequence[_Sweep], left: float, right: float, names: float) -> _Frame:
    """Return ends that give points their margins in pixels, whatever decades they cover."""
    batches = [batch for each in sweeps for batch in each.swept.batches]
    steps = [each for batch in batches for each in batch.steps]
    steps += [end for one in sweeps for _, band in one.band() for end in (band.low, band.high)]
    missed = any(batch.best.reached is None for batch in batches)
    above = _MARGIN + names + _MISSED * missed
    below = _MARGIN + _ROW * sum(each.swept.regimes is not None for each in sweeps)
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


def _draw_perfect(drawn: go.Figure, one: _Sweep, frame: _Frame) -> None:
    """Draw half the steps at twice the batch size: of the fitted curve, or from the first point."""
    known, found = one.reached_sizes, one.swept.regimes
    if not known:
        return
    examples = known[0].batch_size * _steps(known[0])
    if found is not None and 0 < found.min_examples.value < math.inf:
        examples = found.min_examples.value
    right = min(frame.right, examples / frame.floor)
    drawn.add_scatter(
        x=[frame.left, right],
        y=[examples / frame.left, examples / right],
        mode="lines",
        opacity=1.0 if one.alone else 0.6,
        line={"color": GREY if one.alone else one.style.colour, "width": 1.5, "dash": "dash"},
        hoverinfo="skip",
        **one.legend("perfect scaling: half the steps at twice the batch size", "perfect scaling"),
    )


def _draw_band(drawn: go.Figure, one: _Sweep) -> None:
    """Fill the area in which the fitted curve may lie."""
    if band := one.band():
        lower = [(size, steps.low) for size, steps in band]
        upper = [(size, steps.high) for size, steps in band]
        legend = one.legend("bounds of the curve", "fitted curve")
        fill = BANDS[SERIES.index(one.style.colour)]
        draw_area(drawn, outline=[*lower, *reversed(upper)], fillcolor=fill, **legend)


def _draw_course(drawn: go.Figure, one: _Sweep) -> None:
    """Draw the fitted curve, or without one a thin line from each batch size to the next."""
    points: list[Point] = [(size, steps.value) for size, steps in one.band()]
    line: dict[str, Any] = {"width": 2.5}
    if one.swept.regimes is None:
        points = [(batch.batch_size, _steps(batch)) for batch in one.reached_sizes]
        line = {"width": 1, "dash": "dot"}
    drawn.add_scatter(
        **coordinates(points),
        mode="lines",
        line={"color": one.style.colour} | line,
        hoverinfo="skip",
        **one.legend(
            "fitted curve", "fitted curve", shown=one.alone and one.swept.regimes is not None
        ),
    )


def _draw_runs(drawn: go.Figure, one: _Sweep) -> None:
    """Mark each repetition of the best setting of each batch size; hollow if it does not count."""
    runs = [(batch, steps) for batch in one.swept.batches for steps in batch.steps]
    style = one.style
    drawn.add_scatter(
        **coordinates((batch.batch_size, steps) for batch, steps in runs),
        mode="markers",
        marker={
            "symbol": [style.symbol if b.counts else f"{style.symbol}-open" for b, _ in runs],
            "size": 9,
            "color": style.colour,
            "line": {"width": 1.5, "color": style.colour},
        },
        hovertext=[
            f"{hover_text(batch, style)}<br>{plural(steps, 'step')}{_fitted_text(one, batch)}"
            for batch, steps in runs
        ],
        hoverinfo="text",
        **one.legend("runs at the best setting", "runs", shown=True),
    )


def _draw_missed(drawn: go.Figure, one: _Sweep, at: float) -> None:
    """Mark batch sizes at which the goal was missed, at the upper end."""
    missed = [batch for batch in one.swept.batches if batch.best.reached is None]
    if missed:
        drawn.add_scatter(
            x=[batch.batch_size for batch in missed],
            y=[at] * len(missed),
            mode="markers",
            marker={
                "symbol": "x-thin-open",
                "size": 10,
                "color": one.style.colour,
                "line": {"width": 2.5, "color": one.style.colour},
            },
            hovertext=[f"{hover_text(batch, one.style)}<br>goal not reached" for batch in missed],
            hoverinfo="text",
            **one.legend(one.style.label, "missed", shown=False),
        )


def _draw_borders(
    drawn: go.Figure, one: _Sweep, borders: tuple[Bounded, Bounded], frame: _Frame, row: int
) -> None:
    """Draw where perfect scaling ends, and below it where maximal data parallelism begins."""
    marks = (
        (f"{REGIMES[0]} up to", "triangle-left", 18),
        (f"{REGIMES[2]} from", "triangle-right", 7),
    )
    for border, (what, symbol, height) in zip(borders, marks, strict=True):
        if is_seen(border):
            said = f"{what} {border_text(border, one.swept.ends)}"
            draw_border(
                drawn,
                border,
                frame.above(_ROW * row + height),
                (frame.left, frame.right),
                symbol,
                BLACK if one.alone else one.style.colour,
                hovertext=said if one.alone else f"{one.style.label}<br>{said}",
                **one.legend(said, what),
            )


def _fitted_text(one: _Sweep, batch: SweptBatch) -> str:
    """Write the fitted curve with its bounds, for a label under the pointer."""
    found = one.swept.regimes
    if found is None or not batch.counts:
        return ""
    return f"<br>fitted curve: {with_bounds(found.steps_with_bounds(batch.batch_size))}"


def _finding(sweeps: Sequence[_Sweep]) -> str:
    """Say the critical batch size of each, as the answers do."""
    said = [shown_text(statements_of_sweep(each.swept)[0].sentence) for each in sweeps]
    if len(sweeps) == 1:
        return f"Critical batch size: {said[0]}"
    named = [
        f"{sentence} with {each.style.label}" for each, sentence in zip(sweeps, said, strict=True)
    ]
    return f"Critical batch size: {', '.join(named[:_NAMED])}"


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
