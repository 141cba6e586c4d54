# SPDX-License-Identifier: Apache-2.0
import math
from pathlib import Path

import pytest
from refused import refused

from noisescale.lab.parameter_texts import search_parameters, sweep_parameters
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
    ("text", "kind", "whole"),
    [
        ("learning_rate=0.001..1", "log", False),
        ("lr=1..10", "log", False),
        ("batch_size=16..1024", "pow2", True),
        ("batch_size=10..1000", "log", True),
        ("batch_size=16..1024:linear", "linear", True),
        ("width=16..512", "log", True),
        ("width=100..512", "linear", True),
        ("width=16..512:pow2", "pow2", True),
        ("depth=1..9.0:int", "linear", True),
        ("dropout=0..0.5:linear", "linear", False),
        ("dropout=0..0.5", "linear", False),
        ("keep=0.5..0.99:logit", "logit", False),
        ("momentum=0.5..0.99", "logit", False),
        ("momentum=0..0.99:momentum", "momentum", False),
    ],
)
def test_a_range_has_the_space_that_suits_it(text: str, kind: str, whole: bool) -> None:
    found = read(text)

    assert (found.kind, found.whole) == (kind, whole)
    assert found.has(found.middle)
    assert Parameter.from_dict(found.as_dict()) == found


def test_choices_are_numbers_words_and_truth_values() -> None:
    assert read("act=relu,tanh").choices == ("relu", "tanh")
    assert read("layers=2,4").choices == (2, 4)
    assert read("bias=true,false").choices == (True, False)
    assert read("act=relu,tanh").middle == "relu"


@pytest.mark.parametrize(
    ("text", "requirement"),
    [
        ("width", "name=values"),
        ("width=", "values"),
        ("width=a..b", "numbers as ends"),
        ("width=1..2:wide", "one of the kinds"),
        ("width=5..2", "a linear range"),
        ("width=-1..2:log", "a log range of positive"),
        ("keep=0.5..1.0:logit", "within 0 to 1"),
        ("width=10..100:pow2", "powers of two"),
        ("batch_size=0.5..8:linear", "whole numbers"),
        ("lr=nan..1", "positive"),
        ("act=relu", "two choices"),
        ("lr=0.1,0.2", "a range for learning_rate"),
        ("lr=0.1..1 learning_rate=0.1..1", "name each parameter once"),
        ("epochs=1..9 steps=10..90", "epochs or steps"),
        ("", "a parameter to search"),
    ],
)
def test_bad_values_are_refused_by_name(text: str, requirement: str) -> None:
    with refused("search", requirement=requirement):
        search_parameters(text.split())


def test_a_file_has_centers_and_scales(tmp_path: Path) -> None:
    path = tmp_path / "tune.toml"
    path.write_text(
        "[lr]\nlow = 0.001\nhigh = 1.0\ncenter = 0.1\nscale = 0.5\n"
        '[act]\nchoices = ["relu", "tanh"]\ncenter = "tanh"\n'
    )

    rate, act = search_parameters([], path)

    assert (rate.name, rate.kind, rate.center, rate.scale) == ("learning_rate", "log", 0.1, 0.5)
    assert (act.choices, act.center) == (("relu", "tanh"), "tanh")
    assert rate.with_center(0.5) == rate
    with refused("space", requirement="a file"):
        search_parameters([], tmp_path / "none.toml")


@pytest.mark.parametrize(
    ("text", "argument", "requirement"),
    [
        ("[lr]\nlow = 0.1\nhigh = 1.0\ncenter = 2.0", "center", "among the values"),
        ("[lr]\nlow = 0.1", "space", "numbers low and high, or choices"),
        ("[lr]\nlow = 0.1\nhigh = 1.0\nlog = true", "space", "only low, high"),
        ("[lr]\nlow = 0.1\nhigh = 1.0\nscale = 0", "scale", "positive"),
        ("[act]\nchoices = 3", "space", "a list"),
        ("lr = 3", "space", "a table"),
        ("lr", "space", "TOML"),
    ],
)
def test_bad_files_are_refused(tmp_path: Path, text: str, argument: str, requirement: str) -> None:
    path = tmp_path / "tune.toml"
    path.write_text(text)

    with refused(argument, requirement=requirement):
        search_parameters([], path)


def test_a_sweep_searches_hyperparameters_of_optimizers_by_its_own_kinds() -> None:
    assert sweep_parameters(["lr=0.1..0.2", "momentum = 0..0.99"]) == (
        range_parameter("learning_rate", 0.1, 0.2, "log"),
        range_parameter("momentum", 0.0, 0.99, "momentum"),
    )


@pytest.mark.parametrize(
    ("text", "requirement"),
    [
        ("dropout=0..1", "without a kind"),
        ("lr=0.01..1:linear", "without a kind"),
        ("lr=1..2 learning_rate=1..2", "each parameter once"),
        ("lr=0..1", "a log range of positive"),
        ("lr=1..0.1", "the smaller one first"),
        ("momentum=0.5..1", "within 0 to 1"),
        ("momentum=-0.1..0.5", "within 0 to 1"),
        ("weight_decay=1e-3..inf", "a log range"),
    ],
)
def test_what_a_sweep_cannot_search_is_refused(text: str, requirement: str) -> None:
    with refused("search", requirement=requirement):
        sweep_parameters(text.split())
