# SPDX-License-Identifier: Apache-2.0
import math

import numpy as np
import pytest

from noisescale.lab.tune.cost_front import CostFront, TunedTrial
from noisescale.lab.tune.scaling_laws import power_law


def trials(*points: tuple[float, float], **same: float) -> tuple[TunedTrial, ...]:
    return tuple(
        TunedTrial(k, same or {"width": k + 1}, cost, value)
        for k, (cost, value) in enumerate(points)
    )


def front(*points: tuple[float, float], maximize: bool = False) -> list[int]:
    found = CostFront("loss", maximize, (), trials(*points))
    return [each.first.number for each in found.front]


def test_the_front_has_the_trainings_that_no_cheaper_one_equals() -> None:
    points = ((3.0, 0.5), (1.0, 0.9), (2.0, 0.9), (4.0, 0.6), (5.0, 0.4), (1.0, 0.8))

    assert front(*points) == [5, 0, 4]
    assert front(*points, maximize=True) == [1]


def test_trainings_of_the_same_parameters_count_with_their_means() -> None:
    found = CostFront("loss", False, (), trials((1.0, 0.2), (3.0, 0.4), width=8))

    (only,) = found.front
    assert (only.cost, only.value, len(only.trials)) == (2.0, pytest.approx(0.3), 2)


def test_failures_are_not_on_the_front_and_an_empty_search_has_no_best() -> None:
    failed = TunedTrial(0, {}, 1.0, math.nan, "diverged")
    found = CostFront("loss", False, (), (failed,))

    assert (found.front, found.best, found.failures) == ((), None, (failed,))


def test_a_known_power_is_recovered_within_its_interval() -> None:
    """1,000 fronts of 12 points around cost^0.7, with 20 % scatter."""
    rng = np.random.default_rng(0)
    costs = np.geomspace(1, 300, 12)
    laws = [
        power_law(costs, 3 * costs**0.7 * np.exp(0.2 * rng.normal(size=12))) for _ in range(1000)
    ]

    held = np.mean([law is not None and law.low <= 0.7 <= law.high for law in laws])
    powers = np.array([law.power for law in laws if law is not None])
    error = abs(powers.mean() - 0.7) / (powers.std() / math.sqrt(1000))
    assert abs(held - 0.95) < 3 * math.sqrt(0.95 * 0.05 / 1000)
    assert error < 3, error


def test_the_interval_of_a_power_is_that_of_an_independent_fit() -> None:
    costs, values = [1.0, 2.0, 5.0, 10.0, 40.0], [2.0, 3.1, 4.0, 7.0, 12.0]
    design = np.stack([np.ones(5), np.log(costs)], axis=1)
    solved, squares, *_ = np.linalg.lstsq(design, np.log(values), rcond=None)
    error = math.sqrt(squares[0] / 3 * np.linalg.inv(design.T @ design)[1, 1])

    law = power_law(costs, values)

    assert law is not None
    assert law.power == pytest.approx(solved[1])
    assert law.high - law.power == pytest.approx(3.182446 * error, rel=1e-5)  # t of 3 degrees
    middle, low, high = law.value_at(5.0)
    row = np.array([1.0, math.log(5.0)])
    width = 3.182446 * math.sqrt(squares[0] / 3 * row @ np.linalg.inv(design.T @ design) @ row)
    assert middle == pytest.approx(math.exp(row @ solved))
    assert math.log(high / low) == pytest.approx(2 * width, rel=1e-5)


def test_too_few_points_or_values_without_a_logarithm_have_no_law() -> None:
    assert power_law([1, 2, 3], [1, 2, 3]) is None
    assert power_law([1, 2, 3, 4], [1, 2, 3, 0]) is None
    assert power_law([2, 2, 2, 2], [1, 2, 3, 4]) is None


def test_a_law_that_may_grow_or_fall_is_not_resolved() -> None:
    costs = [1.0, 10.0, 100.0, 1000.0]

    law, falling = power_law(costs, [1, 3, 0.5, 2]), power_law(costs, [8, 4.1, 2, 1])

    assert law is not None
    assert falling is not None
    assert (law.resolved, falling.resolved) == (False, True)
    assert falling.high < 0
