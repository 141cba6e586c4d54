# SPDX-License-Identifier: Apache-2.0
"""A batch size moves only where the bound on that side agrees."""

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from noisescale import NoiseScale, Plan
from noisescale.scheduling import Gate, NormTestRule, Progress, RatioRule, TradeoffRule

LATER = Progress(steps=1000, examples=1e6)


def noise_scale(low: float, value: float, high: float) -> NoiseScale:
    return NoiseScale(value, low, high, grad_sq_norm=1.0, noise_trace=value, steps=50.0)


@pytest.mark.parametrize(
    ("low", "value", "high", "wanted", "said"),
    [
        (95, 110, 130, 64, "agrees with 64"),  # up is asked for, but not at the low end by enough
        (97, 110, 130, 110, "asks for 110"),
        (20, 30, 63, 64, "agrees with 64"),  # down, but not at the high end
        (20, 30, 42, 30, "30 (20 to 42) asks for 30"),
        (150, 1000, 2000, 256, "1,000 (150 to 2,000) asks for 1,000, 4 x a move at most"),
        (1, 2, 3, 16, "asks for 2, 1/4 a move at most"),
        # Not resolved: up to what it is above.
        (100, math.nan, math.inf, 100, "above 100 asks for 100"),
        (0, math.nan, math.inf, 64, "agrees with 64"),
    ],
)
def test_moves_are_gated_at_both_ends(
    low: float, value: float, high: float, wanted: float, said: str
) -> None:
    found = Gate(RatioRule(), hysteresis=1.5)(noise_scale(low, value, high), Plan(64, 1), LATER)

    assert found == pytest.approx(wanted)
    assert found.reason.endswith(said)


@given(
    ends=st.tuples(*[st.floats(0.01, 1e6)] * 3).map(sorted),
    batch_size=st.integers(1, 4096),
    growth=st.floats(1.6, 10),
    shrink=st.floats(1.6, 10),
)
def test_no_move_against_either_bound(
    ends: list[float], batch_size: int, growth: float, shrink: float
) -> None:
    low, value, high = ends
    gate = Gate(RatioRule(), growth=growth, shrink=shrink)

    wanted = gate(noise_scale(low, value, high), Plan(batch_size, 1), LATER)

    if wanted > batch_size:
        assert low >= 1.5 * batch_size
        assert wanted == pytest.approx(min(value, growth * batch_size))
    elif wanted < batch_size:
        assert high <= batch_size / 1.5
        assert wanted == pytest.approx(max(value, batch_size / shrink))
    else:
        assert low < 1.5 * batch_size or high > batch_size / 1.5


@pytest.mark.parametrize(("options", "dwell"), [({}, 8 * 64), ({"min_dwell": 5000}, 5000)])
def test_a_move_waits_for_eight_steps_of_the_batch_size_of_now_or_as_long_as_it_is_told(
    options: dict[str, float], dwell: int
) -> None:
    gate, high = Gate(RatioRule(), **options), noise_scale(900, 1000, 1100)

    def wanted(since: float) -> float:
        return gate(high, Plan(32, 2), LATER._replace(examples_since_move=since))

    assert [wanted(dwell - 1), wanted(dwell)] == [64, 256]


@pytest.mark.parametrize("rule", [TradeoffRule(), TradeoffRule(100), RatioRule(), NormTestRule()])
@pytest.mark.parametrize("value", [0.0, -0.5])
def test_where_no_noise_is_seen_the_smallest_batch_is_asked_for(rule: Any, value: float) -> None:
    """Over few steps with parts of unequal weight the averaged tr(Σ) may well be negative."""
    later = LATER._replace(critical_batch_size=50.0)

    wanted = Gate(rule)(noise_scale(0.0, value, 0.0), Plan(64, 1), later)

    assert wanted == 16
    assert "asks for 0," in wanted.reason
