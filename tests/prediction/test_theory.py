# SPDX-License-Identifier: Apache-2.0
"""The band of the theory for optimizers of one kind and of two."""

import pytest

from noisescale.history.optimizers import OptimizerKind, OptimizerMix
from noisescale.prediction.theory import THEORY_BANDS, theory_band


@pytest.mark.parametrize("kind", OptimizerKind)
def test_each_kind_has_its_band(kind: OptimizerKind) -> None:
    assert theory_band(OptimizerMix(kind), decayed=False) == THEORY_BANDS[kind]


def test_a_hybrid_has_the_hull_of_two_bands_and_both_sources() -> None:
    kinds = OptimizerKind.MOMENTUM, OptimizerKind.ADAM
    first, second = (THEORY_BANDS[kind] for kind in kinds)

    band = theory_band(OptimizerMix(*kinds, 0.6), decayed=False)

    assert band == theory_band(OptimizerMix(*kinds[::-1], 0.6), decayed=False)._replace(
        source=band.source
    )
    assert (band.factor.low, band.factor.high) == (first.factor.low, second.factor.high)
    assert band.source == f"{first.source}; and in {second.source}"


def test_one_source_of_two_kinds_is_named_once(monkeypatch: pytest.MonkeyPatch) -> None:
    other = THEORY_BANDS[OptimizerKind.OTHER]
    monkeypatch.setitem(THEORY_BANDS, OptimizerKind.SIGN, other)
    mix = OptimizerMix(OptimizerKind.SIGN, OptimizerKind.OTHER, 0.6)

    assert theory_band(mix, decayed=False) == other
    falling = theory_band(mix, decayed=True)
    assert falling.source.startswith(f"{other.source}; and in 24 runs")
    assert (falling.factor.low, falling.factor.high) == (0.05, other.factor.high)
