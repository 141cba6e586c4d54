# SPDX-License-Identifier: Apache-2.0
"""A batch size moves only where the bound on that side agrees."""

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

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
from noisescale.scheduling.ahead import Ahead

LATER = Progress(steps=1000, examples=1e6)


def noise_scale(low: float, value: float, high: float) -> NoiseScale:
    return NoiseScale(value, low, high, grad_sq_norm=1.0, noise_trace=value, steps=50.0)


@pytest.mark.parametrize(
    ("low", "value", "high", "wanted"),
    [
        (95, 110, 130, 64),  # up is asked for, but not at the low end by enough
        (97, 110, 130, 110),
        (20, 30, 63, 64),  # down, but not at the high end
        (20, 30, 42, 30),
        (1, 64, 1e6, 64),
        (150, 1000, 2000, 256),  # four times at most
        (1, 2, 3, 16),  # a fourth at least
        (100, math.nan, math.inf, 100),  # not resolved: up to what it is above
        (60, math.nan, math.inf, 64),
        (0, math.nan, math.inf, 64),
    ],
)
def test_moves_are_gated_at_both_ends(low: float, value: float, high: float, wanted: float) -> None:
    gate = Gate(RatioRule(), hysteresis=1.5)

    assert gate(noise_scale(low, value, high), Plan(64, 1), LATER) == pytest.approx(wanted)


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


def test_a_move_waits_for_eight_steps_of_the_batch_size_of_now() -> None:
    gate, high = Gate(RatioRule()), noise_scale(900, 1000, 1100)

    def wanted(since: float) -> float:
        return gate(high, Plan(32, 2), LATER._replace(examples_since_move=since))

    assert [wanted(8 * 64 - 1), wanted(8 * 64)] == [64, 256]


@pytest.mark.parametrize("rule", [TradeoffRule(), TradeoffRule(100), RatioRule(), NormTestRule()])
@pytest.mark.parametrize("value", [0.0, -0.5])
def test_where_no_noise_is_seen_the_smallest_batch_is_asked_for(rule: Any, value: float) -> None:
    """Over few steps with parts of unequal weight the averaged tr(Σ) may well be negative."""
    later = LATER._replace(critical_batch_size=50.0)

    wanted = Gate(rule)(noise_scale(0.0, value, 0.0), Plan(64, 1), later)

    assert wanted == 16
    assert wanted.reason == f"noise scale {value:.3g} (0 to 0) asks for 0, 1/4 a move at most"


def test_dwell_can_be_given_in_examples() -> None:
    gate = Gate(RatioRule(), min_dwell=5000)
    high = noise_scale(900, 1000, 1100)

    wanted = [gate(high, Plan(64, 1), LATER._replace(examples_since_move=s)) for s in (4999, 5000)]

    assert wanted == [64, 256]


def test_reasons_are_told() -> None:
    gate = Gate(RatioRule())

    def reason(low: float, value: float, high: float) -> str:
        return gate(noise_scale(low, value, high), Plan(64, 1), LATER).reason

    assert reason(150, 1000, 2000) == (
        "noise scale 1,000 (150 to 2,000) asks for 1,000, 4 x a move at most"
    )
    assert reason(20, 30, 40) == "noise scale 30 (20 to 40) asks for 30"
    assert reason(2, 3, 4) == "noise scale 3 (2 to 4) asks for 3, 1/4 a move at most"
    assert reason(100, math.nan, math.inf) == "noise scale above 100 asks for 100"
    assert reason(10, 64, 100) == "noise scale 64 (10 to 100) agrees with 64"


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
    assert policy(b, Plan(64, 1), at_rest) == pytest.approx(250)
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
    "options", [{"lift": -0.1}, {"lift": 2.0}, {"bound": 0}, {"least_steps": -1}, {"shortest": -1}]
)
def test_shares_that_contradict_each_other_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=r"lift|bound|least_steps|shortest"):
        BoundedSeesaw(**options)


def known(value: float) -> NoiseScale:
    return noise_scale(value / 1.25, value, value * 1.25)


def test_auto_never_pays_with_loss_where_the_end_is_known() -> None:
    """There it grows with the decay alone, once the batch is not far too small."""
    plan, run = Plan(32, 1), Progress(100, 6400.0, critical_batch_size=100.0, base_batch_size=32)
    known_end = run._replace(share=0.1, ends_by="examples")

    assert Auto()(known(64.0), plan, run) == pytest.approx(80)
    assert Auto()(known(64.0), plan, known_end) == 32
    halved = known_end._replace(learning_rate=0.5)
    assert Auto()(known(64.0), plan, halved) == 64
    assert Auto()(known(64.0), plan, halved._replace(learning_rate=0.1)) == pytest.approx(80)
    assert Auto()(known(1.0), plan, run) == pytest.approx(10)
    assert Auto()(known(1.0), plan, known_end) == 32  # it never falls


def test_auto_asks_tradeoff_with_new_noise_scales_alone() -> None:
    run = Progress(100, 6400.0, noise_scale_age=3)

    assert Auto()(known(640.0), Plan(32, 1), run) == 32


@pytest.mark.parametrize(
    ("run", "wanted", "reason"),
    [
        # 200,000 examples in all: 2,000 steps of 100.
        (
            Progress(50, 20_000, share=0.1, ends_by="examples"),
            100,
            "asks for 250, but the run has 2,000 steps of 100",
        ),
        # 2,000,000 in all: as far as the noise scale asks for.
        (Progress(50, 200_000, share=0.1, ends_by="examples"), 250, "asks for 250"),
        (Progress(50, 2_000, share=0.1, ends_by="examples"), 64, "a run of 312 steps keeps it"),
        (Progress(0, 0, share=0.0, ends_by="examples"), 64, "holds it"),
        (Progress(190, 2_000, share=0.1, ends_by="steps"), 64, "holds it"),
        (Progress(200, 2_000, share=0.1, ends_by="steps"), 250, "asks for 250"),
        (Progress(200, 2_000), 250, "asks for 250"),
    ],
)
def test_a_lift_leaves_the_run_two_thousand_steps(
    run: Progress, wanted: float, reason: str
) -> None:
    policy, b = BoundedSeesaw(lift=0.25), noise_scale(900, 1000, 1100)

    found = policy(b, Plan(64, 1), run._replace(base_batch_size=64))

    assert found == pytest.approx(wanted)
    assert reason in found.reason


@pytest.mark.parametrize(
    ("run", "said"),
    [
        (Progress(0, 0.0), '"tradeoff", as the end of the run is not known'),
        (Progress(0, 0.0, share=0.0, ends_by="steps"), "ends after a number of steps"),
        (
            Progress(0, 0.0, share=0.0, ends_by="examples", ahead=Ahead(0.1, 0.1, 0)),
            "The learning rate never falls, so only a batch that is far too small grows",
        ),
    ],
)
def test_auto_says_what_it_is_and_why(run: Progress, said: str) -> None:
    assert said in Auto().reason(run)
