# SPDX-License-Identifier: Apache-2.0
"""Refusals: their text, their fields, and that they pickle, as workers send them."""

import pickle

import pytest

from noisescale.lightning.trainer_access import MisconfigurationException, SettingRefusal
from noisescale.refusal import FileRefusal, FolderRefusal, Refusal, TypeRefusal, rename_arguments

KINDS = [Refusal, TypeRefusal, FileRefusal, FolderRefusal, SettingRefusal]


def refused(kind: type[Refusal]) -> Refusal:
    return kind(("low", "high"), "come with `price`", 3.5, "Give `price=1`.", word="alone")


@pytest.mark.parametrize("kind", KINDS)
def test_a_refusal_is_the_same_after_a_pickle(kind: type[Refusal]) -> None:
    again = pickle.loads(pickle.dumps(refused(kind)))

    assert type(again) is kind
    assert str(again) == "`low` and `high` must come with `price`, got 3.5. Give `price=1`."
    assert again.arguments == ("low", "high")
    assert (again.requirement, again.got) == ("come with `price`", "3.5")
    assert (again.remedy, again.word) == ("Give `price=1`.", "alone")


@pytest.mark.parametrize(
    ("kind", "base"),
    [
        (Refusal, ValueError),
        (TypeRefusal, TypeError),
        (FileRefusal, FileNotFoundError),
        (FolderRefusal, IsADirectoryError),
        (SettingRefusal, MisconfigurationException),
    ],
)
def test_a_refusal_is_the_error_that_python_and_lightning_expect(
    kind: type[Refusal], base: type[Exception]
) -> None:
    assert isinstance(refused(kind), base)
    assert isinstance(refused(kind), Refusal)


def test_arguments_are_called_as_the_reader_knows_them_in_all_fields() -> None:
    with pytest.raises(Refusal) as raised, rename_arguments({"low": "--low", "price": "--price"}):
        raise refused(Refusal)

    assert raised.value.arguments == ("--low", "high")
    assert raised.value.requirement == "come with `--price`"
    assert raised.value.remedy == "Give `--price`."
    assert raised.value.word == "alone"


def test_words_that_are_no_names_stay() -> None:
    with pytest.raises(Refusal) as raised, rename_arguments({"run": "RUN"}):
        raise Refusal("run", "be a run", "run, a word", "Name the run.")

    assert str(raised.value) == "`RUN` must be a run, got run, a word. Name the run."


def test_text_from_elsewhere_is_escaped_in_the_text_alone() -> None:
    refused = Refusal("a\x1b[31m.csv", "have \u202e", "\x1b", "Correct it.", at=("b\x1b", 3))

    assert str(refused).isprintable()
    assert refused.arguments == ("a\x1b[31m.csv",)
    assert (refused.requirement, refused.got) == ("have \u202e", "\x1b")


def test_a_line_of_a_file_is_a_field_and_stays_one() -> None:
    refused = Refusal("steps", "be a number", "'x'", "Correct it.", at=("a.csv", 3))

    again = pickle.loads(pickle.dumps(refused.with_names({"steps": "--steps"})))

    assert again.at == ("a.csv", 3)
    assert str(again) == "`--steps` must be a number, got 'x' in line 3 of a.csv. Correct it."
    of_file = Refusal("a.csv", "have 2 cells in each line", 1, "Correct it.", at=("a.csv", 3))
    assert str(of_file).endswith("got 1 in line 3. Correct it.")
