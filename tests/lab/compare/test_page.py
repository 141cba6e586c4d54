# SPDX-License-Identifier: Apache-2.0
"""The page of a comparison, as it is written and as a browser draws it."""

import math
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from courses import sweep, trial
from pages import Outline, background_of, opened

from noisescale.history.metrics import Goal
from noisescale.lab.compare.compare_trials import compare_trials
from noisescale.lab.compare.comparison import ComparisonRecord
from noisescale.lab.compare.document import document_of
from noisescale.lab.compare.measurements import Measurements, Trial
from noisescale.lab.compare.tables import tables_of
from noisescale.report.page import packed_plotly, page_html, write_page

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

GOAL = Goal.read("loss<=0.1")
HOSTILE = ("<img src=x onerror=alert(1)>", "%{y} and %{meta}", "constructor")


def law(critical: float, least: float = 100) -> dict[float, float]:
    return {8 * 2**k: round(least * (1 + critical / 8 / 2**k), -1) for k in range(9)}


def two_sweeps(workload: str = "") -> ComparisonRecord:
    """Two submissions with their learning rates searched at nine batch sizes, one missed."""
    sgd = {**law(64), 2048: math.inf}
    trials = sweep(sgd, submission="sgd", workload=workload, seconds=0.5)
    adam = law(256, least=200)
    return compare_trials(
        trials + sweep(adam, submission="adam", workload=workload, seconds=0.5), GOAL
    )


def hostile() -> ComparisonRecord:
    """Names that mean something to HTML, plotly or JavaScript, everywhere."""
    return compare_trials(
        [
            each
            for workload in HOSTILE[:2]
            for submission in HOSTILE
            for each in sweep(law(64), submission=submission, workload=workload)
        ],
        Goal("</script><b>loss</b>", 0.1, "<"),
    )


def outline_of(page: str) -> Outline:
    return Outline(page.replace(packed_plotly(), ""))


def test_the_page_is_whole_and_needs_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "report.html"

    assert write_page(document_of(two_sweeps()), path) == path
    page = path.read_text(encoding="utf-8")
    assert page == page_html(document_of(two_sweeps()))
    assert page.count(packed_plotly()) == 1
    outline = outline_of(page)
    assert outline.open == []
    assert not [t for t in outline.tags if {"src", "href", "srcset"} & t[1].keys()]
    assert "http" not in page.replace(packed_plotly(), "").replace("http-equiv", "")
    figures = [a["id"] for tag, a in outline.tags if a.get("role") == "img"]
    assert figures == ["curves", "steps", "learning-rates", "useful-batch-sizes"]


def test_answers_warnings_figures_and_tables_are_read_in_order() -> None:
    c = two_sweeps()

    page = page_html(document_of(c)).replace(packed_plotly(), "")

    parts = [
        "<h1>sgd reached loss &lt;= 0.1 first</h1>",
        "first reached by sgd, after 110 steps",
        "<h2>Warnings</h2>",
        "sgd: No run reached the goal at batch size 2,048.",
        'id="curves"',
        'id="useful-batch-sizes"',
        "<h2>When loss &lt;= 0.1 was reached</h2>",
        "<h2>All 54 runs</h2>",
        "<h2>How to read this</h2>",
        "<footer>noisescale ",
    ]
    places = [page.index(part) for part in parts]
    assert places == sorted(places)
    assert "<h2>Assumptions</h2>" not in page


@pytest.mark.parametrize(
    ("steps", "heading"),
    [
        ({"a": 100}, "a reached loss &lt;= 0.1"),
        ({"a": 100, "b": 200}, "a reached loss &lt;= 0.1 first"),
        ({"a": 100, "b": 100, "c": 200}, "a and b reached loss &lt;= 0.1 first"),
        ({"a": math.inf, "b": math.inf}, "No run reached loss &lt;= 0.1"),
    ],
)
def test_the_heading_says_who_was_first(steps: dict[str, float], heading: str) -> None:
    c = compare_trials([trial(at, submission=name) for name, at in steps.items()], GOAL)

    assert f"<h1>{heading}</h1>" in page_html(document_of(c))


def test_where_the_middle_repetition_missed_the_goal_some_runs_reached_it() -> None:
    trials = [
        trial(at, submission="a", name=str(k)) for k, at in enumerate((100, math.inf, math.inf))
    ]

    page = page_html(document_of(compare_trials(trials, GOAL)))

    assert "<h1>loss &lt;= 0.1 was reached by some runs only</h1>" in page


def test_of_several_workloads_the_heading_has_the_highest_score() -> None:
    trials = [
        trial(at, submission=name, workload=workload)
        for name, of in (("a", (100, 100)), ("b", (200, 200)))
        for workload, at in zip(("mnist", "wmt"), of, strict=True)
    ]

    page = page_html(document_of(compare_trials(trials, GOAL)))

    assert "<h1>a has the highest score on 2 workloads: 1.00</h1>" in page
    assert "A score of 1 belongs to" in page


def test_what_comes_from_users_is_text() -> None:
    page = page_html(document_of(hostile()))

    outline = outline_of(page)
    assert outline.open == []
    assert not {"img", "b"} & {tag for tag, _ in outline.tags}
    assert HOSTILE[0] not in page


@pytest.mark.parametrize(("runs", "folded"), [(40, False), (41, True)])
def test_a_long_table_of_runs_is_folded_up(runs: int, folded: bool) -> None:
    trials = [trial(100, submission="a", name=str(k)) for k in range(runs)]

    page = page_html(document_of(compare_trials(trials, GOAL))).replace(packed_plotly(), "")

    assert (f"<details><summary>Show {runs} lines</summary>" in page) == folded
    assert f"<h2>All {runs} runs</h2>" in page
    assert Outline(page).open == []


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    path = tmp_path / "missing" / "report.html"

    with pytest.raises(FileNotFoundError, match="`path` must be in a folder that exists"):
        write_page(document_of(two_sweeps()), path)


def test_a_page_is_replaced_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "report.html"
    path.write_text("before")

    def full(*arguments: object, **options: object) -> int:
        raise OSError("no space left")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(OSError, match="no space left"):
        write_page(document_of(two_sweeps()), path)

    assert path.read_text() == "before"
    assert [file.name for file in tmp_path.iterdir()] == ["report.html"]


def check_fit(page: "Page", width: int) -> None:
    """Nothing leaves the page, and each legend is inside its figure."""
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    cut = page.locator("figure svg text").evaluate_all(
        "all => all.map(e => [e.textContent, e.getBoundingClientRect()])"
        f".filter(([text, {{left, right}}]) => text && (left < 0 || right > {width}))"
    )
    assert cut == []
    for figure in page.locator("figure [role=img]").all():
        around, legend = figure.bounding_box(), figure.locator(".legend .bg").bounding_box()
        assert around is not None
        assert legend is not None
        assert legend["y"] + legend["height"] <= around["y"] + around["height"] + 1


@pytest.mark.parametrize("width", [1200, 390])
def test_a_browser_draws_the_page_in_silence_and_cuts_nothing(
    browser: "Browser", tmp_path: Path, width: int
) -> None:
    path = write_page(document_of(two_sweeps("a workload")), tmp_path / "report.html")

    page, noise = opened(browser, path, width, figures=4)

    assert noise == []
    check_fit(page, width)
    page.close()


def test_hostile_names_are_shown_as_they_are_written(browser: "Browser", tmp_path: Path) -> None:
    path = write_page(document_of(hostile()), tmp_path / "report.html")

    page, noise = opened(browser, path, 390, figures=8)

    assert noise == []
    check_fit(page, 390)
    for place in ("steps", "learning-rates", "profile"):
        entries = page.locator(f"#{place} .legend .legendtext").all_text_contents()
        assert [name for name in HOSTILE if any(e.startswith(name) for e in entries)] == [*HOSTILE]
    titles = page.locator("#curves .ytitle").all_text_contents()
    assert titles == ["</script><b>loss</b>"]
    page.close()


def test_a_hostile_run_is_named_under_the_pointer(browser: "Browser", tmp_path: Path) -> None:
    c = compare_trials([trial(100, name=HOSTILE[1], submission=HOSTILE[1])], GOAL)
    page, _ = opened(browser, write_page(document_of(c), tmp_path / "report.html"), 1200, figures=1)

    page.evaluate("Plotly.Fx.hover('curves', [{curveNumber: 0, pointNumber: 4}])")
    hovered = page.locator(".hoverlayer .hovertext .nums").text_content()

    # The fifth of 11 evaluations, of a loss that falls from 0.9 by 0.2.
    assert hovered == f"{HOSTILE[1]}50 steps: 0.8091"
    page.close()


def test_labels_of_batch_sizes_stay_level_and_apart_on_a_phone(
    browser: "Browser", tmp_path: Path
) -> None:
    path = write_page(document_of(two_sweeps()), tmp_path / "report.html")
    wide, _ = opened(browser, path, 1200, figures=4)
    phone, _ = opened(browser, path, 390, figures=4)

    every = wide.locator("#steps .xtick text").all_text_contents()
    labels = [label for label in phone.locator("#steps .xtick text").all() if label.text_content()]
    boxes = [label.bounding_box() for label in labels]

    assert every == ["8", "16", "32", "64", "128", "256", "512", "1,024", "2,048"]
    assert [label.text_content() for label in labels] == every[::2]
    for before, after in pairwise(boxes):
        assert before is not None
        assert after is not None
        assert before["x"] + before["width"] < after["x"]
        assert after["height"] < after["width"] + 10
        assert before["y"] == pytest.approx(after["y"], abs=1)
    wide.close()
    phone.close()


def test_the_page_is_dark_where_the_reader_wants_it_except_on_paper(
    browser: "Browser", tmp_path: Path
) -> None:
    path = write_page(document_of(two_sweeps()), tmp_path / "report.html")
    page, noise = opened(browser, path, 1200, figures=4)
    figure = "#steps .main-svg"
    light = background_of(page, "body"), background_of(page, figure)

    page.emulate_media(color_scheme="dark")
    page.locator("#steps .legendtext[style*='rgb(232, 234, 237)']").first.wait_for()
    dark = background_of(page, "body"), background_of(page, figure)
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    printed = background_of(page, figure)
    size = page.locator(figure).first.bounding_box()

    assert light == ("rgb(255, 255, 255)", "rgb(255, 255, 255)")
    assert dark == ("rgb(32, 33, 36)", "rgb(32, 33, 36)")
    assert printed == "rgb(255, 255, 255)"
    assert size is not None
    assert size["width"] == 660
    assert noise == []
    page.close()


def test_there_is_a_page_also_of_runs_that_were_at_the_goal_at_step_0() -> None:
    at_once = Trial("0", Measurements([0, 10], [0.1, 0.1]), "sgd", batch_size=4.0)
    alone = [at_once, replace(at_once, name="1", batch_size=2.0)]

    for trials in ([at_once, *sweep(law(64), submission="sgd")], alone):
        c = compare_trials(trials, GOAL)
        assert page_html(document_of(c)).count("goal not reached") == 0
        assert [line.cells[1].text for line in tables_of(c)[1].lines][:1] == ["0"]
