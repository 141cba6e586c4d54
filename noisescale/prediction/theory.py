# SPDX-License-Identifier: Apache-2.0
"""How far the theory has been off: B_crit over B_simple, by the kind of optimizer."""

from __future__ import annotations

from typing import NamedTuple

from noisescale.bounded import Bounded
from noisescale.history.optimizers import OptimizerKind


class TheoryBand(NamedTuple):
    """Where the swept critical batch size lay, in units of that by the noise scale of one run."""

    factor: Bounded
    """Value 1: what the theory itself says."""
    source: str
    """What it was found in, for a sentence."""


THEORY_BANDS: dict[OptimizerKind, TheoryBand] = {
    OptimizerKind.SGD: TheoryBand(
        Bounded(1.0, 0.6, 2.0), "sweeps of digits and MNIST, 48 runs beside them"
    ),
    OptimizerKind.MOMENTUM: TheoryBand(
        Bounded(1.0, 0.4, 3.0), "sweeps of digits and MNIST at momentum 0.9, 48 runs beside them"
    ),
    OptimizerKind.ADAM: TheoryBand(
        Bounded(1.0, 0.5, 5.0),
        "sweeps of digits, MNIST and characters by Adam and AdamW, 57 runs beside them",
    ),
    OptimizerKind.OTHER: TheoryBand(
        Bounded(1.0, 0.4, 5.0), "sweeps by SGD, with momentum, by Adam and AdamW, not by that"
    ),
}
"""From benchmarks/prediction.py, see docs/predicting.md."""

DECAYED_LOW = 0.05
"""The lower end where the learning rate fell along the run: the noise scale rises as it falls."""


def theory_band(kind: OptimizerKind, *, decayed: bool) -> TheoryBand:
    """Return how far off the theory has been for runs of one kind."""
    band = THEORY_BANDS[kind]
    if not decayed:
        return band
    factor = Bounded(1.0, min(DECAYED_LOW, band.factor.low), band.factor.high)
    return TheoryBand(
        factor, f"{band.source}, and of digits by SGD whose learning rate fell to zero, 24 runs"
    )
