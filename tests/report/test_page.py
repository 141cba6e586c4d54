# SPDX-License-Identifier: Apache-2.0
import math
import re
from dataclasses import replace
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from pages import Outline, background_of, check_fit, opened
from refused import refused
from reported_runs import history

from noisescale.bounded import Bounded
from noisescale.prediction.calibration import Calibration
from noisescale.prediction.predict import predict
from noisescale.prediction.prediction import Prediction

if TYPE_CHECKING:
    from playwright.sync_api import Browser

HOSTILE = '</script><img src="https://example.com/x" onerror="alert(1)">&amp;"\''


def page_of(p: Prediction, folder: Path) -> str:
    """The page without plotly, which is in it once."""
    from noisescale.report.page import packed_plotly

    page = p.to_html(folder / "report.html").read_text(encoding="utf-8")
    assert page.count(packed_plotly()) == 1
    return page.replace(packed_plotly(), "")


def test_the_page_is_whole_and_needs_nothing_else(tmp_path: Path) -> None:
    page = page_of(predict(history()), tmp_path)

    assert (tmp_path / "report.html").stat().st_size < 2.2e6
    outline = Outline(page)
    assert outline.open == []
    assert not [t for t in outline.tags if {"src", "href", "srcset"} & t[1].keys()]
    assert "http" not in page.replace("http-equiv", "")
    assert ("html", {"lang": "en"}) in outline.tags
    figures = [a for tag, a in outline.tags if a.get("role") == "img"]
    assert [a["id"] for a in figures] == ["savings", "noise-scale", "front", "speed-up"]
    assert all(len(a["aria-label"] or "") > 40 for a in figures)


def test_what_comes_from_users_is_text(tmp_path: Path) -> None:
    hostile = Calibration(Bounded(1.0, 1.0, 1.0), HOSTILE)

    page = page_of(predict(history(), calibration=hostile, unit=HOSTILE), tmp_path)

    outline = Outline(page)
    assert outline.open == []
    assert "img" not in [tag for tag, _ in outline.tags]
    assert HOSTILE not in page


def test_tables_of_the_page_have_the_rows_and_their_marks(tmp_path: Path) -> None:
    page = page_of(predict(history(), [64, 128], [2, 4]), tmp_path)

    mark = '<span class="mark">this run</span>'
    assert page.count(f'<th scope="row">64{mark}</th><td>2,000</td>') == 2  # and in the summary
    assert len(re.findall("<table>", page)) == 3  # the summary, batch sizes, devices
    assert len(re.findall('<th scope="row">', page)) == 3 + 4


def test_the_lead_stands_below_the_only_h1() -> None:
    from noisescale.report.page import page_html

    document = replace(predict(history()).document(), lead="At <64> half the steps.")

    page = page_html(document)

    assert page.count("<h1>") == 1
    heading = f"<h1>{escape(document.headline)}</h1>"
    assert f'{heading}\n<p class="lead">At &lt;64&gt; half the steps.</p>' in page


def test_the_answer_is_read_first_and_its_limits_are_folded_up(tmp_path: Path) -> None:
    p = predict(history(unresolved=40))

    page = page_of(p, tmp_path)

    decides = ["<h1>Not too large: 64 is no waste.</h1>", 'id="savings"', "<table>", p.warnings[0]]
    explains = ['id="noise-scale"', "<dl>", "<dt>Noise scale now", '<p class="next">']
    folded = ['<details class="more">', 'id="front"', 'id="speed-up"', "<h2>On the run"]
    limits = ["Assumptions", p.assumptions[0], "How to read this", "</details>"]
    parts = [*decides, *explains, *folded, *limits, "<footer>noisescale "]
    places = [page.index(part) for part in parts]
    assert places == sorted(places)


def test_a_missing_folder_or_a_folder_in_place_of_a_file_is_named(tmp_path: Path) -> None:
    missing = tmp_path / "missing" / "report.html"

    with refused("path", error=FileNotFoundError, got=repr(str(missing))):
        predict(history()).to_html(missing)
    with refused("path", error=IsADirectoryError, got=f"the folder {str(tmp_path)!r}"):
        predict(history()).to_html(tmp_path)


def test_a_page_is_replaced_whole_or_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "report.html"
    path.write_text("before")
    p = predict(history())

    def full(*arguments: object, **options: object) -> int:
        raise OSError("no space left")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "write_text", full)
        with pytest.raises(OSError, match="no space left"):
            p.to_html(path)
    assert path.read_text() == "before"
    assert p.to_html(path) == path

    assert [file.name for file in tmp_path.iterdir()] == ["report.html"]
    assert path.read_text(encoding="utf-8").startswith("<!doctype html>")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("unresolved", "seconds", "width", "other"),
    [
        (0, 0.5, 1200, 390),
        (40, 0.5, 700, 1200),
        (0, math.nan, 390, 1200),
        (40, math.nan, 1200, 700),
    ],
)
def test_a_browser_draws_the_page_in_silence_and_in_its_width(
    browser: "Browser", tmp_path: Path, unresolved: int, seconds: float, width: int, other: int
) -> None:
    """Also where the width changes, and on a phone."""
    p = predict(history(unresolved=unresolved, seconds=seconds))

    page, noise = opened(browser, p.to_html(tmp_path / "report.html"), width)

    assert noise == []
    assert page.locator("figure .xtitle").count() == 4
    # Plotly would offer to send the figure to a server.
    buttons = page.locator(".modebar-btn").evaluate_all("all => all.map(b => b.dataset.title)")
    assert "Reset axes" in buttons
    assert not [title for title in buttons if re.search("share|cloud|edit", title, re.I)]
    check_fit(page, width, legends=4)
    hidden = "e => e.scrollWidth - e.clientWidth"
    assert page.locator(".scroll").first.evaluate(hidden) == 0
    before = page.locator("#speed-up .main-svg").first.get_attribute("width")
    page.set_viewport_size({"width": other, "height": 900})
    page.locator(f"#speed-up .main-svg:not([width='{before}'])").first.wait_for()
    check_fit(page, other, legends=4)
    page.close()


@pytest.mark.slow
def test_a_phone_shows_the_whole_time_column(browser: "Browser", tmp_path: Path) -> None:
    p = predict(history(batch_size=8, noise_scale=150, rows=72, seconds=0.0066, devices=1))

    page, _ = opened(browser, p.to_html(tmp_path / "report.html"), 390)

    table = page.locator(".scroll").first
    assert "0.52 to 0.53\xa0x" in table.inner_text()
    assert "23.8 seconds, timed" in table.inner_text()
    assert table.evaluate("e => e.scrollWidth - e.clientWidth") == 0
    page.close()


@pytest.mark.slow
def test_a_hostile_unit_is_shown_as_it_is_written(browser: "Browser", tmp_path: Path) -> None:
    unit = "<b>&tokens</b>"
    path = predict(history(seconds=math.nan), unit=unit).to_html(tmp_path / "report.html")

    page, noise = opened(browser, path, 1200)

    assert noise == []
    assert page.locator("#front .xtitle").text_content() == f"compute: {unit} processed"
    assert unit in " ".join(page.locator("dd").all_inner_texts())
    page.close()


@pytest.mark.slow
def test_a_zoom_stays_as_the_window_changes(browser: "Browser", tmp_path: Path) -> None:
    page, _ = opened(browser, predict(history()).to_html(tmp_path / "report.html"), 1000)
    page.evaluate("Plotly.relayout('front', {'yaxis.range': [10, 100]})")

    for width, height in ((1000, 700), (800, 700)):
        page.set_viewport_size({"width": width, "height": height})
        # Not `wait_for_function`: the page forbids the `eval` that it polls with.
        page.locator(f"#front .main-svg[width='{width - 40}']").first.wait_for()
        page.wait_for_timeout(300)

    assert page.evaluate("document.getElementById('front').layout.yaxis.range") == [10, 100]
    page.close()


@pytest.mark.slow
def test_the_page_is_dark_if_wanted_except_on_paper(browser: "Browser", tmp_path: Path) -> None:
    page, noise = opened(browser, predict(history()).to_html(tmp_path / "report.html"), 1200)
    figure = page.locator("#front .main-svg").first
    both = ("body", "#front .main-svg")
    light = {background_of(page, each) for each in both}

    page.emulate_media(color_scheme="dark")
    page.locator("#front .legendtext[style*='rgb(232, 234, 237)']").first.wait_for()
    dark = {background_of(page, each) for each in both}
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    printed, size = background_of(page, both[1]), figure.bounding_box()
    page.evaluate("dispatchEvent(new Event('afterprint'))")
    page.locator("#front .main-svg[width='980']").first.wait_for()

    assert light == {"rgb(255, 255, 255)"}
    assert dark == {"rgb(32, 33, 36)"}
    assert printed == "rgb(255, 255, 255)"
    assert size is not None
    assert size["width"] == 660
    assert noise == []
    page.close()
