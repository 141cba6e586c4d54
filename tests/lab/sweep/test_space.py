# SPDX-License-Identifier: Apache-2.0
import math

import pytest

from noisescale.lab.sweep.space import Dimension, points

RATE = Dimension("learning_rate", 0.01, 1.0)


def test_points_fill_the_range_evenly_in_logarithms() -> None:
    found = sorted(math.log10(point["learning_rate"]) for point in points([RATE], 32, 0))

    cells = [int((place + 2) / 2 * 8) for place in found]
    assert all(3 <= cells.count(k) <= 5 for k in range(8)), cells


def test_points_are_the_same_for_a_seed_and_others_for_another() -> None:
    assert points([RATE], 5, 1) == points([RATE], 9, 1)[:5]
    assert points([RATE], 5, 1) != points([RATE], 5, 2)


def test_momentum_is_searched_by_the_steps_it_averages_over() -> None:
    momentum = Dimension("momentum", 0.9, 0.999)

    assert [momentum.at(share) for share in (0.0, 0.5, 1.0)] == [0.9, 0.99, 0.999]
    assert momentum.around(0.99, 0.5) == pytest.approx(
        Dimension("momentum", 0.9, 0.999).around(0.99, 0.5)
    )
    around = momentum.around(0.99, 0.5)
    assert (around.low, around.high) == pytest.approx((0.9, 0.999))


def test_a_range_grows_beyond_an_edge_and_shrinks_around_a_value() -> None:
    up, down = RATE.beyond(1.0, 8, upwards=True), RATE.beyond(0.01, 8, upwards=False)
    around = RATE.around(0.1, 0.25)

    assert (up.low, up.high) == (1.0, 8.0)
    assert (down.low, down.high) == (0.01 / 8, 0.01)
    assert (around.low, around.high) == pytest.approx((0.1 / 10**0.5, 0.1 * 10**0.5))


def test_two_hyperparameters_are_searched_together() -> None:
    both = points([RATE, Dimension("weight_decay", 1e-6, 1e-2)], 16, 3)

    assert {tuple(point) for point in both} == {("learning_rate", "weight_decay")}
    quarters = {(p["learning_rate"] > 0.1, p["weight_decay"] > 1e-4) for p in both}
    assert len(quarters) == 4


@pytest.mark.parametrize(
    ("name", "low", "high", "needed"),
    [
        ("learning_rate", 0.0, 1.0, "of positive numbers"),
        ("learning_rate", 1.0, 0.1, "of positive numbers"),
        ("momentum", 0.5, 1.0, "from 0 to below 1"),
        ("weight_decay", 1e-3, math.inf, "of positive numbers"),
    ],
)
def test_bad_ranges_are_refused(name: str, low: float, high: float, needed: str) -> None:
    with pytest.raises(
        ValueError, match=f"^`search` must have a range {needed}, the smaller one first, for"
    ):
        Dimension(name, low, high)
