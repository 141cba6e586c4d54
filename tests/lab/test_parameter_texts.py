# SPDX-License-Identifier: Apache-2.0
from pathlib import Path

import pytest

from noisescale.lab.parameter_texts import search_parameters, sweep_parameters
from noisescale.lab.parameters import Parameter, range_parameter


def read(text: str) -> Parameter:
    (found,) = search_parameters([text])
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
    ("text", "said"),
    [
        ("width", "`search` must be written as name=values, got 'width'. Write, for example"),
        ("width=", "`search` must have values, got 'width='"),
        ("width=a..b", "`search` must have numbers as ends, got 'width=a..b'"),
        ("width=1..2:wide", "`search` must have one of the kinds log, linear, logit, momentum,"),
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

    rate, act = search_parameters([], path)

    assert (rate.name, rate.kind, rate.center, rate.scale) == ("learning_rate", "log", 0.1, 0.5)
    assert (act.choices, act.center) == (("relu", "tanh"), "tanh")
    assert rate.with_center(0.5) == rate


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
        search_parameters([], path)

    assert str(caught.value).startswith(said)


def test_no_parameter_or_the_same_one_twice_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"`search` must name a parameter to search, got none\."):
        search_parameters([], None)
    with pytest.raises(ValueError, match="must name each parameter once, got learning_rate"):
        search_parameters(["lr=0.1..1", "learning_rate=0.1..1"], None)
    with pytest.raises(ValueError, match="must name epochs or steps, got both"):
        search_parameters(["epochs=1..9", "steps=10..90"], None)
    with pytest.raises(ValueError, match=r"`space` must be a file, got .*, which is none\."):
        search_parameters([], tmp_path / "none.toml")


def test_a_sweep_searches_hyperparameters_of_optimizers_by_its_own_kinds() -> None:
    assert sweep_parameters(["lr=0.1..0.2", "momentum = 0..0.99"]) == (
        range_parameter("learning_rate", 0.1, 0.2, "log"),
        range_parameter("momentum", 0.0, 0.99, "momentum"),
    )


@pytest.mark.parametrize(
    ("texts", "said"),
    [
        (
            ["dropout=0..1"],
            "name learning_rate, momentum, weight_decay, without a kind, got dropou",
        ),
        (
            ["lr=0.01..1:linear"],
            "name learning_rate, momentum, weight_decay, without a kind, got l",
        ),
        (["lr=1..2", "learning_rate=1..2"], "name each parameter once, got learning_rate."),
        (["lr"], "be written as name=values, got 'lr'."),
        (["lr=0.1,0.2"], "have a range for learning_rate, got [0.1, 0.2]."),
        (["lr=a..b"], "have numbers as ends, got 'lr=a..b'."),
    ],
)
def test_what_a_sweep_cannot_search_is_refused(texts: list[str], said: str) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the start of its text is compared
        sweep_parameters(texts)

    assert str(caught.value).startswith(f"`search` must {said}")
