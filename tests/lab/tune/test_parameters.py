# SPDX-License-Identifier: Apache-2.0
import math
from pathlib import Path

import pytest

from noisescale.lab.tune.parameters import Parameter
from noisescale.lab.tune.reading import (
    all_parameters,
    read_budget,
    read_parameters,
    read_space,
)


def read(text: str) -> Parameter:
    (found,) = read_parameters([text])
    return found


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


def test_values_are_rounded_and_stay_in_their_range() -> None:
    assert read("batch_size=16..1024").nearest(100) == 128
    assert read("batch_size=16..1024").nearest(5000) == 1024
    assert read("width=16..512").nearest(99.6) == 100
    assert read("lr=0.001..1").nearest(1 / 3) == 0.333333
    assert read("lr=0.001..1").middle == pytest.approx(math.sqrt(0.001))
    assert read("keep=0.1..0.9:logit").middle == 0.5


def test_the_search_begins_at_the_own_value_or_the_nearest_or_the_middle() -> None:
    width = read("width=16..512")

    assert width.beginning_at(64).center == 64
    assert width.beginning_at(4).center == 16
    assert width.beginning_at(None).center == width.middle == 91
    assert read("act=relu,tanh").beginning_at("tanh").center == "tanh"
    assert read("act=relu,tanh").beginning_at("gelu").center == "relu"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("width", "`search` must be written as name=values, got 'width'. Write, for example"),
        ("width=", "`search` must have values, got 'width='"),
        ("width=a..b", "`search` must have numbers as ends, got 'width=a..b'"),
        ("width=1..2:wide", "`search` must have one of the kinds log, linear, logit, pow2 or int"),
        ("width=5..2", "`search` must have a linear range of finite numbers, the smaller one fir"),
        ("width=-1..2:log", "`search` must have a log range of positive numbers"),
        ("keep=0.5..1.0:logit", "`search` must have a logit range within 0 to 1"),
        ("width=10..100:pow2", "`search` must have powers of two as ends of width, got 10 to 100"),
        ("batch_size=0.5..8:linear", "`search` must have whole numbers as ends of batch_size"),
        ("lr=nan..1", "`search` must have a linear range of positive numbers"),
        ("act=relu", "`search` must have two choices or more for act, got ['relu']"),
        ("lr=0.1,0.2", "`search` must have a range for learning_rate, got [0.1, 0.2]"),
    ],
)
def test_bad_values_are_refused_by_name(text: str, said: str) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the start of its text is compared
        read(text)

    assert str(caught.value).startswith(said)


def test_a_file_has_centers_and_scales(tmp_path: Path) -> None:
    path = tmp_path / "tune.toml"
    path.write_text(
        "[lr]\nlow = 0.001\nhigh = 1.0\ncenter = 0.1\nscale = 0.5\n"
        '[act]\nchoices = ["relu", "tanh"]\ncenter = "tanh"\n'
    )

    rate, act = read_space(path)

    assert (rate.name, rate.kind, rate.center, rate.scale) == ("learning_rate", "log", 0.1, 0.5)
    assert (act.choices, act.center) == (("relu", "tanh"), "tanh")
    assert rate.beginning_at(0.5) == rate


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[lr]\nlow = 0.1\nhigh = 1.0\ncenter = 2.0", "`center` must be among the values of learn"),
        ("[lr]\nlow = 0.1", "`space` must have numbers low and high, or choices, got "),
        ("[lr]\nlow = 0.1\nhigh = 1.0\nlog = true", "`space` must have only low, high, kind, choi"),
        ("[lr]\nlow = 0.1\nhigh = 1.0\nscale = 0", "`scale` must be positive and finite, got 0."),
        ("[act]\nchoices = 3", "`space` must have a list of choices, got "),
        ("lr = 3", "`space` must have a table for each parameter, got "),
        ("lr", "`space` must be a TOML file, got "),
    ],
)
def test_bad_files_are_refused(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "tune.toml"
    path.write_text(text)

    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the start of its text is compared
        read_space(path)

    assert str(caught.value).startswith(said)


def test_no_parameter_or_the_same_one_twice_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"`search` must name a parameter to search, got none\."):
        all_parameters([], None)
    with pytest.raises(ValueError, match="must name each parameter once, got learning_rate"):
        all_parameters(["lr=0.1..1", "learning_rate=0.1..1"], None)
    with pytest.raises(ValueError, match="must name epochs or steps, got both"):
        all_parameters(["epochs=1..9", "steps=10..90"], None)
    with pytest.raises(ValueError, match=r"`space` must be a file, got .*, which is none\."):
        all_parameters([], tmp_path / "none.toml")


@pytest.mark.parametrize("text", ["0h", "-1h", "1", "h", "", "nanh", "1d"])
def test_a_budget_is_positive_and_has_a_unit(text: str) -> None:
    with pytest.raises(ValueError, match="`budget` must be positive device-hours with a unit"):
        read_budget(text)


def test_a_budget_is_read_in_hours() -> None:
    assert (read_budget("0.5h"), read_budget("30m"), read_budget("90s")) == (0.5, 0.5, 0.025)
