# SPDX-License-Identifier: Apache-2.0
"""The script that draws figures, `figures.js`, in a real browser."""

import json
from typing import TYPE_CHECKING, Any

import pytest
from plotly.offline import get_plotlyjs
from reported_runs import history

from noisescale.prediction.figures import noise_scale_figure
from noisescale.prediction.figures.noise_along_runs import noise_of_runs_figure
from noisescale.prediction.predict import predict
from noisescale.report.colours import DARK
from noisescale.report.drawing import SETTINGS, place_figure
from noisescale.report.page import drawing_script

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = pytest.mark.slow

Drawing = dict[str, Any]


def drawn(browser: "Browser", drawing: Drawing, width: int = 980) -> "Page":
    page = browser.new_page(viewport={"width": width, "height": 900})
    page.set_content(
        f'<div id="figure"></div><script>{get_plotlyjs()}</script><script type="module">'
        f"{drawing_script()}\nwindow.drawFigure = drawFigure;</script>"
    )
    page.wait_for_function("'drawFigure' in window")
    draw(page, drawing)
    return page


def draw(page: "Page", drawing: Drawing, revision: str = "", *, dark: bool = False) -> None:
    colours = json.dumps(dict(DARK) if dark else None)
    page.evaluate(
        f"figure => drawFigure(document.getElementById('figure'), figure, {{revision: '{revision}',"
        f" settings: {json.dumps(dict(SETTINGS))}, colours: {colours}}})",
        json.loads(json.dumps(drawing)),
    )


def of_runs(*names: str) -> Drawing:
    p = predict(history())
    runs = [(name, p, k) for k, name in enumerate(names)]
    return place_figure("runs", "Runs", noise_of_runs_figure(runs)).drawing


def of_one(noise_scale: float) -> Drawing:
    p = predict(history(noise_scale=noise_scale))
    return place_figure("noise-scale", "The noise scale", noise_scale_figure(p)).drawing


def hide(page: "Page", name: str) -> None:
    page.locator(".legend .traces", has_text=name).locator(".legendtoggle").first.click()
    page.wait_for_function("document.getElementById('figure').data.some(t => t.visible)")


def hidden(page: "Page") -> list[str]:
    seen = "document.getElementById('figure').data.filter(t => t.visible === 'legendonly')"
    return list(page.evaluate(f"{seen}.filter(t => t.showlegend !== false).map(t => t.name)"))


@pytest.mark.parametrize(("runs", "width"), [(2, 390), (30, 980), (30, 390)])
def test_the_legend_names_all_below_the_axes(browser: "Browser", runs: int, width: int) -> None:
    page = drawn(browser, of_runs(*(f"sweep/model-b/lr-{k}-seed-{k}" for k in range(runs))), width)

    figure = page.locator("#figure").bounding_box()
    axis = page.locator(".xtitle").bounding_box()
    entries = [e.bounding_box() for e in page.locator(".legend .legendtext").all()]
    assert figure is not None
    assert axis is not None
    assert len(entries) == runs
    for entry in entries:
        assert entry is not None
        assert axis["y"] + axis["height"] <= entry["y"]
        assert entry["y"] + entry["height"] <= figure["y"] + figure["height"]
    assert not page.locator(".legend .scrollbar").first.evaluate("e => e.getBBox().height")
    plot = page.locator(".nsewdrag").first.bounding_box()
    assert plot is not None
    assert plot["height"] > 300
    page.close()


def test_names_that_mean_something_to_plotly_are_shown_as_they_are(browser: "Browser") -> None:
    names = ["constructor", "%{y} and %{x}", "%{meta.finding}", "<b>bold</b>"]
    page = drawn(browser, of_runs(*names))
    draw(page, of_runs(*names), dark=True)

    listed = page.locator(".legend .legendtext").all_text_contents()
    plot = page.locator(".nsewdrag").first.bounding_box()
    assert plot is not None
    page.evaluate("Plotly.Fx.hover('figure', [{curveNumber: 5, pointNumber: 9}])")
    hovered = page.locator(".hoverlayer .hovertext .nums").text_content()

    assert listed == names
    assert hovered is not None
    assert hovered.startswith("%{y} and %{x}")
    page.close()


def test_a_hidden_line_stays_hidden_while_the_figure_is_of_the_same(browser: "Browser") -> None:
    page = drawn(browser, of_one(100.0))

    hide(page, "critical batch size")
    draw(page, of_one(120.0))
    kept = hidden(page)
    draw(page, of_one(120.0), revision="another run")

    assert len(kept) == 1
    assert kept[0].startswith("critical batch size 120")
    assert hidden(page) == []
    page.close()


def test_runs_whose_names_are_shortened_alike_are_hidden_one_by_one(browser: "Browser") -> None:
    names = [f"{20 * 'a'}{k}{30 * 'b'}" for k in range(2)]
    page = drawn(browser, of_runs(*names))

    hide(page, names[0][:10])
    draw(page, of_runs(*names))

    assert len(hidden(page)) == 1
    page.close()
