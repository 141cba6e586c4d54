# SPDX-License-Identifier: Apache-2.0
"""B_crit of sweeps over what the noise scale of a run gives, for each kind of optimizer."""

from __future__ import annotations

from typing import NamedTuple

from noisescale.bounded import Bounded
from noisescale.history.optimizers import OptimizerKind, OptimizerMix


class TheoryBand(NamedTuple):
    """The critical batch size of a sweep over the one that the noise scale of a run gives."""

    factor: Bounded
    """The factor to expect, with bounds that hold 95 % of further models."""
    source: str
    """The experiments, as a part of a sentence."""

    @property
    def expectation(self) -> str:
        """The factor with its bounds and where it is from, as a part of a sentence."""
        f = self.factor
        return f"{f.value:g} ({f.low:g} to {f.high:g}) x the noise scale, by {self.source}"


THEORY_BANDS: dict[OptimizerKind, TheoryBand] = {
    OptimizerKind.SGD: TheoryBand(Bounded(1.0, 0.2, 3.3), "15 runs of 3 models"),
    OptimizerKind.MOMENTUM: TheoryBand(Bounded(1.0, 0.18, 2.9), "21 runs of 3 models"),
    OptimizerKind.ADAM: TheoryBand(Bounded(1.6, 0.4, 6.2), "27 runs of 5 models"),
    OptimizerKind.OTHER: TheoryBand(
        Bounded(1.0, 0.18, 12.0), "101 runs of 7 models, none with this optimizer"
    ),
    OptimizerKind.SIGN: TheoryBand(
        Bounded(1.0, 0.42, 6.4), "15 runs of 5 models with Signum and Lion"
    ),
    OptimizerKind.SPECTRAL: TheoryBand(
        Bounded(3.1, 0.78, 12.0), "14 runs of 5 models with Muon and AdamW"
    ),
    OptimizerKind.SCHEDULE_FREE: TheoryBand(
        Bounded(1.0, 0.28, 4.8), "9 runs of 3 models with schedule-free AdamW"
    ),
}
"""What benchmarks/prediction/bands.py found, see docs/prediction-benchmark.md. The factor is not 1
where another one was nearer in models that had no part in it: under Adam and Muon."""

FALLING = TheoryBand(Bounded(1.0, 0.12, 3.1), "26 runs of 4 models with a falling rate")
"""Where the learning rate fell along the run. The lower end is that of steps that all count the
same, as they do where the batch size changed; of steps that count by their rate it is 0.2."""

TRIED_FALLING = {OptimizerKind.SGD, OptimizerKind.MOMENTUM, OptimizerKind.ADAM, OptimizerKind.SIGN}
"""The kinds of those runs. The others keep their own factor, and the bounds of both."""


def theory_band(optimizer: OptimizerMix, *, decayed: bool) -> TheoryBand:
    """Return how far off the theory has been for runs with such an optimizer.

    Where an optimizer is of two kinds, the band reaches as far as those of both. With Muon the
    runs were of both kinds already, with Muon on 3 to 92 % of the parameters.

    Examples:
        >>> theory_band(
        ...     OptimizerMix(OptimizerKind.SGD, OptimizerKind.ADAM, 0.7), decayed=False
        ... ).factor
        Bounded(value=1.0, low=0.2, high=6.2)
    """
    kinds = optimizer.kinds
    if OptimizerKind.SPECTRAL in kinds:
        kinds = (OptimizerKind.SPECTRAL,)
    bands = [THEORY_BANDS[kind] for kind in kinds]
    value = bands[0].factor.value
    if decayed:
        bands.append(FALLING)
        if kinds[0] in TRIED_FALLING:
            value = FALLING.factor.value
    low, high = min(band.factor.low for band in bands), max(band.factor.high for band in bands)
    sources = [*dict.fromkeys(band.source for band in bands)]
    if decayed and kinds[0] not in TRIED_FALLING:
        sources[-1] += ", none with this optimizer"
    return TheoryBand(Bounded(value, low, high), " and ".join(sources))
