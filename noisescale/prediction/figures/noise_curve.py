# SPDX-License-Identifier: Apache-2.0
"""The noise scale of a run as lines and areas over its steps, or over its examples."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from noisescale.history.segments import Array
from noisescale.report.drawing import Point, extremes

if TYPE_CHECKING:
    from noisescale.prediction.prediction import Prediction

ACROSS = ("step", "examples")
"""Columns of a history that a run can be drawn over."""


@dataclass(frozen=True)
class NoiseCurve:
    """Lines and areas of one run, with gaps where a value is not known."""

    p: Prediction
    across: str = "step"
    """One of `ACROSS`."""

    @cached_property
    def resolved(self) -> NDArray[np.bool_]:
        """Rows whose noise scale is resolved."""
        return self.p.run.resolved > 0

    @cached_property
    def rows(self) -> NDArray[np.intp]:
        """Rows that are drawn."""
        key = np.where(self.resolved, self.p.run.noise_scale, self.p.run.low)
        return extremes(key, self.resolved)

    @property
    def end(self) -> float:
        """The last place on the axis."""
        return float(self.p.history[self.across][-1])

    @property
    def shape(self) -> dict[str, Any]:
        """How plotly joins the points: each value holds from the row before on."""
        width = 2 if len(self.rows) == len(self.resolved) else 1
        return {"width": width, "shape": "linear" if self.p.run.as_logged else "vh"}

    @property
    def mode(self) -> str:
        """Lines; a marker for a single point, which is no line."""
        return "markers" if self.resolved.sum() == 1 else "lines"

    def line(self) -> dict[str, list[float | None]]:
        """Return the resolved noise scale."""
        return self.values(self.p.run.noise_scale, self.resolved, self.rows)

    def batch_size(self) -> dict[str, list[float | None]]:
        """Return the batch size, from the start of the run on."""
        size = self.p.run.batch_size
        rows = extremes(size, np.ones(len(size), dtype=bool))
        places = [self._place_before(rows[0]), *self.p.history[self.across][rows].tolist()]
        return {"x": places, "y": [size[rows[0]], *size[rows].tolist()]}

    def values(
        self, value: Array, known: NDArray[np.bool_], rows: NDArray[np.intp]
    ) -> dict[str, list[float | None]]:
        """Return any value of the rows, with gaps where it is not known."""
        y = [v if ok else None for v, ok in zip(value[rows], known[rows], strict=True)]
        return {"x": self.p.history[self.across][rows].tolist(), "y": y}

    def range(self) -> tuple[float, float]:
        """Return the ends of an axis for all but outliers, without most of wide intervals."""
        run, resolved = self.p.run, self.resolved
        centres = [run.batch_size, run.noise_scale[resolved], run.low[~resolved]]
        sure = _positive(np.array([*np.concatenate(centres), self.p.critical_batch_size.low]))
        least, most = np.quantile(sure, [0.002, 0.998]) if sure.size else (1.0, 1.0)
        lows, highs = _positive(run.low), _positive(run.high[resolved])
        floor = max(np.quantile(lows, 0.02), least / 4) if lows.size else least
        top = min(np.quantile(highs, 0.98), most * 4) if highs.size else most
        room = 1.5 if resolved.all() else 3.0
        return float(min(floor, least)) / 1.5, float(max(top, most)) * room

    def band(self, floor: float, top: float) -> Iterator[Point]:
        """Yield the outline of the intervals, where the noise scale is resolved.

        Args:
            floor: Lower end of the axis.
            top: Its upper end.
        """
        for places, rows in self._segments(self.resolved):
            ends = (self.p.run.low, self.p.run.high)
            low, high = (end[rows].clip(floor / 10, top * 10) for end in ends)
            yield from zip(places, [low[0], *low], strict=True)
            yield from zip(places[::-1], [*high[::-1], high[0]], strict=True)
            yield None, None

    def open_band(self, floor: float, top: float) -> Iterator[Point]:
        """Yield the outline from the lower bound to beyond the axis, where it is not resolved."""
        for places, rows in self._segments(~self.resolved):
            low = self.p.run.low[rows].clip(floor / 10, top)
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


def _positive(values: Array) -> Array:
    return values[(values > 0) & np.isfinite(values)]
