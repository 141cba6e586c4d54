# SPDX-License-Identifier: Apache-2.0
"""A monitor whose answer at each batch is compared with that of independent batches."""

from __future__ import annotations

from typing import Any

from noisescale.guard import NotMeasured
from noisescale.lightning.monitor.noise_scale_monitor import NoiseScaleMonitor
from noisescale.meter.estimates import MomentSums


class JudgedMonitor(NoiseScaleMonitor):
    """A monitor that measures every batch, and keeps what it finds and what it warns of.

    Args:
        options: Arguments of `NoiseScaleMonitor`.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(every_n_steps=1, **options)
        self.said: list[str] = []
        """What it warned of."""
        self.noise_traces: dict[int, float] = {}
        """tr(Σ) as each batch shows it, by the number of the batch."""
        self._sums = MomentSums()

    @property
    def reason(self) -> str:
        """Why nothing is measured, in its own words."""
        return " ".join(self.said) or "No step was measured."

    def way(self, ranks: int) -> str:
        """Return what is compared: "half" or "rank"."""
        return "half" if ranks == 1 else "rank"

    def look(self, batch: int) -> None:
        """Note what it measured in a batch, if it did."""
        if not self.meters:
            return
        before, self._sums = self._sums, self.meters[0].meter.sums
        weight = self._sums.sum_weight - before.sum_weight
        if weight > 0:
            trace = self._sums.sum_noise_trace - before.sum_noise_trace
            self.noise_traces[batch] = trace / weight

    def _tell(self, message: str) -> None:
        self.said.append(message)

    def _tell_that_nothing_is_measured(self, error: NotMeasured) -> None:
        self.said.append(error.reason.strip())
