# SPDX-License-Identifier: Apache-2.0
"""What is predicted from one run, and the ways to show it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from noisescale.band import Band
from noisescale.prediction.calibration import Calibration
from noisescale.prediction.costing import Hardware, PredictedRow, fastest_row
from noisescale.prediction.run_law import RunLaw
from noisescale.prediction.stretches import Array, Stretches

if TYPE_CHECKING:
    from plotly.graph_objects import Figure


@dataclass(frozen=True)
class Prediction:
    """What `predict` found; see there."""

    rows: tuple[PredictedRow, ...]
    """One for each number of devices and, within it, each batch size."""
    recommended: PredictedRow
    own_batch_size: float | None
    """The run's, among those of the rows; None where it changed along the run."""
    own_devices: int
    law: RunLaw
    """Steps and examples at any batch size, with bounds."""
    calibration: Calibration
    run: Stretches
    history: Mapping[str, Array]
    hardware: Hardware
    unit: str
    confidence: float
    warnings: tuple[str, ...]
    """Where this is not to be trusted, in whole sentences."""
    assumptions: tuple[str, ...]
    """What is taken for given, in whole sentences."""

    @property
    def recommended_batch_size(self) -> float:
        """Global, in `unit`; where the critical batch size is not resolved, at least that."""
        return self.recommended.batch_size

    @property
    def critical_batch_size(self) -> Band:
        """B_crit = E_min/S_min over the run, calibrated; McCandlish's definition, in `unit`."""
        return self.law.critical_batch_size

    @property
    def resolved(self) -> bool:
        """Whether the critical batch size is known, rather than a lower bound of it."""
        return math.isfinite(self.critical_batch_size.value)

    def rows_for(self, devices: int) -> list[PredictedRow]:
        """Return the rows of one number of devices, by rising batch size."""
        return [row for row in self.rows if row.devices == devices]

    def best_for(self, devices: int) -> PredictedRow:
        """Return the row of one number of devices with the fewest hours, so the least cost.

        Where no seconds are known it is the balanced one, nearest to the critical batch size.

        Raises:
            ValueError: If nothing was predicted for that number.
        """
        if not (rows := self.rows_for(devices)):
            known = sorted({row.devices for row in self.rows})
            raise ValueError(
                f"`devices` must be one of those predicted for, got {devices!r}. There are"
                f" {', '.join(map(str, known))}."
            )
        return fastest_row(rows, self.law)

    def to_dict(self) -> dict[str, Any]:
        """Return everything but the history, in builtins; None is unknown or unbounded."""
        from noisescale.report.records import as_dict

        return as_dict(self)

    def to_json(self) -> str:
        """Return `to_dict` as JSON."""
        from noisescale.report.records import as_json

        return as_json(self)

    def to_text(self, width: int = 100) -> str:
        """Return the tables as a terminal of `width` characters shows them, without colours."""
        from noisescale.report.text import as_text

        return as_text(self, width)

    def to_html(self, path: str | PathLike[str]) -> Path:
        """Write a self-contained page with figures and tables, and return its path."""
        from noisescale.report.html import write_html

        return write_html(self, Path(path))

    def figure(self) -> Figure:
        """Return the front of time against compute, a plotly figure."""
        from noisescale.report.figures import front_figure

        return front_figure(self)
