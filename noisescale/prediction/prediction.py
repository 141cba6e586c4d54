# SPDX-License-Identifier: Apache-2.0
"""The record of a prediction from one run. How it is shown is not part of it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from noisescale.bounded import Bounded
from noisescale.history.run_law import RunLaw
from noisescale.history.segments import Array, Segments
from noisescale.prediction.calibration import Calibration
from noisescale.prediction.costing import Hardware, PredictedRow, fastest_row
from noisescale.prediction.second_run import SecondRun
from noisescale.refusal import Refusal


@dataclass(frozen=True)
class PredictionRecord:
    """What `noisescale.predict` found."""

    rows: tuple[PredictedRow, ...]
    """A row for each number of devices and each batch size."""
    recommended: PredictedRow
    """The row to train with.

    It is on the run's own devices: the fastest row that was timed or, if no other one was timed,
    the largest at little cost.
    """
    on_more_devices: PredictedRow | None
    """The row with the most devices that pay, by the values alone; None if more do not pay."""
    own_batch_size: float | None
    """The run's own batch size; None if it changed along the run."""
    own_devices: int
    law: RunLaw
    """Steps and examples at any batch size, with bounds."""
    calibration: Calibration
    second_run: SecondRun | None
    run: Segments
    history: Mapping[str, Array]
    hardware: Hardware
    unit: str
    confidence: float
    under_way: bool
    """Whether the run was still being written when it was read."""
    warnings: tuple[str, ...]
    """Reasons not to trust the prediction, in whole sentences."""
    assumptions: tuple[str, ...]
    """What the prediction assumes, in whole sentences."""

    @property
    def run_batch_size(self) -> float:
        """The run's batch size, or the mean if it changed along the run."""
        if self.own_batch_size is not None:
            return self.own_batch_size
        return float((self.run.steps * self.run.batch_size).sum() / self.run.steps.sum())

    @property
    def recommended_batch_size(self) -> float:
        """The recommended global batch, in `unit`; a lower bound if B_crit is not resolved."""
        return self.recommended.batch_size

    @property
    def critical_batch_size(self) -> Bounded:
        """B_crit = E_min/S_min over the run, McCandlish's definition, in `unit`.

        Its bounds include the error of the theory: how far B_crit was from the noise scale for
        optimizers of the run's kind. With a calibration or a second run, the bounds come from
        these.
        """
        return self.law.critical_batch_size

    @cached_property
    def critical_batch_size_by_noise_scale(self) -> Bounded:
        """B_crit if the theory held exactly, with the bounds of the measurement alone."""
        return RunLaw.of(self.run, Bounded(1.0, 1.0, 1.0)).critical_batch_size

    @property
    def resolved(self) -> bool:
        """Whether the critical batch size is known, not only a lower bound of it."""
        return math.isfinite(self.critical_batch_size.value)

    def rows_for(self, devices: int) -> list[PredictedRow]:
        """Return the rows of one number of devices, by rising batch size."""
        return [row for row in self.rows if row.devices == devices]

    def best_for(self, devices: int) -> PredictedRow:
        """Return the row of one number of devices with the fewest hours, so the least cost.

        If no seconds are known, return the balanced row, the one nearest to the critical batch
        size.

        Raises:
            ValueError: If nothing was predicted for that number.
        """
        if not (rows := self.rows_for(devices)):
            known = sorted({row.devices for row in self.rows})
            raise Refusal(
                "devices",
                "be a number of devices in the prediction",
                repr(devices),
                f"Give one of {', '.join(map(str, known))}.",
            )
        return fastest_row(rows, self.law)
