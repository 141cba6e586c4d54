# SPDX-License-Identifier: Apache-2.0
"""Step times of a run and of a profile of the same device, taken together."""

import pytest

from noisescale.prediction.run_hardware import TimedPlan
from noisescale.prediction.step_seconds import step_time_of
from noisescale.step_time import StepTiming


def timing(size: float, accumulation: int = 1, devices: int = 1, sync: float = 0.0) -> StepTiming:
    """10 ms and 1 ms an example for each micro-batch; devices wait for each other at the end."""
    seconds = accumulation * (0.01 + 0.001 * size) + sync
    return StepTiming(size, accumulation, devices, 1, seconds)


PROFILED = (*map(timing, (8, 16, 32, 64, 128)), timing(16, 2))


def test_a_run_says_how_long_its_steps_take_and_a_profile_how_others_compare() -> None:
    own = timing(16)  # 26 ms; the run took half as long again

    model = step_time_of((TimedPlan(own, steps=100, mean=1.5 * own.seconds),), PROFILED)

    assert model is not None
    assert model.seconds(16).value == pytest.approx(1.5 * 0.026)
    assert model.seconds(64).value == pytest.approx(1.5 * 0.074, rel=0.01)


def test_several_plans_of_a_run_take_its_time_together() -> None:
    plans = (TimedPlan(timing(16), 100, 0.05), TimedPlan(timing(64), 300, 0.1))

    model = step_time_of(plans, PROFILED)

    assert model is not None
    took = 100 * model.seconds(16).value + 300 * model.seconds(64).value
    assert took == pytest.approx(100 * 0.05 + 300 * 0.1)


def test_a_run_on_more_devices_than_the_profile_shows_what_they_wait_for() -> None:
    own = timing(16, devices=2, sync=0.03)

    model = step_time_of((TimedPlan(own, 100, own.seconds),), PROFILED)

    assert model is not None
    assert model.seconds(16, 1, 2).value == pytest.approx(0.056)
    assert model.seconds(64, 1, 2).value == pytest.approx(0.104, rel=0.02)
    assert model.seconds(64, 1, 1).value == pytest.approx(0.074, rel=0.02)
    assert model.is_timed(64, 1, 2)
    assert not model.is_timed(64, 1, 4)


def test_a_plan_of_the_run_that_the_profile_leaves_out_was_timed() -> None:
    model = step_time_of((TimedPlan(timing(256), 100, 0.3),), PROFILED)

    assert model is not None
    assert model.is_timed(256)
    assert not model.is_timed(512)


def test_nothing_is_known_of_a_run_that_was_not_timed() -> None:
    assert step_time_of(()) is None
    assert step_time_of((), PROFILED) is not None
