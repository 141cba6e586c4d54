# SPDX-License-Identifier: Apache-2.0

import numpy as np
import pytest
from refused import refused

from noisescale.history.metrics import Goal


@pytest.mark.parametrize(
    ("goal", "values", "step"),
    [
        (Goal("loss", 1.5), [3.0, 2.0, 1.0], 2.5),  # between two values
        (Goal("loss", 0.5), [3.0, 2.0, 1.0], None),
        (Goal("accuracy", 1.5), [1.0, 2.0, 3.0], 1.5),
        # One low value is not enough. Isotonic means: 3, 2.5, then (0.5 + 2.5)/2 twice, then 1.
        (Goal("loss", 1.4), [3.0, 2.5, 0.5, 2.5, 1.0], 4.2),
        (Goal("loss", 3.0), [3.0, 2.0], 1),  # where the run begins
        (Goal("loss", 1.3), [3.0, 2.0, 1.5, 1.2, 1.25, 1.2, 2.5, 3.0], 3.72),  # it rises again
        (Goal("loss", 1.0), [3.0, 2.0, 1.5, 1.2, 1.25, 1.2, 2.5, 3.0], None),
        (Goal.read("loss<=0.15"), [0.2, 0.3, 0.1], 2.667),  # the side is given
    ],
)
def test_a_goal_is_reached_at_a_step(goal: Goal, values: list[float], step: float | None) -> None:
    steps = np.arange(1.0, len(values) + 1)

    found = goal.first_step(steps, np.array(values))

    assert found == (step and pytest.approx(step, abs=0.02))


@pytest.mark.parametrize("text", ["loss", "=3", "loss=", "loss=low", "loss=inf", ""])
def test_what_is_no_goal_is_refused(text: str) -> None:
    with refused("goal"):
        Goal.read(text)


@pytest.mark.parametrize(
    ("side", "reached"),
    [("<=", [1, 1, 0, 0]), ("<", [1, 0, 0, 0]), (">=", [0, 1, 1, 0]), (">", [0, 0, 1, 0])],
)
def test_a_strict_goal_is_not_reached_by_its_own_value(side: str, reached: list[int]) -> None:
    goal = Goal.read(f"loss{side}2")

    assert goal.is_reached_by(np.array([1, 2, 3, np.nan])).tolist() == reached
    assert str(goal) == f"loss {side} 2"
    assert Goal.read(str(goal)) == goal
    assert Goal.read("a=b=1") == Goal("a=b", 1.0)
