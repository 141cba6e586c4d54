# SPDX-License-Identifier: Apache-2.0
import math
from typing import Any

import pytest
from refused import refused

from noisescale.history.metrics import Goal
from noisescale.lab.compare.measurements import Measurements
from noisescale.lab.compare.steps_to_result import budget_mask, find_result, steps_to_result

FALLING = {"step": [100, 200, 300, 400], "loss": [0.5, 0.3, 0.2, 0.25]}
CLOCKS = {"examples": [400, 800, 1200, 1600], "epoch": [1, 2, 3, 4], "seconds": [10, 20, 30, 40]}
INFINITE = {"step": [1, 2, 3], "loss": [math.nan, -math.inf, math.inf]}


@pytest.mark.parametrize(
    ("measurements", "goal", "options", "steps"),
    [
        # Strict goals exclude their own value.
        (FALLING, 0.3, {"strict": True}, 300),
        (FALLING, 0.3, {"strict": False}, 200),
        (FALLING, 0.2, {"strict": False}, 300),
        (FALLING, 0.2, {"strict": True}, math.inf),
        (FALLING, 9, {"strict": True}, 100),
        (Measurements([10, 20, 30], [0.1, 0.9, 0.5]), 0.5, {"mode": "max"}, 20),
        (Measurements([10, 20, 30], [0.1, 0.9, 0.5]), 0.05, {}, math.inf),
        # The fewest steps of all trials count.
        ([FALLING, {"step": [50, 150], "loss": [0.9, 0.1]}], 0.3, {}, 150),
        ([FALLING, Measurements([], [])], 0.3, {}, 300),
        ({"steps": [50, 150], "loss": [0.9, 0.1]}, 0.3, {}, 150),
        # Evaluations are put in order. Of two at a step the later one counts.
        ({"step": [300, 100, 300], "loss": [0.1, 0.5, 0.4]}, 0.2, {}, math.inf),
        ({"step": [300, 100, 200], "loss": [0.1, 0.5, 0.15]}, 0.2, {}, 200),
        # Values that are not numbers reach nothing.
        ({"step": [1, 2], "loss": [math.nan, math.nan]}, 0.2, {}, math.inf),
        (INFINITE, 0.2, {}, math.inf),
        (INFINITE, 0.2, {"mode": "max"}, math.inf),
        # A budget may be in any clock.
        (FALLING | CLOCKS, 0.25, {"budget": {"steps": 300}}, 300),
        (FALLING | CLOCKS, 0.25, {"budget": {"steps": 299}}, math.inf),
        (FALLING | CLOCKS, 0.25, {"budget": {"examples": 1200}}, 300),
        (FALLING | CLOCKS, 0.25, {"budget": {"examples": 1199}}, math.inf),
        (FALLING | CLOCKS, 0.25, {"budget": {"epochs": 3}}, 300),
        (FALLING | CLOCKS, 0.25, {"budget": {"seconds": 29, "steps": 1000}}, math.inf),
    ],
)
def test_the_steps_are_those_of_the_first_evaluation_that_reaches_the_goal(
    measurements: Any, goal: float, options: dict[str, Any], steps: float
) -> None:
    assert steps_to_result(measurements, goal, **options) == steps


@pytest.mark.parametrize(("seconds", "within"), [(5, 0), (10, None), (29, None), (30, 3), (40, 4)])
def test_a_gap_in_a_clock_is_bounded_by_times_around_it(seconds: float, within: int | None) -> None:
    """A clock never runs back."""
    measured = Measurements([1, 2, 3, 4], [0.5, 0.4, 0.2, 0.2], seconds=[10, math.nan, 30, 40])

    if within is None:
        with refused("budget", got="seconds, which are not known at step 2"):
            budget_mask(measured, {"seconds": seconds})
    else:
        assert budget_mask(measured, {"seconds": seconds}).sum() == within


def test_when_a_goal_was_reached_is_said_on_every_clock_and_whether_for_good() -> None:
    measured = Measurements([100, 200, 300], [0.5, 0.2, 0.3], seconds=[10, 20, 30])

    found: Any = find_result(measured, Goal.read("loss<=0.25"))
    lasting: Any = find_result(measured, Goal.read("loss<=0.3"))

    assert found[:3] == (1, 200, pytest.approx(math.nan, nan_ok=True))
    assert (found.seconds, found.value, found.for_good) == (20, 0.2, False)
    assert lasting.for_good


@pytest.mark.parametrize(
    ("measurements", "options", "argument", "got"),
    [
        ({"loss": [1.0]}, {}, "measurements", "the columns loss"),
        ({"step": [1]}, {}, "measurements", "the columns step"),
        ({"step": [1], "a": [1], "b": [1]}, {}, "measurements", "the columns step, a, b"),
        ([], {}, "measurements", "none"),
        ([[1, 2]], {}, "measurements", "a trial of type list"),
        (FALLING, {"mode": "down"}, "mode", "'down'"),
        (FALLING, {"goal": math.nan}, "goal", "nan"),
        (FALLING, {"goal": math.inf}, "goal", "inf"),
        (FALLING, {"budget": {"hours": 1}}, "budget", "'hours'"),
        (FALLING, {"budget": {"steps": 0}}, "budget", "0 steps"),
        (FALLING, {"budget": {"seconds": 1}}, "budget", "seconds"),
    ],
)
def test_bad_arguments_are_refused(
    measurements: Any, options: dict[str, Any], argument: str, got: str
) -> None:
    with refused(argument) as error:
        steps_to_result(measurements, **{"goal": 0.2} | options)

    assert got in error.value.got
