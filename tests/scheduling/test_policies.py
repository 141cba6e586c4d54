# SPDX-License-Identifier: Apache-2.0
"""The rules against the papers' formulas; schedules against written-out sequences."""

import math
from collections.abc import Callable
from dataclasses import FrozenInstanceError
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
from refused import refused

import noisescale
from noisescale import BatchSizeController, NoiseScale, Plan, Tradeoff
from noisescale.plan import Bounds
from noisescale.scheduling import (
    DoublingRule,
    Gate,
    Given,
    InsteadOfDecay,
    NormTestRule,
    Progress,
    RatioRule,
    TradeoffRule,
)
from noisescale.scheduling.decision import RunSoFar
from noisescale.scheduling.policies import PolicyLike
from noisescale.scheduling.settings import _NAMED, SchedulerOptions, Settings

NOW = Progress(steps=100, examples=3200.0)


def noise_scale(value: float, low: float = 0.0, high: float = math.inf) -> NoiseScale:
    return NoiseScale(value, low, high, grad_sq_norm=1.0, noise_trace=value, steps=50.0)


def test_the_tradeoff_keeps_the_exchange_rate_constant() -> None:
    """R = B²/b, the examples that one step saved costs, is the same at every noise scale."""
    rule = TradeoffRule(exchange_rate=50.0)

    batch_sizes = {b: rule(b, Plan(8, 1), NOW) for b in (2.0, 20.0, 200.0)}

    for b, size in batch_sizes.items():
        assert Tradeoff(min_steps=1.0, min_examples=b).exchange_rate(size) == pytest.approx(50.0)
    # Without one it is that of the run so far.
    so_far = NOW._replace(critical_batch_size=120.0)
    assert TradeoffRule()(30.0, Plan(8, 1), NOW) == pytest.approx(30.0)
    assert TradeoffRule()(30.0, Plan(8, 1), so_far) == pytest.approx(60.0)


def test_norm_test_is_the_smallest_batch_whose_error_is_below_theta() -> None:
    """The mean squared error of a batch-B gradient is tr(Σ)/B, relative to |G|² at most θ²."""
    noise_trace, grad_sq_norm, theta = 12.0, 0.25, 0.3
    wanted = NormTestRule(theta)(noise_trace / grad_sq_norm, Plan(8, 1), NOW)

    assert noise_trace / wanted / grad_sq_norm == pytest.approx(theta**2)


def test_doubling_waits_until_the_critical_batch_size_is_twice_the_batch() -> None:
    wanted = [DoublingRule()(b, Plan(16, 2), NOW) for b in (1.0, 63.9, 64.0, 1e9)]

    assert wanted == [32.0, 32.0, 64.0, 64.0]


@pytest.mark.parametrize("rule", [TradeoffRule(), RatioRule(), NormTestRule(), DoublingRule()])
def test_rules_take_both_ends_of_what_is_not_resolved(rule: Callable[..., float]) -> None:
    at_ends = rule(0.0, Plan(8, 1), NOW), rule(math.inf, Plan(8, 1), NOW)

    assert 0 <= at_ends[0] <= at_ends[1]


def test_the_critical_batch_size_so_far_is_that_of_the_whole_tradeoff() -> None:
    rng = np.random.default_rng(0)
    b, batch, steps = rng.uniform(5, 500, 40), rng.integers(4, 300, 40), rng.integers(1, 30, 40)
    run = RunSoFar()

    for values in zip(b, batch, steps, strict=True):
        run = run.plus(
            noise_scale(values[0], low=1.0, high=1e9), batch_size=values[1], steps=values[2]
        )

    oracle = Tradeoff.from_run(b, batch, steps)
    assert run.min_steps == pytest.approx(oracle.min_steps)
    assert run.critical_batch_size == pytest.approx(oracle.critical_batch_size)


def test_unresolved_steps_count_with_what_was_known_last_or_is_above_it() -> None:
    run = RunSoFar()

    # Not known yet: it waits.
    run = run.plus(noise_scale(math.nan, low=40.0), batch_size=8, steps=10)
    assert run.critical_batch_size is None
    run = run.plus(noise_scale(20.0, high=30.0), batch_size=16, steps=5)
    steps = 10 / (1 + 20 / 8) + 5 / (1 + 20 / 16)
    assert run.min_steps == pytest.approx(steps)
    assert run.critical_batch_size == pytest.approx(20.0)

    for low, counted in ((5.0, 20.0), (60.0, 60.0)):
        before = run.min_steps, run.min_examples
        run = run.plus(noise_scale(math.nan, low=low), batch_size=8, steps=10)
        steps = 10 / (1 + counted / 8)
        assert run.min_steps - before[0] == pytest.approx(steps)
        assert run.min_examples - before[1] == pytest.approx(steps * counted)


@pytest.mark.parametrize("value", [0.0, -8.0, -9.0])
def test_steps_whose_averages_show_no_noise_count_with_what_is_known(value: float) -> None:
    """Over few steps with parts of unequal weight the averaged tr(Σ) may well be negative."""
    run, none_seen = RunSoFar(), noise_scale(value, high=3.0)

    run = run.plus(none_seen, batch_size=8, steps=10)
    assert run.critical_batch_size is None
    run = run.plus(noise_scale(20.0, high=30.0), batch_size=8, steps=5)
    run = run.plus(none_seen, batch_size=8, steps=5)

    assert run.min_steps == pytest.approx(20 / (1 + 20 / 8))
    assert run.critical_batch_size == pytest.approx(20.0)


def test_a_given_schedule_holds_from_each_entry_on() -> None:
    sizes = {20: 96, 0: 64, 10: 128}

    def wanted(by: Any, *progress: float) -> float:
        return Given(sizes, by)(None, Plan(1, 1), Progress(*progress))  # type: ignore[arg-type]

    assert [wanted("steps", step, 30.0) for step in (9, 10, 10_000)] == [64.0, 128.0, 96.0]
    assert [wanted("examples", 30, seen) for seen in (9.5, 30.0)] == [64.0, 96.0]
    assert Given({5: 64})(None, Plan(8, 3), Progress(4, 96.0)) == 24.0  # before its first entry


@pytest.mark.parametrize("a", [1.0, 2.0, 5.0, 8.0])
@pytest.mark.parametrize("exponent", [0.5, 1.0], ids=["seesaw", "smith"])
def test_the_batch_grows_by_what_a_schedule_divides_the_lr_by_and_the_lr_falls_by_less(
    exponent: float, a: float
) -> None:
    """By √a with the seesaw of Meterez et al., not at all with Smith et al."""
    now = Progress(1, 1.0, learning_rate=0.1 / a, peak_learning_rate=0.1)

    batch_size = InsteadOfDecay()(None, Plan(32, 1), now)  # type: ignore[arg-type]

    lr = 0.1 / a * (batch_size / 32) ** exponent
    assert lr == pytest.approx(0.1 / a ** (1 - exponent))
    assert batch_size == pytest.approx(32 * a)
    at_zero = Progress(1, 1.0, 1.0, None, 0.0, 0.1)
    assert InsteadOfDecay()(None, Plan(32, 2), at_zero) == 64.0  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("make", "argument", "got"),
    [
        (lambda: RatioRule(0), "ratio", "0"),
        (lambda: NormTestRule(math.inf), "theta", "inf"),
        (lambda: TradeoffRule(-1.0), "exchange_rate", "-1.0"),
        (lambda: Given({}), "batch_sizes", "none"),
        (lambda: Given({0: 0}), "batch_sizes[0]", "0"),
        (lambda: Given({0: 8}, "epochs"), "by", "'epochs'"),  # type: ignore[arg-type]
        (lambda: InsteadOfDecay(0), "batch_size", "0"),
        (lambda: Gate(RatioRule(), hysteresis=1.0), "hysteresis", "1.0"),
        (lambda: Gate(RatioRule(), growth=1.2, hysteresis=1.5), "growth", "1.2 < 1.5"),
        (lambda: Gate(RatioRule(), shrink=0.25), "shrink", "0.25"),
        (lambda: Gate(RatioRule(), min_dwell=-1), "min_dwell", "-1"),
    ],
)
def test_wrong_arguments_are_named(make: Callable[[], object], argument: str, got: str) -> None:
    with refused(argument, got=got):
        make()


def test_a_schedule_whose_keys_are_texts_counts_examples() -> None:
    policy = Settings.from_options(
        SchedulerOptions(policy={"0": 64, "1.5k": 96, "2M": 128, "1e7": 160, "0.1B": 256})
    ).policy

    at = [0, 1499, 1500, 2e6 - 1, 2e6, 1e7, 1e8]
    sizes = [float(policy(None, Plan(8, 3), Progress(5, n))) for n in at]  # type: ignore[arg-type]
    assert sizes == [64, 64, 96, 96, 128, 160, 256]


@pytest.mark.parametrize(
    ("keys", "got", "argument"),
    [
        (["0", "1X"], "'1X'", "policy"),
        (["-1"], "'-1'", "policy"),
        ([0, "1M"], "'1M'", "batch_sizes"),  # as it has steps
    ],
)
def test_keys_that_are_no_numbers_of_examples_or_of_steps_are_refused(
    keys: list[Any], got: str, argument: str
) -> None:
    with refused(argument, got=got):
        Settings.from_options(SchedulerOptions(policy=dict.fromkeys(keys, 64)))


def test_settings_stay_as_they_were_checked_and_each_run_has_a_policy_of_its_own() -> None:
    options = SchedulerOptions(policy="find", max_batch_size=64)
    first, second = (Settings.from_options(options) for _ in range(2))

    with pytest.raises(FrozenInstanceError):
        first.bounds = Bounds()
    asked = {"asked": 5, "logs": [3.0], "examples": 8.0}
    first.policy.load_state_dict(asked)

    assert first.bounds == Bounds(max_batch_size=64)
    assert second.policy.state_dict() == {"asked": -math.inf, "logs": [], "examples": None}


def test_nanochats_ramp_has_the_shares_of_its_pull_request() -> None:
    policy = Settings.from_options(SchedulerOptions(policy="nanochat")).policy
    now = Progress(3, 3 * 512.0, base_batch_size=512)
    assert "stays 64, as the end" in str(policy.note(Plan(64, 1), now))
    assert policy.note(Plan(64, 1), now._replace(share=0.0)) is None

    sizes = [
        policy(None, Plan(64, 1), now._replace(share=share))  # whatever the batch is now
        for share in (0.0, 0.029, 0.03, 0.099, 0.1, 1.0)
    ]

    assert sizes == [128, 128, 256, 256, 512, 512]
    assert policy(None, Plan(64, 1), now).reason == "the end of the run is not known"


def test_megatrons_words_are_a_schedule_by_examples() -> None:
    policy = Settings.from_options(SchedulerOptions(policy="0:768 1.5k:1k 2M:1536")).policy

    sizes = [policy(None, Plan(64, 1), Progress(1, n)) for n in (0.0, 1499.0, 1500.0, 2e6)]

    assert sizes == [768, 768, 1000, 1536]


@pytest.mark.parametrize("words", ["0:768 250B", "0:768 x:12", ":", "8k:768 250B:1536", "0:0"])
def test_words_that_are_no_schedule_are_refused(words: str) -> None:
    with refused("policy") as error:
        Settings.from_options(SchedulerOptions(policy=words))

    assert '"0:64 500k:128 2M:256"' in str(error.value)


def test_each_policy_that_has_a_name_is_typed_on_its_page_and_in_docstrings() -> None:
    typed = {
        name for one in get_args(PolicyLike) for name in get_args(one) if isinstance(name, str)
    }
    page = (Path(__file__).parents[2] / "docs" / "scheduling.md").read_text()
    callback = Path(noisescale.__file__).parent / "lightning/scheduler/batch_size_scheduler.py"
    places = [page, callback.read_text(), BatchSizeController.__doc__ or ""]

    assert typed == {*_NAMED}
    assert [name for name in _NAMED for text in places if f'"{name}"' not in text] == []
