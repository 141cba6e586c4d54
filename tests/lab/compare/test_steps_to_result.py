# SPDX-License-Identifier: Apache-2.0
import math
from typing import Any

import pytest

from noisescale.history.metrics import Goal
from noisescale.lab.compare.measurements import Measurements
from noisescale.lab.compare.steps_to_result import budget_mask, find_result, steps_to_result

FALLING = {"step": [100, 200, 300, 400], "loss": [0.5, 0.3, 0.2, 0.25]}


@pytest.mark.parametrize(
    ("goal", "strict", "steps"),
    [(0.3, True, 300), (0.3, False, 200), (0.2, False, 300), (0.2, True, math.inf), (9, True, 100)],
)
def test_strict_goals_are_not_reached_by_their_own_value(
    goal: float, strict: bool, steps: float
) -> None:
    assert steps_to_result(FALLING, goal, strict=strict) == steps


def test_a_metric_may_be_to_rise() -> None:
    rising = Measurements([10, 20, 30], [0.1, 0.9, 0.5])

    assert steps_to_result(rising, 0.5, "max") == 20
    assert steps_to_result(rising, 0.05, "min") == math.inf


def test_the_fewest_steps_of_all_trials_count() -> None:
    other = {"step": [50, 150], "loss": [0.9, 0.1]}

    assert steps_to_result([FALLING, other], 0.3) == 150
    assert steps_to_result([FALLING, Measurements([], [])], 0.3) == 300
    assert steps_to_result({"steps": [50, 150], "loss": [0.9, 0.1]}, 0.3) == 150


def test_unsorted_and_repeated_evaluations_are_put_in_order() -> None:
    """Of two evaluations at a step the later one counts."""
    assert steps_to_result({"step": [300, 100, 300], "loss": [0.1, 0.5, 0.4]}, 0.2) == math.inf
    assert steps_to_result({"step": [300, 100, 200], "loss": [0.1, 0.5, 0.15]}, 0.2) == 200


def test_values_that_are_not_numbers_reach_nothing() -> None:
    nothing = {"step": [1, 2, 3], "loss": [math.nan, -math.inf, math.inf]}

    assert steps_to_result(nothing | {"loss": [math.nan] * 3}, 0.2) == math.inf
    assert steps_to_result(nothing, 0.2) == math.inf
    assert steps_to_result(nothing, 0.2, "max") == math.inf


@pytest.mark.parametrize(
    ("budget", "steps"),
    [
        ({"steps": 300}, 300),
        ({"steps": 299}, math.inf),
        ({"examples": 1200}, 300),
        ({"examples": 1199}, math.inf),
        ({"epochs": 3}, 300),
        ({"seconds": 29, "steps": 1000}, math.inf),
    ],
)
def test_a_budget_is_in_steps_examples_epochs_or_seconds(
    budget: dict[str, float], steps: float
) -> None:
    clocks = {
        "examples": [400, 800, 1200, 1600],
        "epoch": [1, 2, 3, 4],
        "seconds": [10, 20, 30, 40],
    }

    assert steps_to_result(FALLING | clocks, 0.25, budget=budget) == steps


@pytest.mark.parametrize(("seconds", "within"), [(5, 0), (10, None), (29, None), (30, 3), (40, 4)])
def test_a_gap_in_a_clock_is_within_a_budget_if_the_times_around_it_say_so(
    seconds: float, within: int | None
) -> None:
    """A clock never runs back."""
    measured = Measurements([1, 2, 3, 4], [0.5, 0.4, 0.2, 0.2], seconds=[10, math.nan, 30, 40])

    if within is None:
        with pytest.raises(ValueError, match="got seconds, which are not known at step 2"):
            budget_mask(measured, {"seconds": seconds})
    else:
        assert budget_mask(measured, {"seconds": seconds}).sum() == within


def test_when_a_goal_was_reached_is_said_on_every_clock_and_whether_for_good() -> None:
    measured = Measurements([100, 200, 300], [0.5, 0.2, 0.3], seconds=[10, 20, 30])

    found = find_result(measured, Goal.read("loss<=0.25"))
    lasting = find_result(measured, Goal.read("loss<=0.3"))

    assert found is not None
    assert found[:3] == (1, 200, pytest.approx(math.nan, nan_ok=True))
    assert (found.seconds, found.value, found.for_good) == (20, 0.2, False)
    assert lasting is not None
    assert lasting.for_good


@pytest.mark.parametrize(
    ("measurements", "options", "message"),
    [
        ({"loss": [1.0]}, {}, "`measurements` must have a column `step` and one metric, got the"),
        ({"step": [1]}, {}, "must have a column `step` and one metric, got the columns step"),
        ({"step": [1], "a": [1], "b": [1]}, {}, "got the columns step, a, b"),
        ([], {}, "`measurements` must have one trial at least, got none"),
        ([[1, 2]], {}, "got a trial of type list"),
        (FALLING, {"mode": "down"}, '`mode` must be one of "min", "max", got \'down\''),
        (FALLING, {"goal": math.nan}, "`goal` must be finite, got nan"),
        (FALLING, {"goal": math.inf}, "`goal` must be finite, got inf"),
        (FALLING, {"budget": {"steps": math.nan}}, "`budget` must be positive, got nan steps"),
        (FALLING, {"budget": {"hours": 1}}, '`budget` must be one of "steps", "examples"'),
        (FALLING, {"budget": {"steps": 0}}, "`budget` must be positive, got 0 steps"),
        (FALLING, {"budget": {"seconds": 1}}, "`budget` must be in a unit that was measured"),
    ],
)
def test_bad_arguments_are_refused(
    measurements: Any, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        steps_to_result(measurements, **{"goal": 0.2} | options)
