# SPDX-License-Identifier: Apache-2.0
"""A batch size moves only where the bound on that side agrees."""

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from refused import refused

from noisescale import NoiseScale, Plan
from noisescale.scheduling import (
    Auto,
    BoundedSeesaw,
    Gate,
    NormTestRule,
    Progress,
    RatioRule,
    TradeoffRule,
)
from noisescale.scheduling.ahead import ScheduleForecast

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


DECAYED = Progress(1000, 1e6, learning_rate=0.02, peak_learning_rate=0.1, base_batch_size=64)


@pytest.mark.parametrize(
    ("low", "value", "high", "wanted", "reason"),
    [
        (900, 1000, 1100, 320, "the schedule's lr is 1/5 of its peak"),
        (100, 200, 300, 200, "1/5 of its peak, and the noise scale asks for 200"),
        (20, 30, 40, 64, "the noise scale holds it at 64"),
        (150, math.nan, math.inf, 150, "and the noise scale asks for 150"),  # its lower bound
        (0, math.nan, math.inf, 64, "the noise scale holds it at 64"),
    ],
)
def test_a_bounded_seesaw_grows_with_the_decay_as_far_as_the_noise_scale_allows(
    low: float, value: float, high: float, wanted: float, reason: str
) -> None:
    policy = BoundedSeesaw(lift=0)

    found = policy(noise_scale(low, value, high), Plan(64, 1), DECAYED)

    assert found == pytest.approx(wanted)
    assert reason in found.reason


def test_a_bounded_seesaw_lifts_a_small_batch_with_a_dwell_of_its_own() -> None:
    policy, b = BoundedSeesaw(lift=0.25), noise_scale(900, 1000, 1100)
    early = Progress(10, 640, examples_since_move=0.0, base_batch_size=64)

    first = policy(b, Plan(64, 1), early)  # small moves of the schedule hold nothing back
    policy.take(first)
    again = policy(noise_scale(3000, 3200, 3400), Plan(250, 1), early._replace(examples=2000))
    later = policy(noise_scale(3000, 3200, 3400), Plan(250, 1), early._replace(examples=2640))

    assert first == pytest.approx(250)
    assert "noise scale 1,000 (900 to 1,100) asks for 250" in first.reason
    assert again == 250
    assert later == pytest.approx(800)


def test_a_bounded_seesaw_lifts_by_new_noise_scales_alone_and_goes_on_where_it_was() -> None:
    policy, b = BoundedSeesaw(lift=0.25), noise_scale(900, 1000, 1100)
    at_rest = Progress(10, 640, base_batch_size=64)

    assert policy(b, Plan(64, 1), at_rest._replace(noise_scale_age=3)) == 64
    lifted = policy(b, Plan(64, 1), at_rest)
    assert policy(b, Plan(64, 1), at_rest) == lifted == pytest.approx(250)  # asked twice
    policy.take(lifted)
    assert policy(b, Plan(64, 1), at_rest) == 64
    other = BoundedSeesaw(lift=0.25)
    other.load_state_dict(policy.state_dict())
    assert other(b, Plan(64, 1), at_rest._replace(examples=700)) == 64


@pytest.mark.parametrize(
    ("run", "grows"),
    [
        (Progress(500, 32_000, share=0.5, ends_by="examples"), True),  # 1,000 steps of 64
        (Progress(499, 31_900, share=0.5, ends_by="epochs"), False),
        (Progress(500, 90_000, share=0.5, ends_by="steps"), True),
        (Progress(499, 90_000, share=0.5, ends_by="steps"), False),
        (Progress(10, 640), True),  # whose end is not known
    ],
)
@pytest.mark.parametrize("shortest", [1000, 0])
def test_a_run_of_few_steps_keeps_its_batch(run: Progress, grows: bool, shortest: float) -> None:
    policy, b = BoundedSeesaw(lift=0, shortest=shortest), noise_scale(900, 1000, 1100)
    halved = {"learning_rate": 0.05, "peak_learning_rate": 0.1, "base_batch_size": 64}

    found = policy(b, Plan(64, 1), run._replace(**halved))

    assert found == (128 if grows or not shortest else 64)


@pytest.mark.parametrize(
    ("argument", "value"),
    [("lift", -0.1), ("lift", 2.0), ("bound", 0), ("least_steps", -1), ("shortest", -1)],
)
def test_shares_that_contradict_each_other_are_refused(argument: str, value: float) -> None:
    with refused(argument, got=repr(value)):
        BoundedSeesaw(**{"lift": 0, argument: value})


def test_auto_never_pays_with_loss_where_the_end_is_known() -> None:
    """There it grows with the decay alone, once the batch is not far too small."""
    run = Progress(100, 6400.0, critical_batch_size=100.0, base_batch_size=32)
    known_end = run._replace(share=0.1, ends_by="examples")
    halved = known_end._replace(learning_rate=0.5)

    def wanted(value: float, progress: Progress) -> float:
        return Auto()(noise_scale(value / 1.25, value, value * 1.25), Plan(32, 1), progress)

    assert wanted(64.0, run) == pytest.approx(80)
    assert wanted(640.0, run._replace(noise_scale_age=3)) == 32  # it waits for a new noise scale
    assert wanted(64.0, known_end) == 32
    assert wanted(64.0, halved) == 64
    assert wanted(64.0, halved._replace(learning_rate=0.1)) == pytest.approx(80)
    assert wanted(1.0, run) == pytest.approx(10)
    assert wanted(1.0, known_end) == 32  # it never falls


@pytest.mark.parametrize(
    ("steps", "examples", "share", "ends_by", "wanted", "reason"),
    [
        # 200,000 examples in all: 2,000 steps of 100.
        (50, 20_000, 0.1, "examples", 100, "asks for 250, but the run has 2,000 steps of 100"),
        # 2,000,000 in all: as far as the noise scale asks for.
        (50, 200_000, 0.1, "examples", 250, "asks for 250"),
        (50, 2_000, 0.1, "examples", 64, "312 steps keeps it"),
        (0, 0, 0.0, "examples", 64, "holds it"),
        (190, 2_000, 0.1, "steps", 64, "holds it"),
        (200, 2_000, 0.1, "steps", 250, "asks for 250"),
        (200, 2_000, None, None, 250, "asks for 250"),
    ],
)
def test_a_lift_leaves_the_run_two_thousand_steps(
    steps: int, examples: float, share: Any, ends_by: Any, wanted: float, reason: str
) -> None:
    policy, b = BoundedSeesaw(lift=0.25), noise_scale(900, 1000, 1100)
    run = Progress(steps, examples, share=share, ends_by=ends_by, base_batch_size=64)

    found = policy(b, Plan(64, 1), run)

    assert found == pytest.approx(wanted)
    assert reason in found.reason


@pytest.mark.parametrize(
    ("known", "said"),
    [
        ({}, '"tradeoff", as the end of the run is not known'),
        ({"ends_by": "steps"}, "ends after a number of steps"),
        ({"ends_by": "examples", "ahead": ScheduleForecast(0.1, 0.1, 0)}, "never falls"),
    ],
)
def test_auto_says_what_it_is_and_why(known: dict[str, Any], said: str) -> None:
    assert said in Auto().reason(Progress(0, 0.0, share=0.0 if known else None, **known))
