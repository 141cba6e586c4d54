# SPDX-License-Identifier: Apache-2.0
"""Errors of the theory in benchmarks: B_crit over B_simple, for each kind of optimizer."""

from __future__ import annotations

from typing import NamedTuple

from noisescale.bounded import Bounded
from noisescale.history.optimizers import OptimizerKind, OptimizerMix


class TheoryBand(NamedTuple):
    """The critical batch size of sweeps over the one that the noise scale of a run gives."""

    factor: Bounded
    """Value 1: what the theory itself says."""
    source: str
    """The experiments, as a part of a sentence."""


_UNTRIED = TheoryBand(
    Bounded(1.0, 0.4, 5.0), "sweeps with SGD, momentum, Adam and AdamW, none with this optimizer"
)

THEORY_BANDS: dict[OptimizerKind, TheoryBand] = {
    **dict.fromkeys(OptimizerKind, _UNTRIED),
    OptimizerKind.SGD: TheoryBand(Bounded(1.0, 0.6, 2.0), "48 runs, in sweeps of digits and MNIST"),
    OptimizerKind.MOMENTUM: TheoryBand(
        Bounded(1.0, 0.4, 3.0), "48 runs, in sweeps of digits and MNIST at momentum 0.9"
    ),
    OptimizerKind.ADAM: TheoryBand(
        Bounded(1.0, 0.5, 5.0),
        "57 runs, in sweeps of digits, MNIST and characters with Adam and AdamW",
    ),
}
"""The errors of benchmarks/prediction/single_runs.py, see docs/prediction-benchmark.md."""

DECAYED_LOW = 0.05
"""The lower end where the learning rate fell along the run: the noise scale rises as it falls."""


def theory_band(optimizer: OptimizerMix, *, decayed: bool) -> TheoryBand:
    """Return how far off the theory has been for runs with such an optimizer.

    Where an optimizer is of two kinds, the band reaches as far as those of both.

    Examples:
        >>> theory_band(
        ...     OptimizerMix(OptimizerKind.SGD, OptimizerKind.ADAM, 0.7), decayed=False
        ... ).factor
        Bounded(value=1.0, low=0.5, high=5.0)
    """
    bands = [THEORY_BANDS[kind] for kind in optimizer.kinds]
    low, high = min(band.factor.low for band in bands), max(band.factor.high for band in bands)
    sources = [*dict.fromkeys(band.source for band in bands)]
    if decayed:
        low = min(DECAYED_LOW, low)
        sources.append("24 runs of digits with SGD, with a learning rate that fell to zero")
    return TheoryBand(Bounded(1.0, low, high), "; and in ".join(sources))
