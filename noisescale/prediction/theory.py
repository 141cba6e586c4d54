# SPDX-License-Identifier: Apache-2.0
"""Errors of the theory in benchmarks: B_crit over B_simple, for each kind of optimizer."""

from __future__ import annotations

from typing import NamedTuple

from noisescale.bounded import Bounded
from noisescale.history.optimizers import OptimizerKind


class TheoryBand(NamedTuple):
    """The critical batch size of sweeps over the one that the noise scale of a run gives."""

    factor: Bounded
    """Value 1: what the theory itself says."""
    source: str
    """The experiments, as a part of a sentence."""


THEORY_BANDS: dict[OptimizerKind, TheoryBand] = {
    OptimizerKind.SGD: TheoryBand(Bounded(1.0, 0.6, 2.0), "48 runs, in sweeps of digits and MNIST"),
    OptimizerKind.MOMENTUM: TheoryBand(
        Bounded(1.0, 0.4, 3.0), "48 runs, in sweeps of digits and MNIST at momentum 0.9"
    ),
    OptimizerKind.ADAM: TheoryBand(
        Bounded(1.0, 0.5, 5.0),
        "57 runs, in sweeps of digits, MNIST and characters with Adam and AdamW",
    ),
    OptimizerKind.OTHER: TheoryBand(
        Bounded(1.0, 0.4, 5.0),
        "sweeps with SGD, momentum, Adam and AdamW, none with this optimizer",
    ),
}
"""The errors of benchmarks/prediction/single_runs.py, see docs/prediction-benchmark.md."""

DECAYED_LOW = 0.05
"""The lower end where the learning rate fell along the run: the noise scale rises as it falls."""


def theory_band(kind: OptimizerKind, *, decayed: bool) -> TheoryBand:
    """Return how far off the theory has been for runs of one kind."""
    band = THEORY_BANDS[kind]
    if not decayed:
        return band
    factor = Bounded(1.0, min(DECAYED_LOW, band.factor.low), band.factor.high)
    return TheoryBand(
        factor,
        f"{band.source}; and in 24 runs of digits with SGD, with a learning rate that fell to zero",
    )
