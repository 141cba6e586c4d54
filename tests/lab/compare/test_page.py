# SPDX-License-Identifier: Apache-2.0
"""The page of a comparison, as it is written and as a browser draws it."""

import math
import re
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from courses import SIZES, compared, law, seeds, sweep, trial
from pages import Outline, check_fit, opened
from tiers import slow

from noisescale.history.metrics import Goal
from noisescale.lab.compare.compare import compare
from noisescale.lab.compare.comparison import Comparison
from noisescale.lab.compare.document import document_of
from noisescale.lab.compare.measurements import Measurements, Trial
from noisescale.lab.compare.tables import tables_of

if TYPE_CHECKING:
    from playwright.sync_api import Browser

HOSTILE = ("<img src=x onerror=alert(1)>", "%{y} and %{meta}", "constructor")


@cache
def two_sweeps(workload: str = "") -> Comparison:
    """Two submissions with their learning rates searched at nine batch sizes, one missed."""
    laws = {"sgd": {**law(64), 2048: math.inf}, "adam": law(256, least=200)}
    return compared(
        each
        for name, steps in laws.items()
        for each in sweep(steps, submission=name, workload=workload, seconds=0.5)
    )


def hostile() -> Comparison:
    """Names that mean something to HTML, plotly or JavaScript, everywhere."""
    trials = [
        each
        for workload in HOSTILE[:2]
        for submission in HOSTILE
        for each in sweep(law(64, sizes=SIZES[::3]), submission=submission, workload=workload)
    ]
    return compare(trials, Goal("</script><b>loss</b>", 0.1, "<"))


def html_of(c: Comparison) -> str:
    """The page without plotly."""
    from noisescale.report.page import packed_plotly, page_html

    return page_html(document_of(c)).replace(packed_plotly(), "")


def written(c: Comparison, folder: Path) -> Path:
    from noisescale.report.page import write_page

    return write_page(document_of(c), folder / "report.html")


def test_the_page_is_whole_in_order_and_needs_nothing_else() -> None:
    page = html_of(two_sweeps())

    outline = Outline(page)
    assert outline.open == []
    assert not [t for t in outline.tags if {"src", "href", "srcset"} & t[1].keys()]
    assert "http" not in page.replace("http-equiv", "")
    figures = [a["id"] for tag, a in outline.tags if a.get("role") == "img"]
    assert figures == ["curves", "steps", "learning-rates"]
    assert "<h1>sgd reached loss &lt;= 0.1 first</h1>" in page
    assert re.findall('(?<=<h2>).*?(?=</h2>)|id="curves"', page) == [
        "Warnings",
        'id="curves"',
        "When loss &lt;= 0.1 was reached",
        "Steps to loss &lt;= 0.1 against batch size: sgd",
        "Steps to loss &lt;= 0.1 against batch size: adam",
        "All 54 runs",
        "How to read this",
    ]


def test_what_comes_from_users_is_text() -> None:
    page = html_of(hostile())

    outline = Outline(page)
    assert outline.open == []
    assert not {"img", "b"} & {tag for tag, _ in outline.tags}
    assert HOSTILE[0] not in page


@pytest.mark.parametrize(("runs", "folded"), [(40, False), (41, True)])
def test_a_long_table_of_runs_is_folded_up(runs: int, folded: bool) -> None:
    page = html_of(compared(seeds(runs * [100], submission="a")))

    assert (f"<details><summary>Show {runs} lines</summary>" in page) == folded
    assert f"<h2>All {runs} runs</h2>" in page
    assert Outline(page).open == []


@pytest.mark.parametrize("width", [390, slow(1200)])
def test_a_browser_draws_the_page_in_silence_and_keeps_labels_level_and_apart(
    browser: "Browser", tmp_path: Path, width: int
) -> None:
    page, noise = opened(browser, written(two_sweeps("a workload"), tmp_path), width, figures=3)

    assert noise == []
    check_fit(page, width, legends=3)
    every = [f"{size:,}" for size in SIZES]
    labels = [label for label in page.locator("#steps .xtick text").all() if label.text_content()]
    assert [label.text_content() for label in labels] == every[:: 2 if width == 390 else 1]
    boxes: list[Any] = [label.bounding_box() for label in labels]
    for before, after in pairwise(boxes):
        assert before["x"] + before["width"] < after["x"]
        assert after["height"] < after["width"] + 10
        assert before["y"] == pytest.approx(after["y"], abs=1)
    page.close()


@pytest.mark.slow
def test_hostile_names_are_shown_as_they_are_written(browser: "Browser", tmp_path: Path) -> None:
    page, noise = opened(browser, written(hostile(), tmp_path), 390, figures=7)

    assert noise == []
    check_fit(page, 390, legends=7)
    for place in ("steps", "learning-rates", "profile"):
        entries = page.locator(f"#{place} .legend .legendtext").all_text_contents()
        assert [name for name in HOSTILE if any(e.startswith(name) for e in entries)] == [*HOSTILE]
    assert page.locator("#curves .ytitle").all_text_contents() == ["</script><b>loss</b>"]
    page.close()


@pytest.mark.slow
def test_a_hostile_run_is_named_under_the_pointer(browser: "Browser", tmp_path: Path) -> None:
    c = compared([trial(100, name=HOSTILE[1], submission=HOSTILE[1])])
    page, _ = opened(browser, written(c, tmp_path), 1200, figures=1)

    page.evaluate("Plotly.Fx.hover('curves', [{curveNumber: 0, pointNumber: 4}])")
    hovered = page.locator(".hoverlayer .hovertext .nums").text_content()

    # The fifth of 11 evaluations, of a loss that falls from 0.9 by 0.2.
    assert hovered == f"{HOSTILE[1]}50 steps: 0.8091"
    page.close()


def test_there_is_a_page_also_of_runs_that_were_at_the_goal_at_step_0() -> None:
    at_once = Trial("0", Measurements([0, 10], [0.1, 0.1]), "sgd", batch_size=4.0)
    alone = [at_once, replace(at_once, name="1", batch_size=2.0)]

    for trials in ([at_once, *sweep(law(64), submission="sgd")], alone):
        c = compared(trials)
        assert "goal not reached" not in html_of(c)
        assert tables_of(c)[1].lines[0].cells[1].text == "0"
