# SPDX-License-Identifier: Apache-2.0
import math

import pytest

from noisescale.lab.parameter_texts import search_parameters
from noisescale.lab.parameters import Parameter, points, range_parameter

RATE = range_parameter("learning_rate", 0.01, 1.0, "log")


def read(text: str) -> Parameter:
    (found,) = search_parameters([text])
    return found


def test_points_fill_the_range_evenly_in_logarithms() -> None:
    found = sorted(math.log10(point["learning_rate"]) for point in points([RATE], 32, 0))

    cells = [int((place + 2) / 2 * 8) for place in found]
    assert all(3 <= cells.count(k) <= 5 for k in range(8)), cells


def test_points_are_the_same_for_a_seed_and_others_for_another() -> None:
    assert points([RATE], 5, 1) == points([RATE], 9, 1)[:5]
    assert points([RATE], 5, 1) != points([RATE], 5, 2)


def test_momentum_is_searched_by_the_steps_it_averages_over() -> None:
    momentum = range_parameter("momentum", 0.9, 0.999, "momentum")

    assert [momentum.at(share) for share in (0.0, 0.5, 1.0)] == [0.9, 0.99, 0.999]
    around = momentum.around(0.99, 0.5)
    assert (around.low, around.high) == pytest.approx((0.9, 0.999))
    assert range_parameter("momentum", 0.0, 0.9, "momentum").around(0.0, 0.5).low == 0.0


def test_a_range_shrinks_around_a_value() -> None:
    around = RATE.around(0.1, 0.25)

    assert (around.low, around.high) == pytest.approx((0.1 / 10**0.5, 0.1 * 10**0.5))


def test_two_hyperparameters_are_searched_together() -> None:
    both = points([RATE, range_parameter("weight_decay", 1e-6, 1e-2, "log")], 16, 3)

    assert {tuple(point) for point in both} == {("learning_rate", "weight_decay")}
    quarters = {(p["learning_rate"] > 0.1, p["weight_decay"] > 1e-4) for p in both}
    assert len(quarters) == 4


def test_points_are_those_of_the_sequence_that_journals_of_earlier_sweeps_have() -> None:
    """Optuna's sampler gave these shares of a range, with a seed of the first and a later round."""
    unit = range_parameter("x", 0.0, 1.0, "linear")
    both = [range_parameter(name, 0.0, 1.0, "linear") for name in ("x", "y", "z")]

    assert [p["x"] for p in points([unit], 4, 0)] == [0.0991218, 0.599122, 0.349122, 0.849122]
    assert [tuple(p.values()) for p in points(both, 3, 2018)] == [
        (0.67972, 0.430837, 0.0978979),
        (0.17972, 0.764171, 0.297898),
        (0.92972, 0.0975039, 0.897898),
    ]


def test_values_are_rounded_and_stay_in_their_range() -> None:
    assert read("batch_size=16..1024").nearest(100) == 128
    assert read("batch_size=16..1024").nearest(5000) == 1024
    assert read("width=16..512").nearest(99.6) == 100
    assert read("lr=0.001..1").nearest(1 / 3) == 0.333333
    assert read("lr=0.001..1").middle == pytest.approx(math.sqrt(0.001))
    assert read("keep=0.1..0.9:logit").middle == 0.5


def test_the_search_begins_at_the_own_value_or_the_nearest_or_the_middle() -> None:
    width = read("width=16..512")

    assert width.with_center(64).center == 64
    assert width.with_center(4).center == 16
    assert width.with_center(None).center == width.middle == 91
    assert read("act=relu,tanh").with_center("tanh").center == "tanh"
    assert read("act=relu,tanh").with_center("gelu").center == "relu"


@pytest.mark.parametrize(
    ("name", "low", "high", "kind", "needed"),
    [
        ("learning_rate", 0.0, 1.0, "log", "a log range of positive numbers"),
        ("learning_rate", 1.0, 0.1, "log", "a log range of positive numbers"),
        ("momentum", 0.5, 1.0, "momentum", "a momentum range within 0 to 1"),
        ("momentum", -0.1, 0.5, "momentum", "a momentum range within 0 to 1"),
        ("weight_decay", 1e-3, math.inf, "log", "a log range of positive numbers"),
    ],
)
def test_bad_ranges_are_refused(name: str, low: float, high: float, kind: str, needed: str) -> None:
    with pytest.raises(ValueError, match=f"^`search` must have {needed}, the smaller one first, f"):
        range_parameter(name, low, high, kind)
