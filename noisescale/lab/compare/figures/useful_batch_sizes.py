# SPDX-License-Identifier: Apache-2.0
"""The largest useful batch size of each submission, with its bounds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import plotly.graph_objects as go

from noisescale.lab.compare.figures.styles import styles_of
from noisescale.lab.compare.names import name_of_sweep
from noisescale.lab.compare.swept import Swept
from noisescale.report.colours import GREY
from noisescale.report.drawing import LEVEL, coordinates, figure, log_axis, shown_name, with_legend
from noisescale.report.numbers import number, plural
from noisescale.tradeoff.regime_marks import border_text, draw_border, is_seen, is_within

if TYPE_CHECKING:
    from noisescale.lab.compare.comparison import Comparison

_ROW = 46
"""Pixels of each submission: its name, and its point below the name."""

_LABEL = 52
"""Characters that a phone has room for; a longer label is shortened to its name."""


def useful_batch_sizes_figure(c: Comparison) -> go.Figure | None:
    """Draw the largest useful batch sizes below each other; None if fewer than two are known."""
    sweeps = [each for each in c.sweeps if is_seen(each.largest_useful_batch_size)]
    if len(sweeps) < 2:
        return None
    of = styles_of(c)
    sizes = [batch.batch_size for each in sweeps for batch in each.batches]
    around = max((max(sizes) / min(sizes)) ** 0.07, 1.2)
    ends = min(sizes) / around, max(sizes) * around
    drawn = figure(
        _finding(sweeps),
        _caption(len(c.sweeps) - len(sweeps)),
        LEVEL | log_axis("largest useful batch size (examples)", *ends),
        {
            "title": {"text": ""},
            "range": [-0.35, len(sweeps)],
            "showticklabels": False,
            "showgrid": False,
            "ticks": "",
        },
    )
    drawn.add_scatter(
        **coordinates(
            point
            for row, each in enumerate(reversed(sweeps))
            for point in (
                (each.batches[0].batch_size, row),
                (each.batches[-1].batch_size, row),
                (None, None),
            )
        ),
        name="batch sizes that were tried",
        mode="lines",
        opacity=0.3,
        line={"color": GREY, "width": 9},
        hoverinfo="skip",
    )
    for row, each in enumerate(reversed(sweeps)):
        style, border = of[each.submission], each.largest_useful_batch_size
        said = f"{_name(each)}: {border_text(border, each.ends)}"
        draw_border(
            drawn,
            border,
            float(row),
            ends,
            style.symbol,
            style.colour,
            name=said,
            legendgroup=f"{each.submission} on {each.workload}",
            showlegend=False,
            hovertext=said,
        )
        drawn.add_annotation(
            text=said if len(said) <= _LABEL else _name(each),
            font={"size": 12},
            **{"x": 0.01, "xref": "paper", "xanchor": "left"},
            **{"y": row, "yshift": 11, "yanchor": "bottom"},
            showarrow=False,
        )
    return with_legend(drawn, _ROW * (len(sweeps) + 0.35))


def _name(each: Swept) -> str:
    return shown_name(name_of_sweep(each) or "batch sizes")


def _finding(sweeps: Sequence[Swept]) -> str:
    """Say which submissions have the largest and the smallest, as far as they are known."""
    known = [each for each in sweeps if is_within(each.largest_useful_batch_size, each.ends)]
    if not known:
        return "No sweep shows its largest useful batch size"
    largest = max(known, key=_value)
    said = f"Larger batches are useful up to about {number(_value(largest))} with {_name(largest)}"
    least = min(known, key=_value)
    if least is largest:
        return said
    said += f", up to about {number(_value(least))} with {_name(least)}"
    overlap = largest.largest_useful_batch_size.low <= least.largest_useful_batch_size.high
    return f"{said}: their bounds overlap" if overlap else said


def _value(each: Swept) -> float:
    return each.largest_useful_batch_size.value


def _caption(unknown: int) -> str:
    said = "Beyond it larger batches save at most a sixth of the steps. An arrow is an open end."
    if unknown:
        said += f" {plural(unknown, 'sweep does', 'sweeps do')} not show it."
    return said
