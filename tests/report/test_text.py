# SPDX-License-Identifier: Apache-2.0
"""A document in a terminal."""

import io
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from refused import refused
from reported_runs import history
from rich.console import Console

from noisescale.prediction.predict import predict
from noisescale.prediction.prediction import Prediction
from noisescale.report.document import Cell, Document, Line, Statement, Table, ToCopy
from noisescale.report.text import bullets, plain, text_of

INPUTS = Path(__file__).parents[1] / "goldens" / "inputs"
SIZES = Table("Sizes", ["batch size", "steps"], [Line([Cell("64"), Cell("10", "9–11")], ["own"])])
RUNS = Table("All runs", ["run", "steps"], [Line([Cell("a"), Cell("3")])], detail=True)
DOCUMENT = Document(
    title="T",
    headline="Batch size 64 is enough.",
    lead="At 32 it takes twice the steps.",
    answers=[Statement("First", "one", parts=[Statement("of which", "half")])],
    tables=[SIZES, RUNS],
    doubts=["It may be chance."],
    assumptions=["Noise is white."],
    written=["Report: a.html"],
    next=["Run more: noisescale sweep"],
    to_copy=[ToCopy("For a card", ["a line " * 12 + "of many words"], ["It may be copied."])],
)


def priced() -> Prediction:
    """Everything that widens a table: money, large numbers, bounds, marks."""
    columns = history(rows=400, noise_scale=900.0, batch_size=512.0, seconds=40.0)
    return predict(columns, price_per_device_hour=2.5)


def test_a_document_is_read_from_top_to_bottom() -> None:
    text = plain(text_of(DOCUMENT, details=True), 60)

    assert text.splitlines() == [
        *("Batch size 64 is enough.", "At 32 it takes twice the steps.", ""),
        *("First       one", "  of which  half", ""),
        *("Sizes", "batch", " size  steps", "────────────", "   64     10", "  own   9–11", ""),
        *("All runs", "run  steps", "──────────", "  a      3", ""),
        *("Warnings", " ! It may be chance.", ""),
        *("Assumptions", " - Noise is white.", ""),
        *("Run more: noisescale sweep", ""),
        *("Report: a.html", ""),
        *("For a card", "a line " * 12 + "of many words", " - It may be copied."),
    ]


def test_without_details_the_reader_is_shown_the_way_to_what_was_left_out() -> None:
    whole = replace(DOCUMENT, tables=[SIZES], assumptions=[])

    text = plain(text_of(DOCUMENT, more="add --details"), 60)

    assert "Sizes" in text
    assert "a      3" not in text
    assert "Noise is white" not in text
    assert "\nMore: 1 table, 1 assumption: add --details\n\nFor a card\n" in text
    assert "More:" not in plain(text_of(whole, more="add --details"), 60)


def test_the_text_is_returned_in_a_notebook_too(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = priced().to_text()

    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)

    assert priced().to_text() == expected


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize(
    "make",
    [
        priced,
        lambda: predict(history()),
        lambda: predict(history(unresolved=40)),
        lambda: predict(INPUTS / "grown", devices=[1, 2, 1024], price_per_device_hour=2.5),
    ],
    ids=["priced", "timed", "open", "grown"],
)
def test_no_number_and_no_range_is_cut(make: Callable[[], Prediction], width: int) -> None:
    p = make()

    text, wide = (p.to_text(each, details=True) for each in (width, 400))

    assert all(len(line) <= width for line in text.splitlines() if "noisescale " not in line)
    assert "…" not in text
    number = r"\d[\d,.]*[kMBT]?"
    numbers = [{*re.findall(f"{number}(?:–{number})?", each)} for each in (text, wide)]
    assert numbers[0] == numbers[1]


def test_a_terminal_gets_the_same_words() -> None:
    file = io.StringIO()
    p = predict(history())
    console = Console(file=file, width=100, force_terminal=True, color_system="standard")

    console.print(text_of(p.document(), details=True), crop=False)

    words = re.sub(r"\x1b\[[\d;]*m", "", file.getvalue())
    expected = p.to_text(100, details=True).splitlines()
    assert [line.rstrip() for line in words.splitlines()] == expected


def test_of_what_predict_says_first_only_the_verdict_is_bold() -> None:
    file = io.StringIO()
    p = predict(history(noise_scale=300.0))

    Console(file=file, width=100, force_terminal=True, color_system="standard").print(
        text_of(replace(p.document(), doubts=[]))
    )

    bold = re.findall(r"\x1b\[1m(.*?)\x1b\[0m", file.getvalue())
    assert bold == [p.decision.headline]


def test_what_does_not_print_is_escaped_everywhere() -> None:
    hostile = "\x1b[31m\u202e"
    table = Table(hostile, [hostile], [Line([Cell(hostile)], [hostile])], [hostile])
    document = Document(
        hostile, hostile, [Statement(hostile, hostile)], hostile, None, [table], doubts=[hostile],
        assumptions=[hostile], written=[hostile], next=[hostile],
        to_copy=[ToCopy(hostile, [hostile], [hostile])],
    )  # fmt: skip

    text = plain(text_of(document, details=True), 200)

    assert "\x1b" not in text
    assert "\u202e" not in text
    assert text.count(r"\x1b[31m\u202e") == 16


def test_a_width_that_holds_no_table_is_refused() -> None:
    with refused("width", requirement="be at least 40", got="20"):
        predict(history()).to_text(20)


def test_commands_and_paths_that_are_longer_than_a_line_are_not_cut_off() -> None:
    """A command stays on one line."""
    command = f"noisescale predict {'long/' * 20}"
    path = "/trials/" + "learning_rate=0.1," * 8 + "output.txt"
    file = io.StringIO()

    text = plain(text_of(replace(DOCUMENT, next=[command], written=[command])), 40)
    Console(width=40, file=file).print(*bullets("Warnings", [f"Failed: see {path}"], "! "))

    assert text.splitlines().count(command) == 2
    assert path in "".join(line.strip() for line in file.getvalue().splitlines())
