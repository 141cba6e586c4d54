# SPDX-License-Identifier: Apache-2.0
"""The band of the theory for optimizers of one kind and of two."""

import pytest

from noisescale.bounded import Bounded
from noisescale.history.optimizers import OptimizerKind, OptimizerMix
from noisescale.prediction.theory import FALLING, THEORY_BANDS, TRIED_FALLING, theory_band


def test_a_hybrid_has_the_hull_of_two_bands_and_both_sources() -> None:
    kinds = OptimizerKind.MOMENTUM, OptimizerKind.ADAM
    first, second = (THEORY_BANDS[kind] for kind in kinds)

    band = theory_band(OptimizerMix(*kinds, 0.6), decayed=False)
    turned = theory_band(OptimizerMix(*kinds[::-1], 0.6), decayed=False)

    ends = first.factor.low, second.factor.high
    assert band.factor == Bounded(first.factor.value, *ends)  # of the main kind
    assert turned.factor == Bounded(second.factor.value, *ends)
    assert band.source == f"{first.source} and {second.source}"
    for pair in ((6, 3), (3, 6)):  # with Muon it is that of its hybrids
        mix = OptimizerMix(*map(OptimizerKind, pair), 0.8)
        assert theory_band(mix, decayed=False) == THEORY_BANDS[OptimizerKind.SPECTRAL]


@pytest.mark.parametrize("kind", OptimizerKind)
def test_each_kind_has_its_band_and_where_the_rate_fell_the_bounds_hold_both(
    kind: OptimizerKind,
) -> None:
    bands = [theory_band(OptimizerMix(kind), decayed=decayed) for decayed in (False, True)]

    assert bands[0] == THEORY_BANDS[kind]
    constant, falling = (band.factor for band in bands)
    # The factor is that of the runs with a falling rate, if this kind was among them.
    value = 1.0 if kind in TRIED_FALLING else constant.value
    assert falling == Bounded(
        value, min(constant.low, FALLING.factor.low), max(constant.high, FALLING.factor.high)
    )


def test_one_source_of_two_kinds_is_named_once(monkeypatch: pytest.MonkeyPatch) -> None:
    other = THEORY_BANDS[OptimizerKind.OTHER]
    monkeypatch.setitem(THEORY_BANDS, OptimizerKind.SIGN, other)
    mix = OptimizerMix(OptimizerKind.SIGN, OptimizerKind.OTHER, 0.6)

    assert theory_band(mix, decayed=False) == other
    assert theory_band(mix, decayed=True).source == f"{other.source} and {FALLING.source}"
