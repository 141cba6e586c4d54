# SPDX-License-Identifier: Apache-2.0
"""What is compute and what is time in the front: hours and cost as far as they are known."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from html import escape

from noisescale.bounded import Bounded
from noisescale.prediction.costing import PredictedRow
from noisescale.prediction.prediction import PredictionRecord
from noisescale.prediction.questions import device_counts, priced, shows_hours
from noisescale.report.numbers import Duration, duration_for, value_from_bounds


@dataclass(frozen=True)
class Axes:
    """What is compute and what is time, for one prediction."""

    x: Callable[[PredictedRow], Bounded]
    y: Callable[[PredictedRow], Bounded]
    x_title: str
    y_title: str
    unit: Duration
    """The unit of the hours."""

    def point(self, row: PredictedRow) -> tuple[float, float]:
        """Return where a row lies; NaN where only bounds are known."""
        return value_from_bounds(self.x(row)).value, value_from_bounds(self.y(row)).value

    def low(self, row: PredictedRow) -> tuple[float, float]:
        """Return its lower bounds."""
        return self.x(row).low, self.y(row).low

    def high(self, row: PredictedRow) -> tuple[float, float]:
        """Return its upper bounds."""
        return self.x(row).high, self.y(row).high


def axes_of(p: PredictionRecord) -> Axes:
    """Return what a prediction has to be drawn by."""
    unit = duration_for(row.hours for row in p.rows)
    examples = f"compute: {escape(p.unit)} processed"
    if not shows_hours(p):
        steps = "time: optimizer steps"
        return Axes(lambda row: row.examples, lambda row: row.steps, examples, steps, unit)

    def against_hours(x: Callable[[PredictedRow], Bounded], x_title: str) -> Axes:
        return Axes(x, lambda row: unit.convert(row.hours), x_title, f"time ({unit.name})", unit)

    if len(device_counts(p)) == 1:
        return against_hours(lambda row: row.examples, examples)
    if priced(p):
        return against_hours(lambda row: row.cost, "cost (currency of the price)")
    return against_hours(
        lambda row: unit.convert(row.device_hours), f"compute (device-{unit.name})"
    )
