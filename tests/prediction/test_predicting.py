# SPDX-License-Identifier: Apache-2.0
"""What `predict` makes of a history; the expected numbers are worked out by hand here."""

import itertools
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from refused import refused

from noisescale import Calibration, Tradeoff, predict
from noisescale.bounded import Bounded

STEP = np.arange(20.0, 1001, 20)


def history(**changed: Any) -> dict[str, np.ndarray]:
    """1,000 steps of 64 examples on two devices, 0.1 s each, at a noise scale of 192."""
    same = np.ones(50)
    columns = {
        "step": STEP,
        "examples": 64 * STEP,
        "batch_size": 64 * same,
        "noise_scale": 192 * same,
        "low": 128 * same,
        "high": 320 * same,
        "seconds_per_step": 0.1 * same,
        "devices": 2 * same,
        "accumulation": same,
    }
    return {**columns, **{name: value * same for name, value in changed.items()}}


def test_steps_and_examples_follow_the_law_with_its_bounds() -> None:
    prediction = predict(history(), batch_sizes=[64, 256], devices=[2])

    own, larger = prediction.rows
    # 1 + b/B is 4 at B = 64; 1 + b/256 is 1.75, and 1.5, 2.25 where 1 + b/64 is 3, 6.
    assert (own.steps.value, own.steps.low) == pytest.approx((1000, 1000))
    steps = (larger.steps.value, larger.steps.low, larger.steps.high)
    assert steps == pytest.approx((1000 * 1.75 / 4, 1000 * 2.25 / 6, 1000 * 1.5 / 3))
    assert larger.examples.value == pytest.approx(256 * 1000 * 1.75 / 4)
    critical = prediction.critical_batch_size
    assert (critical.value, critical.low, critical.high) == pytest.approx((192, 128, 320))


def test_hours_and_costs_at_the_runs_own_plan_are_those_of_the_run() -> None:
    prediction = predict(
        history(), batch_sizes=[64], devices=[2], price_per_device_hour=3.0, hour_worth=20.0
    )

    (row,) = prediction.rows
    assert [row.hours.value, row.hours.low, row.hours.high] == pytest.approx(3 * [100 / 3600])
    assert row.device_hours.value == pytest.approx(200 / 3600)
    assert row.cost.value == pytest.approx(600 / 3600)
    assert row.cost_with_waiting.value == pytest.approx((600 + 2000) / 3600)
    assert (row.extrapolated, row.basis) == ((), "timed")
    assert prediction.own_batch_size == 64


def test_the_time_of_a_run_with_several_batch_sizes_is_that_of_its_steps() -> None:
    """Every fifth log step is slow: the run takes 1.8 times what the medians say."""
    size = np.where(STEP <= 500, 64.0, 256.0)
    seconds = np.where(STEP <= 500, 0.1, 0.2) * np.where(np.arange(50) % 5 == 0, 5, 1)

    prediction = predict(
        history(batch_size=size, examples=np.cumsum(20 * size), seconds_per_step=seconds),
        batch_sizes=[64, 256],
        devices=[2],
    )

    took = [row.seconds_per_step.value for row in prediction.rows]
    assert 500 * sum(took) == pytest.approx(20 * seconds.sum())
    assert took == pytest.approx([0.18, 0.36], rel=0.01)
    assert [row.basis for row in prediction.rows] == ["timed", "timed"]
    assert prediction.hardware.max_device_batch_size == 128


def test_the_short_last_batches_of_epochs_leave_the_runs_own_batch_as_it_is() -> None:
    """`drop_last=False`: 22 batches of 64 and one of 29 in an epoch. The mean is 62.5."""
    step = np.arange(10.0, 1001, 10)
    examples = 64 * step - 35 * (step // 23)
    size = np.where(step % 23 == 0, 29.0, 64.0)
    same = np.ones(100)

    prediction = predict(
        {
            **{"step": step, "examples": examples, "batch_size": size},
            **{"noise_scale": 192 * same, "low": 128 * same, "high": 320 * same},
            **{"seconds_per_step": 0.1 * same, "devices": same, "accumulation": 2 * same},
        },
        devices=[1],
    )

    own = next(row for row in prediction.rows if row.batch_size == 64)
    assert (own.device_batch_size, own.accumulation) == (32, 2)
    assert prediction.hardware.max_device_batch_size == 32
    assert (own.extrapolated, own.basis) == ((), "timed")
    assert own.hours.value * 3600 == pytest.approx(100, rel=0.03)


def test_larger_batches_than_a_device_took_are_accumulated_and_their_times_assumed() -> None:
    rows = predict(history(), batch_sizes=[32, 64, 256], devices=[2, 4]).rows

    plans = [(r.devices, r.device_batch_size, r.accumulation, r.basis) for r in rows]
    assert plans == [
        (2, 16, 1, "assumed"),
        (2, 32, 1, "timed"),
        (2, 32, 4, "assumed"),
        (4, 8, 1, "assumed"),
        (4, 16, 1, "assumed"),
        (4, 32, 2, "assumed"),
    ]


def test_changes_of_the_batch_size_within_the_run_are_counted() -> None:
    """First 500 steps of 64, then 500 of 192, at b = 192: progress 500/4 + 500/2 = 375."""
    size = np.where(STEP <= 500, 64, 192)
    prediction = predict(
        history(batch_size=size, examples=np.cumsum(20 * size)), batch_sizes=[192], devices=[2]
    )

    assert prediction.rows[0].steps.value == pytest.approx(2 * 375)
    assert prediction.own_batch_size is None


@pytest.mark.parametrize(
    ("batch_size", "devices", "most"),
    [
        (256, 2, 128),  # it is said to fit
        (61, 7, 61 / 7),  # 61 over seven times a seventh of it is 1 + 2e-16
    ],
)
def test_a_device_batch_that_fits_is_not_accumulated(
    batch_size: int, devices: int, most: float
) -> None:
    (row,) = predict(history(), batch_size, devices, max_device_batch_size=most).rows

    assert (row.device_batch_size, row.accumulation, row.basis) == (
        batch_size / devices,
        1,
        "assumed",
    )


def test_the_fastest_batch_of_some_devices_is_the_best_and_that_of_the_runs_own_recommended() -> (
    None
):
    prediction = predict(history())

    for devices in (2, 4, 8, 16):
        best = prediction.best_for(devices)
        assert best.hours.value == min(r.hours.value for r in prediction.rows_for(devices))
    assert prediction.recommended == prediction.best_for(2)


def test_more_devices_pay_as_long_as_they_save_the_share_that_they_add() -> None:
    prediction = predict(history())

    more = prediction.on_more_devices
    assert more is not None
    assert more.devices > 2
    products = [row.hours.value * row.device_hours.value for row in prediction.rows]
    assert more.hours.value * more.device_hours.value == pytest.approx(min(products))


def test_untimed_the_largest_batch_whose_examples_are_few_is_recommended() -> None:
    """B_crit = 192: at 128 the examples are 320/256 = 1.25 times those at 64, at 64 1.2 at 115."""
    untimed = history(seconds_per_step=math.nan)

    found = [
        predict(untimed, [32, 64, most, 256], [2]).recommended_batch_size for most in (115, 116)
    ]

    assert found == [115, 64]


def test_untimed_the_balanced_batch_is_the_best_as_far_as_it_fills_the_devices() -> None:
    untimed = history(seconds_per_step=math.nan)

    prediction = predict(untimed)

    more = prediction.on_more_devices
    assert more is not None
    assert more.devices * 32 == more.batch_size
    assert prediction.best_for(2).batch_size in (128, 256)  # B_crit = 192
    few = predict(untimed, devices=[2, 4, 8], max_device_batch_size=1000)
    assert few.on_more_devices is None


def test_the_worth_of_an_hour_moves_the_recommendation() -> None:
    patient, hurried = (
        predict(history(), price_per_device_hour=2.0, hour_worth=worth).recommended
        for worth in (0.1, 1000.0)
    )

    assert patient.devices < hurried.devices
    assert patient.hours.value > hurried.hours.value
    assert patient.device_hours.value < hurried.device_hours.value
    every = predict(history(), price_per_device_hour=2.0, hour_worth=1000.0).rows
    assert hurried.cost_with_waiting.value == min(r.cost_with_waiting.value for r in every)


def test_prices_count_also_where_only_bounds_are_known() -> None:
    unresolved = history(noise_scale=math.nan, high=math.inf)

    row = predict(unresolved, price_per_device_hour=2.0, hour_worth=1000.0).recommended

    at_the_bound = predict(history(noise_scale=128), price_per_device_hour=2.0, hour_worth=1000.0)
    assert row.batch_size == at_the_bound.recommended_batch_size > 64
    assert row.devices == at_the_bound.recommended.devices


def test_what_is_not_resolved_stays_a_bound() -> None:
    prediction = predict(history(noise_scale=math.nan, high=math.inf), batch_sizes=[64, 256])

    row = prediction.rows_for(2)[1]
    assert not prediction.resolved
    assert prediction.critical_batch_size.low == pytest.approx(128)
    assert prediction.critical_batch_size.high == math.inf
    assert math.isnan(row.steps.value)
    assert row.steps.low == pytest.approx(250)  # perfect scaling
    assert row.steps.high == pytest.approx(500)
    assert "at least 128 examples" in prediction.warnings[0]


def test_rows_far_from_the_run_are_marked_and_told() -> None:
    prediction = predict(history(), batch_sizes=[4, 64, 1024], devices=[2])

    assert [row.extrapolated for row in prediction.rows] == [
        ("batch size",),  # 2 of a device's 32 examples
        (),
        ("batch size",),
    ]
    (warning,) = prediction.warnings
    assert "sizes of 4, 1,024 examples" in warning


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"coverage": np.where(STEP <= 300, 0.95, math.nan)}, "95% of |g|²"),
        ({"high": np.where(STEP <= 300, math.inf, 320)}, "In 30 % of"),
    ],
)
def test_what_the_noise_scale_leaves_out_or_does_not_resolve_is_told(
    changed: dict[str, Any], told: str
) -> None:
    (warning,) = predict(history(**changed), batch_sizes=[64], devices=[2]).warnings

    assert told in warning


def test_prices_of_a_recommendation_that_was_not_timed_have_a_warning() -> None:
    prediction = predict(history(), batch_sizes=[4], devices=[2], price_per_device_hour=1.0)

    assert prediction.recommended.basis == "assumed"
    assert "`noisescale profile`" in prediction.warnings[-1]


def increments(noise: float, signal: float, measured: Any = True) -> dict[str, Any]:
    """Of 20 steps a row: tr(Σ) and |G|² of each over its |g|², which scatter by a tenth of that."""
    weight = np.where(measured, 20 * 64.0, 0.0)
    spread = 0.01 * 64 * weight
    return {
        "increment_measured_steps": np.where(measured, 20, 0),
        "increment_weight": weight,
        "increment_noise_trace": noise * weight,
        "increment_grad_sq_norm": signal * weight,
        "increment_noise_trace_squares": max(noise, 1) ** 2 * spread,
        "increment_products": 0,
        "increment_grad_sq_norm_squares": signal**2 * spread,
    }


@pytest.mark.parametrize(
    ("measured", "told"),
    [
        ((STEP <= 100) | (STEP > 500), "In 40 % of"),
        (STEP > 400, "begins at step 400"),  # as of a run that was resumed into another folder
    ],
)
def test_steps_in_which_nothing_was_measured_are_told(measured: Any, told: str) -> None:
    """At b = 192 and B = 64 a quarter of |g|² is |G|²."""
    prediction = predict(history(**increments(48, 0.25, measured)), devices=[2], batch_sizes=[64])

    assert prediction.critical_batch_size.value == pytest.approx(192, rel=1e-3)
    (warning,) = prediction.warnings
    assert told in warning


def test_what_the_display_had_bounds_a_run_whose_rows_say_nothing() -> None:
    """Few steps were measured since the run was resumed; the display still has those before."""
    few = increments(48, 0.25, STEP == 1000) | {"increment_measured_steps": 1.0 * (STEP == 1000)}
    few |= {"increment_sq_weight": few["increment_weight"] ** 2}

    prediction = predict(history(**few), devices=[2], batch_sizes=[512])

    critical = prediction.critical_batch_size
    assert (critical.low, critical.high) == (pytest.approx(128), math.inf)
    assert math.isnan(critical.value)
    assert prediction.rows[0].steps.high == pytest.approx(1000 * (1 + 128 / 512) / (1 + 128 / 64))


def test_a_run_whose_late_steps_hardly_say_anything_is_answered_with_bounds() -> None:
    """Digits, SGD, a cosine learning rate, batches of 64: 47 of 723 steps measured by halves.

    It was refused as having "neither" while the display had 106 (71 to 184). The noise scale of
    the whole data set at every 20th step gives a critical batch size of 430.
    """
    found = predict(Path(__file__).with_name("few_late_steps.csv"), [32, 64, 512], [1])

    critical, (half, own, large) = found.critical_batch_size, found.rows
    assert 64 < critical.low < 430 < critical.high
    law = Tradeoff(1 / (430 / 64 + 1), 64 * (1 - 1 / (430 / 64 + 1)))  # of a step of 64
    for row in (half, own, large):
        ratio = law.steps(row.batch_size)
        assert row.steps.low <= own.steps.low * ratio * (1 + 1e-9)
        assert row.steps.high >= own.steps.low * ratio * (1 - 1e-9)
    assert own.steps.low == own.steps.high == 705  # the last measured one
    assert half.steps.low > 705
    assert large.steps.high < 705
    assert any("not resolved" in warning for warning in found.warnings)
    assert f"at least {critical.low:.1f} examples" in found.to_text()


def test_noise_within_the_measuring_error_gives_an_upper_bound() -> None:
    """tr(Σ) is -0.002 with an error of 0.1/√1000 or so, beside a |G|² of 1."""
    prediction = predict(history(**increments(-0.002, 1)), batch_sizes=[8, 64, 512], devices=[2])

    critical = prediction.critical_batch_size
    assert (critical.value, critical.low) == (0, 0)
    assert critical.high == pytest.approx(1.96 * 0.1 / math.sqrt(1000) - 0.002, rel=0.2)
    assert [row.steps.value for row in prediction.rows] == pytest.approx([1000, 1000, 1000])
    assert prediction.rows[0].steps.high > 1000 > prediction.rows[2].steps.low
    assert "at most" in prediction.to_text()


def test_gradients_without_noise_have_no_critical_batch_size() -> None:
    """tr(Σ) then comes out on either side of 0; here below it by more than its error."""
    with refused("run", requirement="a noise scale above 0"):
        predict(history(**increments(-0.05, 1)))


def test_the_uncalibrated_theory_is_labelled_and_a_calibration_named() -> None:
    theory, given, fitted = (
        predict(history(), calibration=c)
        for c in (None, 2, Calibration(Bounded(3.0, 2.0, 4.0), "a sweep"))
    )

    assert theory.assumptions[1].startswith("kappa = 1: not calibrated")
    assert given.assumptions[1].endswith("kappa = 2: given.")
    assert fitted.assumptions[1].endswith("kappa = 3 (2 to 4): a sweep.")
    assert given.critical_batch_size.value == pytest.approx(384)


def test_that_the_logged_estimates_lag_is_said_where_they_are_taken() -> None:
    lags = "The noise scale is the one that was shown"
    rng = np.random.default_rng(0)
    sums = {
        "sum_weight": 64 * STEP,
        "sum_noise_trace": 64 * np.cumsum(20 * rng.normal(1, 0.05, 50)),
        "sum_grad_sq_norm": 64 * np.cumsum(20 / 192 * rng.normal(1, 0.05, 50)),
    }

    logged, own = predict(history()), predict(history(**sums))

    assert any(text.startswith(lags) for text in logged.assumptions)
    assert not any(text.startswith(lags) for text in own.assumptions)
    assert own.critical_batch_size.value == pytest.approx(192, rel=0.05)


def test_a_run_without_seconds_has_steps_and_no_hours() -> None:
    prediction = predict(history(seconds_per_step=math.nan), batch_sizes=[64], devices=[2])

    (row,) = prediction.rows
    assert row.steps.value == pytest.approx(1000)
    assert (row.hours.known, row.basis) == (False, None)
    assert any(text.startswith("No seconds") for text in prediction.assumptions)


def test_a_history_from_before_devices_were_recorded_counts_one_and_says_so() -> None:
    columns = history()
    del columns["devices"], columns["accumulation"]

    prediction = predict(columns, batch_sizes=[64])

    assert [row.devices for row in prediction.rows] == [1, 2, 4, 8]
    assert any("number of devices was not recorded" in text for text in prediction.assumptions)


def test_a_lone_short_batch_is_no_configuration_of_the_run() -> None:
    size = np.where(STEP <= 500, 64.0, 256.0)
    size[-1] = 6
    seconds = np.where(STEP <= 500, 0.1, 0.25)

    prediction = predict(
        history(batch_size=size, examples=np.cumsum(20 * size), seconds_per_step=seconds),
        batch_sizes=[64, 256],
        devices=[2],
    )

    found = [r.seconds_per_step.value for r in prediction.rows]
    assert found == pytest.approx([0.1, 0.25], rel=0.01)


def test_devices_are_in_one_node_unless_a_node_has_fewer() -> None:
    assumed = "All devices are assumed to be in one node."

    prediction = predict(history(devices=16), batch_sizes=[64], devices=[16], devices_per_node=8)

    (row,) = prediction.rows
    assert row.basis == "timed"
    assert row.seconds_per_step.value == pytest.approx(0.1)
    assert prediction.hardware.step_time is not None
    assert not prediction.hardware.step_time.is_timed(4, 1, 16, 1)
    assert assumed in predict(history()).assumptions
    assert assumed not in prediction.assumptions


@pytest.mark.parametrize(
    ("given", "arguments", "got"),
    [
        ({"price_per_device_hour": 0}, "price_per_device_hour", "0"),
        ({"price_per_device_hour": 2, "hour_worth": -1}, "hour_worth", "-1"),
        ({"price_per_device_hour": 1, "hour_worth": 1e300}, "hour_worth", "1e+300"),
        ({"hour_worth": 5}, "hour_worth", "5 and None"),
        ({"batch_sizes": []}, "batch_sizes", "[]"),
        ({"batch_sizes": [math.nan]}, "batch_sizes", "nan"),
        ({"batch_sizes": itertools.count(1)}, "batch_sizes", "more"),
        ({"batch_sizes": [4], "devices": [8]}, "batch_sizes", "at most 4 for 8 devices"),
        ({"devices": [math.inf]}, "devices", "[inf]"),
        ({"devices": [1.5]}, "devices", "[1.5]"),
        ({"devices": [0, 2]}, "devices", "[0, 2]"),
    ],
)
def test_bad_arguments_are_refused(given: dict[str, Any], arguments: str, got: str) -> None:
    with refused(arguments, got=got):
        predict(history(), **given)


@pytest.mark.parametrize(
    ("changed", "argument", "got"),
    [
        ({"noise_scale": math.nan, "low": 0, "high": math.inf}, "run", "neither in 1,000 steps"),
        ({"examples": math.nan}, "run", "nan examples a step up to step 20"),
        ({"seconds_per_step": math.nan}, "price_per_device_hour", "2 for a run that has none"),
    ],
)
def test_runs_that_say_nothing_are_refused(
    changed: dict[str, float], argument: str, got: str
) -> None:
    with refused(argument, got=got):
        predict(history(**changed), price_per_device_hour=2)
