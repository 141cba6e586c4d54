# SPDX-License-Identifier: Apache-2.0
"""What measurements along a run say: a document, and the same in builtin types."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import Any

from noisescale.frozen.document import as_dict as dict_of_one
from noisescale.frozen.document import document_of as document_of_one
from noisescale.frozen.document import text_of_scale
from noisescale.frozen.measurement import MeasuredRunRecord
from noisescale.report.document import Cell, Document, Figure, Line, Table
from noisescale.report.numbers import count, number, plural

_HOW_TO_READ = (
    "Each value is measured at the weights of a checkpoint that no step changed, from independent"
    " batches."
)


def document_of(found: MeasuredRunRecord) -> Document:
    """Return what the measurements say: the last one, and the noise scale along the run."""
    last = document_of_one(found.measurements[-1])
    steps = count(found.measurements[-1].step or 0)
    return Document(
        title="Noise scale along a run - noisescale",
        headline=f"{_course(found)}. {last.headline.replace('these weights', f'step {steps}')}",
        answers=last.answers,
        tables=[_table(found)],
        figures=lambda: _figures(found),
        doubts=last.doubts,
        assumptions=[
            *last.assumptions,
            "The run is taken to have trained at the batch size that was measured, with one"
            " device and no accumulation.",
        ],
        how_to_read=_HOW_TO_READ,
        written=[f"Record: {found.record}"],
        next=[f"Predict this run: {shlex.join(['noisescale', 'predict', found.record])}"],
    )


def _course(found: MeasuredRunRecord) -> str:
    known = [one for one in found.measurements if one.noise_scale.resolved]
    if len(known) < 2:
        return f"The noise scale was measured at {plural(len(found.measurements), 'checkpoint')}"
    first, last = known[0], known[-1]
    a, b = first.noise_scale, last.noise_scale
    between = f"from step {count(first.step or 0)} to step {count(last.step or 0)}"
    if b.low > a.high:
        return f"The noise scale rose {number(b.value / a.value)} x {between}"
    if b.high < a.low:
        return f"The noise scale fell to {number(b.value / a.value)} x {between}"
    return f"The noise scale did not clearly change {between}"


def _table(found: MeasuredRunRecord) -> Table:
    lines = [
        Line(
            [
                Cell(count(one.step or 0)),
                Cell(text_of_scale(one.noise_scale)),
                Cell(number(one.noise_scale.grad_sq_norm)),
                Cell(number(one.noise_scale.noise_trace)),
                Cell(f"{one.noise_scale.steps:g}"),
            ]
        )
        for one in found.measurements
    ]
    return Table(
        "Noise scale along the run", ("step", "noise scale", "|G|²", "tr(Σ)", "batches"), lines
    )


def _figures(found: MeasuredRunRecord) -> Sequence[Figure]:
    from noisescale.report.colours import BLACK
    from noisescale.report.drawing import figure, log_axis, place_figure, spread, with_legend

    known = [one for one in found.measurements if one.noise_scale.resolved]
    if not known:
        return ()
    scales = [one.noise_scale for one in known]
    low, high = spread([x for scale in scales for x in (scale.low, scale.high)])
    drawn = figure(
        _course(found),
        "Each point is a checkpoint, with its 95 % interval.".replace(
            "95", f"{100 * scales[0].confidence:g}"
        ),
        {"title": {"text": "step"}, "rangemode": "tozero"},
        log_axis(f"noise scale, {scales[0].unit}", low, high),
    )
    drawn.add_scatter(
        x=[one.step for one in known],
        y=[scale.value for scale in scales],
        name="noise scale",
        mode="lines+markers",
        line={"color": BLACK, "width": 1},
        error_y={
            "type": "data",
            "array": [scale.high - scale.value for scale in scales],
            "arrayminus": [scale.value - scale.low for scale in scales],
        },
    )
    return [place_figure("noise-scale", "Noise scale along the run", with_legend(drawn))]


def as_dict(found: MeasuredRunRecord) -> dict[str, Any]:
    """Return the measurements in builtin types: see `Measurement.to_dict`, for each."""
    return {
        "measurements": [dict_of_one(one) for one in found.measurements],
        "record": found.record,
    }
