# SPDX-License-Identifier: Apache-2.0
import math
from typing import Any

import numpy as np
import pytest
from refused import refused

from noisescale.lab.compare.measurements import Measurements, Trial


def test_evaluations_are_put_in_the_order_of_their_steps_and_of_one_step_the_last_counts() -> None:
    measured: Any = Measurements(
        [30, 10, 20, 10], [0.1, 0.9, 0.5, 0.8], seconds=[3, 1, 2, 1.5], examples=[90, 30, 60, 30]
    )

    assert measured.steps.tolist() == [10, 20, 30]
    assert measured.values.tolist() == [0.8, 0.5, 0.1]
    assert measured.seconds.tolist() == [1.5, 2, 3]
    assert measured.examples.tolist() == [30, 60, 90]
    assert measured.epochs is None
    assert len(measured) == 3
    assert len(Measurements([], [])) == 0
    # A sort that is not stable would mix more than a few of one step.
    many = Measurements(np.tile(np.arange(10), 100), np.arange(1000))
    assert many.values.tolist() == list(range(990, 1000))


@pytest.mark.parametrize(
    ("given", "argument", "requirement", "got"),
    [
        ({"values": [1.0, 2.0]}, "values", "one number for each step", "shape (2,) beside (1,)"),
        ({"steps": [math.nan]}, "steps", "finite and not negative", "nan"),
        ({"steps": [-1]}, "steps", "finite and not negative", "-1.0"),
        ({"steps": [[1]], "values": [[1]]}, "steps", "one number for each step", "shape (1, 1)"),
        (
            {"steps": [1, 2, 3], "values": [1, 1, 1], "epochs": [3, math.nan, 1]},
            *("epochs", "rise with the steps", "[3. 1.]"),
        ),
        ({"epochs": [-1]}, "epochs", "not be negative", "[-1.]"),
        ({"seconds": [math.inf]}, "seconds", "finite", "[inf]"),
    ],
)
def test_bad_numbers_are_refused(given: Any, argument: str, requirement: str, got: str) -> None:
    with refused(argument, requirement=requirement) as error:
        Measurements(**{"steps": [1], "values": [1.0]} | given)

    assert error.value.got.startswith(got)


@pytest.mark.parametrize(
    ("values", "feasible", "diverged"),
    [
        ([1, 0.5], True, False),
        ([1, math.nan], True, True),
        ([1, math.inf], True, True),
        ([math.nan, 0.5], True, False),
        ([1, 0.5], False, True),
        ([], True, False),
    ],
)
def test_a_trial_diverged_if_it_ends_without_a_number_or_its_study_says_so(
    values: list[float], feasible: bool, diverged: bool
) -> None:
    measured = Measurements(np.arange(len(values)), values)

    assert Trial("t", measured, feasible=feasible).diverged is diverged


def test_a_clock_may_begin_at_0_stand_still_and_be_unknown_in_between() -> None:
    measured = Measurements([1, 2, 3, 4], [1, 1, 1, 1], epochs=[0, 0, math.nan, 1])

    assert measured.clock("epochs") == pytest.approx([0, 0, math.nan, 1], nan_ok=True)
