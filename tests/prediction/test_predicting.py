# SPDX-License-Identifier: Apache-2.0
"""What `predict` makes of a history; the expected numbers are worked out by hand here."""

import itertools
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import reported_runs
from refused import refused

from noisescale import Calibration, Tradeoff, predict
from noisescale.bounded import Bounded
from noisescale.history.increments import SQUARES, SUMS

STEP = np.arange(20.0, 1001, 20)


def history(**changed: Any) -> dict[str, np.ndarray]:
    """1,000 steps of 64 examples on two devices, 0.1 s each, at a noise scale of 192."""
    same = {"rows": 50, "every": 20, "noise_scale": 192, "low": 128, "high": 320, "seconds": 0.1}
    return reported_runs.history(**(same | changed))


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
    prediction = predict(history(), [64], [2], price_per_device_hour=3.0)

    (row,) = prediction.rows
    assert [row.hours.value, row.hours.low, row.hours.high] == pytest.approx(3 * [100 / 3600])
    assert row.device_hours.value == pytest.approx(200 / 3600)
    assert row.cost.value == pytest.approx(600 / 3600)
    assert (row.extrapolated, row.basis) == ((), "timed")
    assert prediction.own_batch_size == 64


def test_the_time_of_a_run_with_several_batch_sizes_is_that_of_its_steps() -> None:
    """Every fifth log step is slow: the run takes 1.8 times what the medians say."""
    size = np.where(STEP <= 500, 64.0, 256.0)
    seconds = np.where(STEP <= 500, 0.1, 0.2) * np.where(np.arange(50) % 5 == 0, 5, 1)

    run = history(batch_size=size, examples=np.cumsum(20 * size), seconds_per_step=seconds)
    prediction = predict(run, batch_sizes=[64, 256], devices=[2])

    took = [row.seconds_per_step.value for row in prediction.rows]
    assert 500 * sum(took) == pytest.approx(20 * seconds.sum())
    assert took == pytest.approx([0.18, 0.36], rel=0.01)
    assert [row.basis for row in prediction.rows] == ["timed", "timed"]
    assert prediction.hardware.max_device_batch_size == 128


def test_a_run_whose_rows_all_end_in_a_short_batch_has_the_batch_size_of_its_other_steps() -> None:
    """Epochs of 1,024 and 413 examples, with a row at the end of each."""
    step = np.arange(2.0, 401, 2)
    course = {"step": step, "examples": 1437 * step / 2, "batch_size": 413.0}

    prediction = predict(history(rows=200, devices=1, **course))

    assert prediction.own_batch_size == 1024
    assert "You train at batch size 1,024." in prediction.decision.reason
    own = prediction.own_row
    assert (own.device_batch_size, own.basis, own.steps.value) == (1024, "timed", 400)
    assert own.seconds_per_step.value == pytest.approx(0.1)
    course |= {"step": 5 * step, "examples": 5 * course["examples"]}  # only the mean is known
    assert predict(history(rows=200, devices=1, **course)).own_batch_size == 718.5


def test_a_run_that_changed_its_batch_size_and_ends_in_short_batches_has_the_last_usual_one() -> (
    None
):
    size, late = np.where(STEP <= 500, 64.0, 128.0), STEP > 940
    examples = np.cumsum(20 * size) - 123 * np.cumsum(late)

    prediction = predict(history(batch_size=np.where(late, 5.0, size), examples=examples))

    assert prediction.own_batch_size is None
    assert "You trained at batch sizes from 64 to 128, last at 128" in prediction.decision.reason


def test_the_short_last_batches_of_epochs_leave_the_runs_own_batch_as_it_is() -> None:
    """`drop_last=False`: 22 batches of 64 and one of 29 in an epoch. The mean is 62.5."""
    step = np.arange(10.0, 1001, 10)
    examples = 64 * step - 35 * (step // 23)
    size = np.where(step % 23 == 0, 29.0, 64.0)

    course = {"step": step, "examples": examples, "batch_size": size}
    prediction = predict(history(rows=100, devices=1, accumulation=2, **course), devices=[1])

    own = next(row for row in prediction.rows if row.batch_size == 64)
    assert (own.device_batch_size, own.accumulation) == (32, 2)
    assert prediction.hardware.max_device_batch_size == 32
    assert (own.extrapolated, own.basis) == ((), "timed")
    assert own.hours.value * 3600 == pytest.approx(100, rel=0.03)


def test_larger_batches_than_a_device_took_are_accumulated_and_their_times_assumed() -> None:
    rows = predict(history(), batch_sizes=[32, 64, 256], devices=[2, 4]).rows

    plans = [(r.devices, r.device_batch_size, r.accumulation) for r in rows]
    assert plans == [(2, 16, 1), (2, 32, 1), (2, 32, 4), (4, 8, 1), (4, 16, 1), (4, 32, 2)]
    assert [r.basis for r in rows] == ["assumed", "timed", *4 * ["assumed"]]


# 61 over seven times a seventh of it is 1 + 2e-16.
@pytest.mark.parametrize(("size", "devices", "most"), [(256, 2, 128), (61, 7, 61 / 7)])
def test_a_device_batch_that_fits_is_not_accumulated(size: int, devices: int, most: float) -> None:
    (row,) = predict(history(), size, devices, max_device_batch_size=most).rows

    assert (row.device_batch_size, row.accumulation) == (size / devices, 1)


def test_the_fastest_batch_is_best_and_more_devices_pay_while_they_save_their_share() -> None:
    prediction = predict(history())

    for devices in (2, 4, 8, 16):
        best = prediction.best_for(devices)
        assert best.hours.value == min(r.hours.value for r in prediction.rows_for(devices))
    assert prediction.recommended == prediction.best_for(2)
    more = prediction.on_more_devices
    assert more is not None
    assert more.devices > 2
    products = [row.hours.value * row.device_hours.value for row in prediction.rows]
    assert more.hours.value * more.device_hours.value == pytest.approx(min(products))


def test_untimed_more_devices_are_filled() -> None:
    """B_crit = 192."""
    untimed = history(seconds=math.nan)

    prediction = predict(untimed)

    more = prediction.on_more_devices
    assert more is not None
    assert more.devices * 32 == more.batch_size
    assert prediction.best_for(2).batch_size in (128, 256)
    few = predict(untimed, devices=[2, 4, 8], max_device_batch_size=1000)
    assert few.on_more_devices is None


def test_a_price_does_not_move_the_recommendation() -> None:
    for columns in (history(), history(noise_scale=math.nan, high=math.inf)):
        assert (
            predict(columns, price_per_device_hour=2.0).recommended_batch_size
            == predict(columns).recommended_batch_size
        )


@pytest.mark.parametrize(
    ("of_second_half", "device_batch_size", "accumulation"),
    [
        (64.0, 32, 1),
        (60.0, 31, 1),  # a mean of 31 on each device
        (131.0, 32, 2),  # 48.75 with 32 at most
    ],
)
def test_twice_the_devices_have_whole_examples_on_each(
    of_second_half: float, device_batch_size: int, accumulation: int
) -> None:
    sizes = np.repeat([64.0, of_second_half], 25)
    run = history(batch_size=sizes, examples=np.cumsum(20 * sizes))

    row = predict(run, max_device_batch_size=32).row_on(4)

    found = (row.device_batch_size, row.accumulation, row.devices)
    assert found == (device_batch_size, accumulation, 4)


def test_rows_far_from_the_run_are_marked_and_told() -> None:
    prediction = predict(history(), batch_sizes=[4, 64, 1024], devices=[2])

    # 4 are 2 of a device's 32 examples.
    assert [row.extrapolated for row in prediction.rows] == [("batch size",), (), ("batch size",)]
    (warning,) = prediction.warnings
    assert "sizes of 4, 1,024 examples" in warning


def test_steps_that_do_not_resolve_the_noise_scale_are_told() -> None:
    changed = history(high=np.where(STEP <= 300, math.inf, 320))

    (warning,) = predict(changed, batch_sizes=[64], devices=[2]).warnings

    assert "In 30 % of" in warning


def test_prices_of_a_recommendation_that_was_not_timed_have_a_warning() -> None:
    (*_, warning) = predict(history(noise_scale=300.0), price_per_device_hour=1.0).warnings

    assert "`noisescale profile`" in warning


def increments(noise: float, signal: float, measured: Any = True) -> dict[str, Any]:
    """Of 20 steps a row: tr(Σ) and |G|² of each over its |g|², which scatter by a tenth of that."""
    weight = np.where(measured, 20 * 64.0, 0.0)
    spread = 0.01 * 64 * weight
    sums = np.where(measured, 20, 0), weight, weight**2 / 20, noise * weight, signal * weight
    squares = max(noise, 1) ** 2 * spread, 0, signal**2 * spread
    return dict(zip((*SUMS, *SQUARES), (*sums, *squares), strict=True))


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
    assert prediction.rows[0].steps.high == pytest.approx(1000 * (1 + 128 / 512) / (1 + 128 / 64))


def test_a_run_whose_late_steps_hardly_say_anything_is_answered_with_bounds() -> None:
    """Digits, SGD, a cosine learning rate, batches of 64: 47 of 723 steps measured by halves.

    The noise scale of the whole data set at every 20th step gives a critical batch size of 430.
    """
    found = predict(Path(__file__).with_name("few_late_steps"), [32, 64, 512], [1])

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
    assert any("only a lower bound" in warning for warning in found.warnings)


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


def test_a_run_without_a_measured_step_is_not_told_to_train_longer() -> None:
    unknown = dict.fromkeys(("noise_scale", "low", "high"), math.nan)
    nothing = history(**unknown) | {"measured_steps": np.zeros(50)}

    with refused("run", got="none, as no step was measured in 1,000", remedy="A warning of that"):
        predict(nothing)


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
    s, q = np.random.default_rng(0).normal(1, 0.05, (2, 50))
    weight = np.full(50, 64.0 * 20)
    sums = (np.full(50, 20.0), weight, weight**2 / 20, weight * s, weight * q / 192)
    squares = weight**2 / 20 * 0.01, 0 * weight, weight**2 / 20 * 0.01 / 192**2
    increments = dict(zip((*SUMS, *SQUARES), (*sums, *squares), strict=True))

    logged, own = predict(history()), predict(history(**increments))

    assert lags in " ".join(logged.assumptions)
    assert lags not in " ".join(own.assumptions)
    assert own.critical_batch_size.value == pytest.approx(192, rel=0.05)


def test_a_run_without_seconds_and_devices_has_steps_on_one_and_no_hours_and_says_so() -> None:
    columns = history(seconds=math.nan)
    del columns["devices"], columns["accumulation"]

    prediction = predict(columns, batch_sizes=[64])

    assert [row.devices for row in prediction.rows] == [1, 2, 4, 8]
    row = prediction.rows[0]
    assert row.steps.value == pytest.approx(1000)
    assert (row.hours.known, row.basis) == (False, None)
    for told in ("No seconds", "number of devices was not recorded"):
        assert told in " ".join(prediction.assumptions)


def test_devices_are_in_one_node_unless_a_node_has_fewer() -> None:
    assumed = "All devices are assumed to be in one node."

    prediction = predict(history(devices=16), batch_sizes=[64], devices=[16], devices_per_node=8)

    assert prediction.rows[0].seconds_per_step.value == pytest.approx(0.1)
    assert prediction.hardware.step_time is not None
    assert not prediction.hardware.step_time.is_timed(4, 1, 16, 1)
    assert assumed in predict(history()).assumptions
    assert assumed not in prediction.assumptions


@pytest.mark.parametrize(
    ("given", "arguments", "got"),
    [
        ({"price_per_device_hour": 0}, "price_per_device_hour", "0"),
        ({"batch_sizes": [math.nan]}, "batch_sizes", "nan"),
        ({"batch_sizes": itertools.count(1)}, "batch_sizes", "more"),
        ({"batch_sizes": [4], "devices": [8]}, "batch_sizes", "at most 4 for 8 devices"),
        ({"devices": [math.inf]}, "devices", "[inf]"),
        ({"devices": [1.5]}, "devices", "[1.5]"),
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
