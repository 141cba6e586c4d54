# SPDX-License-Identifier: Apache-2.0
"""The best learning rate of each batch size, beside the square root rule and the linear rule."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import plotly.graph_objects as go

from noisescale.lab.compare.figures.styles import Style, hover_text, styles_of
from noisescale.lab.compare.outcomes import Outcome
from noisescale.lab.compare.swept import Swept, SweptBatch
from noisescale.report.colours import GREY
from noisescale.report.drawing import (
    FAILED_MARKER,
    coordinates,
    figure,
    log_axis,
    size_axis,
    with_legend,
)
from noisescale.report.numbers import plural

if TYPE_CHECKING:
    from noisescale.lab.compare.comparison import Comparison

_RULES = (("linear rule: power 1", 1.0, "dash"), ("square root rule: power 0.5", 0.5, "dot"))

_NAMED = 3
"""Submissions that the finding names."""

_APART = 1.05
"""Factor on the batch size between submissions, which would hide each other."""


class _Search(NamedTuple):
    """The learning rates of a submission."""

    swept: Swept
    outcomes: Sequence[Outcome]
    style: Style
    aside: float
    """Factor on the batch sizes, for the eye alone."""

    @property
    def best(self) -> list[SweptBatch]:
        """Batch sizes that reached the goal, with a learning rate that is known."""
        known = [batch for batch in self.swept.batches if batch.steps]
        return [batch for batch in known if batch.best.trial.learning_rate > 0]

    @property
    def sizes_between(self) -> list[SweptBatch]:
        """Batch sizes whose best learning rate lies between others."""
        return [b for b in self.best if b.counts and b.searched]


def learning_rates_figure(c: Comparison, workload: str) -> go.Figure | None:
    """Draw the best learning rate against the batch size; None where no goal was reached.

    It is also None if no batch size has several learning rates: a rule that was used is no finding.
    """
    searched = _searches_of(c, workload)
    if not searched:
        return None
    sizes = [batch.batch_size for each in searched for batch in each.swept.batches]
    tried = [rate for each in searched for b in each.swept.batches for rate in b.learning_rates]
    around = max((max(sizes) / min(sizes)) ** 0.07, 1.2)
    left, right = min(sizes) / around, max(sizes) * around
    margin = max((max(tried) / min(tried)) ** 0.06, 1.3)
    drawn = figure(
        _finding(searched),
        _caption(searched),
        size_axis("batch size (examples)", sizes, left, right),
        log_axis("learning rate", min(tried) / margin, max(tried) * margin),
    )
    _draw_rules(drawn, searched, left, right)
    for each in searched:
        _draw_tried(drawn, each)
    for each in searched:
        _draw_best(drawn, each, alone=len(searched) == 1)
    _draw_diverged(drawn, searched)
    return with_legend(drawn)


def _searches_of(c: Comparison, workload: str) -> list[_Search]:
    of = styles_of(c)
    outcomes = {each.submission: each.outcomes for each in c.standings_of(workload)}
    found = [
        _Search(each, outcomes[each.submission], of[each.submission], 1.0)
        for each in c.sweeps
        if each.workload == workload
    ]
    found = [
        each for each in found if each.best and any(batch.searched for batch in each.swept.batches)
    ]
    middle = (len(found) - 1) / 2
    return [each._replace(aside=_APART ** (k - middle)) for k, each in enumerate(found)]


def _draw_rules(drawn: go.Figure, searched: Sequence[_Search], left: float, right: float) -> None:
    """Draw rules of scaling from the first point that was searched."""
    first = _first(searched[0])
    rate = first.best.trial.learning_rate
    for name, power, dash in _RULES:
        drawn.add_scatter(
            x=[left, right],
            y=[rate * (size / first.batch_size) ** power for size in (left, right)],
            name=name,
            mode="lines",
            line={"color": GREY, "width": 1.5, "dash": dash},
            hoverinfo="skip",
        )


def _first(each: _Search) -> SweptBatch:
    return (each.sizes_between or each.best)[0]


def _draw_tried(drawn: go.Figure, each: _Search) -> None:
    """Draw a vertical line over the learning rates of each batch size, with a tick at each."""
    batches = [batch for batch in each.swept.batches if batch.learning_rates]
    drawn.add_scatter(
        **coordinates(
            point
            for batch in batches
            for point in (
                *((batch.batch_size * each.aside, rate) for rate in batch.learning_rates),
                (None, None),
            )
        ),
        name=each.style.label,
        legendgroup=each.style.name,
        showlegend=False,
        mode="lines+markers",
        opacity=0.5,
        line={"color": each.style.colour, "width": 1},
        marker={"symbol": "line-ew-open", "size": 6, "color": each.style.colour},
        hoverinfo="skip",
    )


def _draw_best(drawn: go.Figure, each: _Search, *, alone: bool) -> None:
    style, found = each.style, {batch.batch_size for batch in each.sizes_between}
    drawn.add_scatter(
        x=[batch.batch_size * each.aside for batch in each.best],
        y=[batch.best.trial.learning_rate for batch in each.best],
        name="best learning rate" if alone else style.label,
        legendgroup=style.name,
        mode="lines+markers",
        line={"color": style.colour, "width": 1.5},
        marker={
            "symbol": [
                style.symbol if b.batch_size in found else f"{style.symbol}-open" for b in each.best
            ],
            "size": 10,
            "color": style.colour,
            "line": {"width": 1.5, "color": style.colour},
        },
        hovertext=[
            f"{hover_text(batch, style)}<br>{plural(batch.best.at('steps'), 'step')}"
            for batch in each.best
        ],
        hoverinfo="text",
    )


def _draw_diverged(drawn: go.Figure, searched: Sequence[_Search]) -> None:
    points = {
        (outcome.trial.batch_size * each.aside, outcome.trial.learning_rate)
        for each in searched
        for outcome in each.outcomes
        if outcome.trial.diverged and outcome.trial.batch_size > 0
        if outcome.trial.learning_rate > 0
    }
    if not points:
        return
    drawn.add_scatter(
        **coordinates(sorted(points)),
        name="diverged or failed",
        mode="markers",
        marker=FAILED_MARKER,
        hovertemplate="diverged or failed<br>learning rate %{y:.3~g}<extra></extra>",
    )


def _finding(searched: Sequence[_Search]) -> str:
    powers = [(each.style.label, power) for each in searched if (power := _power(each)) is not None]
    if not powers:
        return "The best learning rate is known at fewer than two batch sizes"
    alone = len(searched) == 1
    said = [f"{power:.2f}" if alone else f"{power:.2f} ({name})" for name, power in powers]
    rule = "The best learning rate goes with the batch size to the power"
    return f"{rule} {', '.join(said[:_NAMED])}"


def _power(each: _Search) -> float | None:
    """Return the slope of the line that fits best on logarithmic axes."""
    if len(each.sizes_between) < 2:
        return None
    sizes = np.log([batch.batch_size for batch in each.sizes_between])
    rates = np.log([batch.best.trial.learning_rate for batch in each.sizes_between])
    return round(float(np.polyfit(sizes, rates, 1)[0]), 2) + 0.0  # none is -0.00


def _caption(searched: Sequence[_Search]) -> str:
    batches = [batch for each in searched for batch in each.swept.batches]
    said = []
    if any(batch.searched for batch in batches):
        said.append("Thin vertical lines: the learning rates that were tried.")
    if any(batch.edge for batch in batches):
        said.append("Hollow: the best one is the lowest or the highest of them.")
    if any(len(batch.learning_rates) == 1 for each in searched for batch in each.best):
        said.append("Hollow: only one is known.")
    owner = f" of {searched[0].style.label}" if len(searched) > 1 else ""
    first = "first filled point" if searched[0].sizes_between else "first point"
    said.append(f"The rules begin at the {first}{owner}.")
    return " ".join(said)
