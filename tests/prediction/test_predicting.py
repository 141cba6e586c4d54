# SPDX-License-Identifier: Apache-2.0
"""What `predict` makes of a history; the expected numbers are worked out by hand here."""

import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from noisescale import Calibration, History, Tradeoff, predict
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
    rows = predict(history(), batch_sizes=[64, 256], devices=[2]).rows

    # 1 + b/B is 4 at B = 64; 1 + b/256 is 1.75, and 1.5, 2.25 where 1 + b/64 is 3, 6.
    assert (rows[0].steps.value, rows[0].steps.low) == pytest.approx((1000, 1000))
    assert rows[1].steps.value == pytest.approx(1000 * 1.75 / 4)
    assert rows[1].steps.low == pytest.approx(1000 * 2.25 / 6)
    assert rows[1].steps.high == pytest.approx(1000 * 1.5 / 3)
    assert rows[1].examples.value == pytest.approx(256 * 1000 * 1.75 / 4)


def test_the_critical_batch_size_is_the_constant_noise_scale() -> None:
    critical = predict(history()).critical_batch_size

    assert (critical.value, critical.low, critical.high) == pytest.approx((192, 128, 320))


def test_hours_and_costs_at_the_runs_own_plan_are_those_of_the_run() -> None:
    prediction = predict(
        history(), batch_sizes=[64], devices=[2], price_per_device_hour=3.0, hour_worth=20.0
    )

    (row,) = prediction.rows
    assert row.hours.value == pytest.approx(100 / 3600)
    assert row.device_hours.value == pytest.approx(200 / 3600)
    assert row.cost.value == pytest.approx(600 / 3600)
    assert row.cost_with_waiting.value == pytest.approx((600 + 2000) / 3600)
    assert (row.extrapolated, row.basis) == ((), "timed")
    assert prediction.own_batch_size == 64


def test_the_time_of_a_run_has_its_slow_steps() -> None:
    """Every tenth log step writes a checkpoint: 100 of 1,000 steps take ten times as long."""
    seconds = np.where(np.arange(50) % 10 == 0, 1.0, 0.1)

    (row,) = predict(history(seconds_per_step=seconds), batch_sizes=[64], devices=[2]).rows

    assert row.hours.value == pytest.approx((100 * 1.0 + 900 * 0.1) / 3600)
    assert (row.hours.low, row.hours.high) == pytest.approx((row.hours.value,) * 2)


def test_the_time_of_a_run_with_several_batch_sizes_is_that_of_its_steps() -> None:
    """Every fifth log step is slow: the run takes 1.8 times what the medians say."""
    size = np.where(STEP <= 500, 64.0, 256.0)
    seconds = np.where(STEP <= 500, 0.1, 0.2) * np.where(np.arange(50) % 5 == 0, 5, 1)

    rows = predict(
        history(batch_size=size, examples=np.cumsum(20 * size), seconds_per_step=seconds),
        batch_sizes=[64, 256],
        devices=[2],
    ).rows

    took = [row.seconds_per_step.value for row in rows]
    assert 500 * sum(took) == pytest.approx(20 * seconds.sum())
    assert took == pytest.approx([0.18, 0.36], rel=0.01)
    assert [row.basis for row in rows] == ["timed", "timed"]


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


def test_a_plan_that_the_run_was_not_timed_at_is_assumed() -> None:
    rows = predict(history(), batch_sizes=[32, 64, 128], devices=[2, 4]).rows

    assert [(r.devices, r.batch_size, r.basis) for r in rows] == [
        (2, 32, "assumed"),
        (2, 64, "timed"),
        (2, 128, "assumed"),  # micro-batches of 32, as if no more did fit
        (4, 32, "assumed"),
        (4, 64, "assumed"),
        (4, 128, "assumed"),
    ]
    untimed = predict(history(seconds_per_step=math.nan), batch_sizes=[64], devices=[2])
    assert untimed.rows[0].basis is None


def test_changes_of_the_batch_size_within_the_run_are_counted() -> None:
    """First 500 steps of 64, then 500 of 192, at b = 192: progress 500/4 + 500/2 = 375."""
    size = np.where(STEP <= 500, 64, 192)
    prediction = predict(
        history(batch_size=size, examples=np.cumsum(20 * size)), batch_sizes=[192], devices=[2]
    )

    assert prediction.rows[0].steps.value == pytest.approx(2 * 375)
    assert prediction.own_batch_size is None


def test_larger_batches_than_a_device_was_seen_to_take_are_accumulated() -> None:
    rows = predict(history(), batch_sizes=[32, 64, 256], devices=[2, 4]).rows

    plans = [(r.devices, r.device_batch_size, r.accumulation) for r in rows]
    assert plans == [(2, 16, 1), (2, 32, 1), (2, 32, 4), (4, 8, 1), (4, 16, 1), (4, 32, 2)]


def test_a_larger_device_batch_is_planned_where_it_is_said_to_fit() -> None:
    (row,) = predict(history(), batch_sizes=[256], devices=[2], max_device_batch_size=128).rows

    assert (row.device_batch_size, row.accumulation) == (128, 1)
    assert (row.extrapolated, row.basis) == ((), "assumed")


def test_without_prices_the_fastest_batch_on_the_runs_own_devices_is_recommended() -> None:
    prediction = predict(history())

    own = prediction.rows_for(2)
    assert prediction.recommended == min(own, key=lambda row: row.hours.value)


def test_more_devices_pay_as_long_as_they_save_the_share_that_they_add() -> None:
    prediction = predict(history())

    more = prediction.on_more_devices
    assert more is not None
    assert more.devices > 2
    products = [row.hours.value * row.device_hours.value for row in prediction.rows]
    assert more.hours.value * more.device_hours.value == pytest.approx(min(products))


def test_no_row_is_faster_and_cheaper_than_what_is_recommended() -> None:
    prediction = predict(history())

    for best in (prediction.recommended, prediction.on_more_devices):
        assert best is not None
        assert not [
            row
            for row in prediction.rows
            if row.hours.value < best.hours.value
            and row.device_hours.value < best.device_hours.value
        ]


def test_untimed_the_largest_batch_whose_examples_are_few_is_recommended() -> None:
    """B_crit = 192: at 128 the examples are 320/256 = 1.25 times those at 64, at 64 1.2 at 115."""
    untimed = history(seconds_per_step=math.nan)

    found = [
        predict(untimed, [32, 64, most, 256], [2]).recommended_batch_size for most in (115, 116)
    ]

    assert found == [115, 64]


def test_more_devices_take_the_balanced_batch_as_far_as_it_fills_them() -> None:
    untimed = history(seconds_per_step=math.nan)

    more = predict(untimed).on_more_devices

    assert more is not None
    assert more.devices * 32 == more.batch_size
    few = predict(untimed, devices=[2, 4, 8], max_device_batch_size=1000)
    assert few.on_more_devices is None


def test_rounding_does_not_add_a_micro_batch() -> None:
    """61 over seven times a seventh of it is 1 + 2e-16."""
    (row,) = predict(history(), batch_sizes=[61], devices=[7], max_device_batch_size=61 / 7).rows

    assert row.accumulation == 1


def test_without_seconds_the_balanced_batch_of_some_devices_is_the_best() -> None:
    best = predict(history(seconds_per_step=math.nan)).best_for(2)

    assert best.batch_size in (128, 256)  # B_crit = 192


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


def test_the_fastest_batch_of_some_devices_has_the_fewest_hours() -> None:
    prediction = predict(history())

    for devices in (2, 4, 8, 16):
        best = prediction.best_for(devices)
        assert best.hours.value == min(r.hours.value for r in prediction.rows_for(devices))


def test_what_is_not_resolved_stays_a_bound() -> None:
    prediction = predict(history(noise_scale=math.nan, high=math.inf), batch_sizes=[64, 256])

    row = prediction.rows_for(2)[1]
    assert not prediction.resolved
    assert prediction.critical_batch_size.low == pytest.approx(128)
    assert prediction.critical_batch_size.high == math.inf
    assert math.isnan(row.steps.value)
    assert row.steps.low == pytest.approx(250)  # perfect scaling
    assert row.steps.high == pytest.approx(500)
    assert prediction.warnings[0].startswith(
        "The critical batch size of the whole run is not resolved: it is at least 128 examples."
        " At batch size 64, the measured steps do not tell the mean gradient from its noise."
    )


def test_rows_far_from_the_run_are_marked_and_told() -> None:
    prediction = predict(history(), batch_sizes=[4, 64, 1024], devices=[2])

    assert [row.extrapolated for row in prediction.rows] == [
        ("batch size",),  # 2 of a device's 32 examples
        (),
        ("batch size",),
    ]
    assert prediction.warnings == (
        "Batch sizes of 4, 1,024 examples are more than 8 times off the run's own: so far off, a"
        " learning rate at which the law holds may not exist. Measure a run at a nearer batch"
        " size.",
    )


def test_parameters_that_the_noise_scale_leaves_out_are_told() -> None:
    coverage = np.where(STEP <= 300, 0.95, math.nan)

    prediction = predict(history(coverage=coverage), batch_sizes=[64], devices=[2])

    assert prediction.warnings == (
        "The noise scale covers parameters with 95% of |g|²: the other parameters are in layers"
        " without a formula for single examples.",
    )


def test_devices_are_in_one_node_unless_a_node_has_fewer() -> None:
    assumed = "All devices are assumed to be in one node."

    assert assumed in predict(history()).assumptions
    assert assumed not in predict(history(), devices_per_node=2).assumptions


def test_prices_of_a_recommendation_that_was_not_timed_have_a_warning() -> None:
    prediction = predict(history(), batch_sizes=[4], devices=[2], price_per_device_hour=1.0)

    assert prediction.recommended.basis == "assumed"
    assert prediction.warnings[-1] == (
        "The hours of the recommended batch size on 2 devices are assumed: no such configuration"
        " was timed. Time it with `noisescale profile`."
    )


def test_many_unresolved_steps_are_told() -> None:
    high = np.where(STEP <= 300, math.inf, 320)

    prediction = predict(history(high=high), devices=[2], batch_sizes=[64])

    assert prediction.warnings == (
        "In 30 % of the steps the noise scale is not resolved by itself: the prediction uses the"
        " measured values with their errors.",
    )


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


def test_steps_in_which_nothing_was_measured_are_told() -> None:
    """At b = 192 and B = 64 a quarter of |g|² is |G|²."""
    measured = history(**increments(48, 0.25, (STEP <= 100) | (STEP > 500)))

    prediction = predict(measured, devices=[2], batch_sizes=[64])

    assert prediction.critical_batch_size.value == pytest.approx(192, rel=1e-3)
    assert prediction.warnings == (
        "In 40 % of the steps nothing was measured: the nearest measured steps are used instead.",
    )


def test_a_log_that_begins_in_mid_run_is_told() -> None:
    """As of a run that was resumed into another folder."""
    prediction = predict(history(**increments(48, 0.25, STEP > 400)), devices=[2])

    assert prediction.critical_batch_size.value == pytest.approx(192, rel=1e-3)
    (warning,) = prediction.warnings
    assert "The log begins at step 400" in warning
    assert "put the event files of its parts into one folder" in warning


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
    message = (
        "`run` must have a noise scale above 0, got no noise beyond the measuring error in"
        " 1,000 steps. Train at a smaller batch size, where the noise is larger, or check that the"
        " batches differ."
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        predict(history(**increments(-0.05, 1)))


def test_the_uncalibrated_theory_is_labelled_and_a_calibration_named() -> None:
    theory, given, fitted = (
        predict(history(), calibration=c).assumptions[1]
        for c in (None, 2, Calibration(Bounded(3.0, 2.0, 4.0), "a sweep"))
    )

    assert theory.startswith("kappa = 1: not calibrated by this model. In the theory kappa is 1")
    assert given == "B_crit = kappa·B_simple, kappa = 2: given."
    assert fitted == "B_crit = kappa·B_simple, kappa = 3 (2 to 4): a sweep."
    assert predict(history(), calibration=2).critical_batch_size.value == pytest.approx(384)


def test_that_the_logged_estimates_lag_is_said_where_they_are_taken() -> None:
    lags = "The noise scale is the one that was shown at each row, of the last measured steps."
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
    assert not row.hours.known
    assert "No seconds a step are known: hours and costs are left out." in prediction.assumptions


def test_a_history_from_before_devices_were_recorded_counts_one_and_says_so() -> None:
    columns = history()
    del columns["devices"], columns["accumulation"]

    prediction = predict(columns, batch_sizes=[64])

    assert [row.devices for row in prediction.rows] == [1, 2, 4, 8]
    assert (
        "The run's number of devices was not recorded: one device is assumed."
        in prediction.assumptions
    )


def test_configurations_that_a_run_changed_between_are_all_used_for_its_times() -> None:
    """Device batches of 32 at 0.1 s, then of 128 at 0.25 s; a lone short batch is no third."""
    size = np.where(STEP <= 500, 64.0, 256.0)
    size[-1] = 6
    seconds = np.where(STEP <= 500, 0.1, 0.25)

    prediction = predict(
        history(batch_size=size, examples=np.cumsum(20 * size), seconds_per_step=seconds),
        batch_sizes=[64, 256],
        devices=[2],
    )

    assert prediction.hardware.max_device_batch_size == 128
    assert [r.seconds_per_step.value for r in prediction.rows] == pytest.approx(
        [0.1, 0.25], rel=0.01
    )


def test_devices_of_a_run_are_on_as_many_nodes_as_they_need() -> None:
    prediction = predict(history(devices=16), batch_sizes=[64], devices=[16], devices_per_node=8)

    (row,) = prediction.rows
    assert row.basis == "timed"
    assert row.seconds_per_step.value == pytest.approx(0.1)
    assert prediction.hardware.step_time is not None
    assert not prediction.hardware.step_time.is_timed(4, 1, 16, 1)


def test_the_monitors_history_predicts_as_it_is() -> None:
    own = History()
    for k in range(1, 11):
        own.append(step=50 * k, examples=3200 * k, batch_size=64, noise_scale=64, low=50, high=90)

    assert predict(own, batch_sizes=[128]).rows[0].steps.value == pytest.approx(500 * 1.5 / 2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"price_per_device_hour": 0},
            "`price_per_device_hour` must be positive and finite, got 0. Leave it out if it is"
            " unknown.",
        ),
        (
            {"price_per_device_hour": 2, "hour_worth": -1},
            "`hour_worth` must be positive and finite, got -1. Leave it out if it is unknown.",
        ),
        (
            {"hour_worth": 5},
            "`hour_worth` must come with `price_per_device_hour`, got 5 and None. Give the price of"
            " a device-hour too: the two are weighed against each other.",
        ),
        (
            {"batch_sizes": []},
            "`batch_sizes` must not be empty, got []. Leave it out for a ladder.",
        ),
        (
            {"batch_sizes": [math.nan]},
            "`batch_sizes` must be positive and finite, got nan. Leave it out if it is unknown.",
        ),
        (
            {"batch_sizes": [4], "devices": [8]},
            "`batch_sizes` must reach the number of devices, got at most 4 for 8 devices. Each"
            " device needs an example.",
        ),
        (
            {"devices": [math.inf]},
            "`devices` must be whole numbers from 1 to 1,000,000, got [inf]. Give for instance"
            " [1, 2, 4, 8].",
        ),
        (
            {"devices": [1.5]},
            "`devices` must be whole numbers from 1 to 1,000,000, got [1.5]. Give for instance"
            " [1, 2, 4, 8].",
        ),
        (
            {"devices": [0, 2]},
            "`devices` must be whole numbers from 1 to 1,000,000, got [0, 2]. Give for instance"
            " [1, 2, 4, 8].",
        ),
    ],
)
def test_bad_arguments_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        predict(history(), **arguments)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {"noise_scale": math.nan, "low": 0, "high": math.inf},
            "`run` must have a noise scale, or a lower bound of it, got neither in 1,000 steps."
            " Train longer, or at a larger batch size, until the monitor has one.",
        ),
        (
            {"examples": math.nan},
            "`run` must have `examples` that rise with the steps, got nan examples a step up to"
            " step 20. Give `batch_size_fn` to the monitor if its count is wrong.",
        ),
        (
            {"seconds_per_step": math.nan},
            "`price_per_device_hour` must come with seconds a step, got 2 for a run that has none."
            " Give `step_times`, measured by `noisescale profile`.",
        ),
    ],
)
def test_runs_that_say_nothing_are_refused(changed: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        predict(history(**changed), price_per_device_hour=2)
