# SPDX-License-Identifier: Apache-2.0
"""The label of a row under the pointer."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from noisescale.prediction.costing import PredictedRow
from noisescale.prediction.tables import plan
from noisescale.report.numbers import Duration, count, plural, with_bounds

if TYPE_CHECKING:
    from noisescale.prediction.prediction import Prediction


def hover(p: Prediction, row: PredictedRow, unit: Duration) -> str:
    """Write a whole row for the label under the pointer."""
    lines = [
        f"<b>batch size {named_row(row)}</b>",
        f"device batch x accumulation x devices: {plan(row)}",
        f"steps: {with_bounds(row.steps)}",
        f"{escape(p.unit)}: {with_bounds(row.examples)}",
    ]
    if row.hours.known:
        lines.append(f"{unit.name}: {with_bounds(unit.convert(row.hours))}")
        lines.append(f"device-{unit.name}: {with_bounds(unit.convert(row.device_hours))}")
    if row.cost.known:
        lines.append(f"cost: {with_bounds(row.cost)}")
    if row.basis is not None:
        lines.append(f"step time: {row.basis}")
    if row.extrapolated:
        lines.append(f"extrapolated: {', '.join(row.extrapolated)}")
    return "<br>".join(lines)


def named_row(row: PredictedRow) -> str:
    """Return a batch size with its devices: '64 on 4 devices'."""
    return f"{count(row.batch_size)} on {plural(row.devices, 'device')}"
