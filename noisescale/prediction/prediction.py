# SPDX-License-Identifier: Apache-2.0
"""What is predicted from one run: a record, which knows nothing of the ways to show it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from noisescale._moved import former_names
from noisescale.bounded import Bounded
from noisescale.history.run_law import RunLaw
from noisescale.history.segments import Array, Segments
from noisescale.prediction.calibration import Calibration
from noisescale.prediction.costing import Hardware, PredictedRow, fastest_row
from noisescale.prediction.second_run import SecondRun


@dataclass(frozen=True)
class PredictionRecord:
    """What `noisescale.predict` found; see there."""

    rows: tuple[PredictedRow, ...]
    """One for each number of devices and, within it, each batch size."""
    recommended: PredictedRow
    """On the run's own devices; with prices, on the number of devices that costs least."""
    on_more_devices: PredictedRow | None
    """Up to where more devices pay; None where they do not."""
    own_batch_size: float | None
    """The run's, among those of the rows; None where it changed along the run."""
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
    warnings: tuple[str, ...]
    """Where this is not to be trusted, in whole sentences."""
    assumptions: tuple[str, ...]
    """What is taken for given, in whole sentences."""

    @property
    def recommended_batch_size(self) -> float:
        """Global, in `unit`; where the critical batch size is not resolved, at least that."""
        return self.recommended.batch_size

    @property
    def critical_batch_size(self) -> Bounded:
        """B_crit = E_min/S_min over the run, McCandlish's definition, in `unit`.

        Its bounds have in them what the theory does not know: how far B_crit was from the noise
        scale for optimizers of the run's kind. Those of a calibration or of a second run are its
        own.
        """
        return self.law.critical_batch_size

    @cached_property
    def critical_batch_size_by_noise_scale(self) -> Bounded:
        """B_crit if the theory held exactly, with the bounds of the measurement alone."""
        return RunLaw.of(self.run, Bounded(1.0, 1.0, 1.0)).critical_batch_size

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


__getattr__ = former_names(__name__, {"Prediction": "noisescale.Prediction"})
