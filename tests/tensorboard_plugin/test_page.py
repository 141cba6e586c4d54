# SPDX-License-Identifier: Apache-2.0
"""The page in TensorBoard, in a real browser: one session with one server for all tests."""

import multiprocessing
import os
import socket
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest
from pages import texts_cut

if TYPE_CHECKING:
    from playwright.sync_api import Browser, ConsoleMessage, Frame, FrameLocator, Page, Route

PREFIX = "/behind/a/proxy"
ONE = "p.noise_scale.runs=run%3Done"
"""In an address: only the run "one" is chosen."""
LONG = 60_000
"""Milliseconds in which a page of TensorBoard is there."""


def serve(*options: str) -> None:
    """Be TensorBoard."""
    for output in (1, 2):
        os.dup2(os.open(os.devnull, os.O_WRONLY), output)
    from tensorboard import assets, default, program

    plugins = default.get_plugins()
    tensorboard = program.TensorBoard(plugins, assets.get_default_assets_zip_provider())
    tensorboard.configure(("tensorboard", *options))
    tensorboard.main()


def is_said(address: str, said: bytes) -> bool:
    try:
        return said in urllib.request.urlopen(address).read()
    except OSError:
        return False


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """That of a TensorBoard, once it has the runs.

    It runs in a fork, which has imported nearly all of it; before Playwright's event loop does.
    """
    from logged_runs import log_run

    logs = tmp_path_factory.mktemp("logs")
    log_run(logs / "one")
    log_run(logs / "unresolved", resolved=False)
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    address, deadline = f"http://localhost:{port}{PREFIX}/", time.monotonic() + 60
    words = ("--logdir", str(logs), "--port", str(port), "--load_fast", "false")
    words += ("--host", "localhost", "--path_prefix", PREFIX)
    server = multiprocessing.get_context("fork").Process(target=serve, args=words)
    server.start()
    try:
        while not is_said(f"{address}data/plugin/noise_scale/runs", b"unresolved"):
            assert time.monotonic() < deadline, "no runs"
            assert server.is_alive()
            time.sleep(0.1)
        yield address
    finally:
        server.terminate()
        server.join()


@pytest.fixture(scope="module")
def tensorboard(address: str, browser: "Browser") -> "Iterator[tuple[Page, list[str]]]":
    """TensorBoard, which takes longer to load than the tab, and what it complains of."""
    page = browser.new_page()
    said: list[str] = []

    def hear(message: "ConsoleMessage") -> None:
        """Not TensorBoard's own fonts, which it does not find behind a path prefix."""
        if message.type == "error" and "/font-roboto/" not in message.location["url"]:
            said.append(f"{message.text} {message.location['url']}")

    page.on("console", hear)
    page.on("pageerror", lambda error: said.append(str(error)))
    page.goto(f"{address}#noise_scale")
    drawn(page)
    yield page, said
    page.close()


@pytest.fixture
def show(tensorboard: "tuple[Page, list[str]]", address: str) -> "Iterator[Callable[..., Page]]":
    """Show the tab in TensorBoard at a state in the address, and load the tab alone anew.

    All runs are chosen unless the state says otherwise. Some requests may have routes.
    """
    page, said = tensorboard
    inside = f"{address}data/plugin_entry.html?name=noise_scale"

    def shown(state: str = "", width: int = 1200, **routes: "Callable[[Route], Any]") -> "Page":
        page.set_viewport_size({"width": width, "height": 1600})
        page.evaluate("location.hash = 'noise_scale'")  # another test may have shown another tab
        frame = page.locator("iframe").element_handle().content_frame()
        assert frame is not None
        frame.goto("about:blank")  # what it has not yet written into the address is not written
        for name, route in routes.items():
            page.route(f"**/noise_scale/{name}", route)
        page.evaluate("hash => { location.hash = hash; }", f"noise_scale{state}")
        frame.goto(inside, wait_until="commit")
        return page

    yield shown
    page.unroute_all(behavior="ignoreErrors")
    provoked = ("status of 400", "ERR_FAILED", "?run=other0&", "?run=new&")
    unexpected = [text for text in said if not any(part in text for part in provoked)]
    said.clear()
    assert unexpected == []


@pytest.fixture
def page(show: "Callable[..., Page]") -> "Page":
    return show(f"&{ONE}")


def drawn(page: "Page") -> "FrameLocator":
    frame = page.frame_locator("iframe")
    frame.locator("#speed-up .main-svg").first.wait_for(timeout=LONG)
    return frame


def inside(page: "Page") -> "Frame":
    return next(frame for frame in page.frames if frame != page.main_frame)


def look_again(page: "Page") -> None:
    """What the page does every ten seconds, and two answers of the server after it."""
    inside(page).evaluate("document.dispatchEvent(new Event('visibilitychange'))")
    for _ in range(2):
        inside(page).evaluate("fetch('./runs').then(reply => reply.text()).catch(() => {})")


def fill(frame: "FrameLocator", name: str, value: str) -> None:
    frame.locator(f"input[name={name}]").fill(value)


def read_in(frame: "FrameLocator", element: str, text: str = "") -> str:
    """The text of the first such element, once it has a part of it."""
    found = frame.locator(element, has_text=text or None).first
    found.wait_for(timeout=LONG)
    return found.text_content() or ""


def answers(frame: "FrameLocator") -> list[str]:
    return frame.locator("dd").all_inner_texts()


def drag(page: "Page", *ends: int, release: bool = True) -> None:
    """Zoom into the first figure up to these places across it."""
    area = page.frame_locator("iframe").locator("#front .nsewdrag").first
    area.scroll_into_view_if_needed()
    plot = area.bounding_box()
    assert plot is not None
    page.mouse.move(plot["x"] + 100, plot["y"] + 50)
    page.mouse.down()
    for end in ends:
        page.mouse.move(plot["x"] + end, plot["y"] + end - 50, steps=4)
    if release:
        page.mouse.up()


def test_a_run_is_drawn_and_what_the_form_holds_changes_its_answers(page: "Page") -> None:
    frame = drawn(page)

    assert page.locator("text=Noise scale").first.is_visible()
    assert frame.locator(".runs label").all_inner_texts() == ["one", "unresolved"]
    assert frame.locator("label", has_text="1 of 2 shown").is_visible()
    assert not frame.locator("select[name=detail]").is_visible()
    assert answers(frame)[3].startswith("192 examples")
    for figure in ("front", "noise-scale", "speed-up"):
        assert frame.locator(f"#{figure} .scatterlayer .trace").count() >= 3
    assert frame.locator("tr.marked").first.inner_text().startswith("64")

    fill(frame, "devices", "2, 6")
    read_in(frame, "tbody th", "6")
    assert any("4 devices" in said or "6 devices" in said for said in answers(frame))
    fill(frame, "price", "1")
    read_in(frame, "th", "cost")
    priced = answers(frame)[:2]

    fill(frame, "price", "-1")
    assert read_in(frame, "#status.error").startswith("`price` must")
    assert answers(frame)[:2] == priced
    assert frame.locator("#results.old").count() == 1

    page.evaluate("location.hash = 'noise_scale&p.noise_scale.kappa=2'")  # as if pasted
    read_in(frame, "dd", "384 examples")
    assert frame.locator("input[name=kappa]").input_value() == "2"
    assert frame.locator("input[name=price]").input_value() == ""
    assert frame.locator("label", has_text="2 of 2 shown").is_visible()

    page.set_viewport_size({"width": 800, "height": 1200})
    assert frame.locator("html").evaluate("page => page.scrollWidth - page.clientWidth") <= 0


def test_several_runs_are_overlaid_and_chosen_and_filtered(show: "Callable[..., Page]") -> None:
    page = show()
    frame = drawn(page)

    assert frame.locator("#noise-scales .legendtext").all_text_contents() == ["one", "unresolved"]
    beside = frame.locator("table").first.locator("tbody tr").all_inner_texts()
    assert [row.split()[:2] for row in beside] == [["one", "1,000"], ["unresolved", "1,000"]]

    frame.locator("select[name=across]").select_option("examples")
    read_in(frame, "#noise-scales .infolayer", "examples processed")
    frame.get_by_role("button", name="unresolved").click()
    read_in(frame, "h1", "unresolved")
    read_in(frame, "dd", "at least 154 examples")
    assert frame.locator("select[name=detail]").input_value() == "run=unresolved"

    inner = inside(page)
    inner.evaluate("window.before = document.getElementById('noise-scales')")
    frame.locator(".runs input").nth(0).uncheck()
    frame.locator("h1").wait_for(state="detached")
    erased = inner.evaluate("[before.isConnected, before.data === undefined]")
    assert erased == [False, True]  # a figure that is not shown listens to nothing

    frame.locator(".runs input").nth(0).check()
    read_in(frame, "h1")
    fill(frame, "filter", "on.$|nothing")  # the answered run is filtered out
    read_in(frame, "dd", "192 examples")
    assert frame.locator(".runs label").all_inner_texts() == ["one"]
    fill(frame, "filter", "(")
    assert frame.locator("input[name=filter]:invalid").count() == 1
    fill(frame, "filter", "")
    read_in(frame, "h1", "unresolved")
    frame.locator("input[name=all]").uncheck()
    read_in(frame, "#status", "No run is chosen.")
    assert frame.locator("#results").inner_text() == ""


@pytest.mark.slow
def test_the_address_keeps_the_state_through_a_reload_and_other_tabs(page: "Page") -> None:
    frame = drawn(page)
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url.partition(PREFIX)[2]))

    frame.locator(".runs input").nth(1).check()
    frame.locator("select[name=detail]").select_option("run=unresolved")
    fill(frame, "price", "2")
    read_in(frame, "th", "cost")
    page.locator("[role=tab]", has_text="Scalars").first.click()
    inside(page).wait_for_function("innerHeight === 0")
    asked.clear()
    inside(page).evaluate("document.dispatchEvent(new Event('visibilitychange'))")
    inside(page).evaluate("fetch('./style.css').then(reply => reply.text())")
    while_hidden = [url for url in asked if "/noise_scale/" in url and "style.css" not in url]
    with page.expect_request("**/noise_scale/prediction?*"):
        page.locator("[role=tab]", has_text="Noise scale").first.click()
    page.reload()
    frame = drawn(page)

    assert while_hidden == []
    assert "/data/plugin/noise_scale/runs" in asked
    assert frame.locator("h1").inner_text() == "unresolved"
    assert frame.locator("input[name=price]").input_value() == "2"
    assert frame.locator("label", has_text="2 of 2 shown").is_visible()
    assert frame.locator("th", has_text="cost").count() >= 1


@pytest.mark.slow
def test_the_page_is_dark_with_tensorboard_and_light_on_paper(page: "Page") -> None:
    frame = drawn(page)
    figure, root = frame.locator("#front .main-svg").first, frame.locator("html")
    background = "e => getComputedStyle(e).backgroundColor"

    def look() -> list[str]:
        text = frame.locator("dd").first.evaluate("e => getComputedStyle(e).color")
        return [root.evaluate(background), figure.evaluate(background), text]

    def choose(theme: str) -> None:
        page.get_by_label("Menu for changing light or dark theme").click()
        page.get_by_role("menuitem", name=theme).click()

    white = "rgb(255, 255, 255)"
    assert look() == [white, white, "rgb(17, 17, 17)"]
    choose("Dark")
    frame.locator("html[data-theme=dark]").wait_for()
    frame.locator("#front .legendtext[style*='rgb(232, 234, 237)']").first.wait_for()
    dark = look()
    assert dark == ["rgb(32, 33, 36)", "rgb(32, 33, 36)", "rgb(232, 234, 237)"]

    page.emulate_media(media="print", color_scheme="dark")
    inside(page).evaluate("dispatchEvent(new Event('beforeprint'))")
    assert look()[:2] == [white, white]
    assert figure.get_attribute("width") == "660"
    assert not frame.locator("form").is_visible()

    page.emulate_media(media="screen")
    inside(page).evaluate("dispatchEvent(new Event('afterprint'))")
    assert look() == dark
    assert figure.get_attribute("width") != "660"
    page.emulate_media(color_scheme="light")
    choose("Light")


def test_what_is_loading_missing_or_gone_is_said(show: "Callable[..., Page]") -> None:
    held: list[Route] = []
    page = show(**{file: lambda route: held.append(route) for file in ("runs", "plotly.js")})
    frame = page.frame_locator("iframe")

    read_in(frame, "#status.busy", "Loading the runs")
    page.unroute("**/noise_scale/runs")
    held.pop(0).fulfill(json=[])
    read_in(frame, "#status", "NoiseScaleMonitor()")
    assert not frame.locator("form").is_visible()

    look_again(page)
    read_in(frame, "dd")
    waiting = frame.locator("#front").evaluate("e => getComputedStyle(e, '::before').content")
    held.pop(0).continue_()
    drawn(page)
    assert "Loading" in waiting
    assert frame.locator("form").is_visible()
    assert frame.locator("#status").inner_text() == ""

    before = answers(frame)
    page.route("**/noise_scale/runs", lambda route: route.abort())
    look_again(page)
    assert read_in(frame, "#status.error").startswith("TensorBoard does not answer")
    assert answers(frame) == before


@pytest.mark.slow
def test_the_tab_starts_with_the_filter_of_tensorboards_time_series_until_none_is_chosen(
    browser: "Browser", address: str
) -> None:
    page = browser.new_page()
    page.goto(f"{address}?runFilter=unres#noise_scale")
    frame = drawn(page)

    assert frame.locator("input[name=filter]").input_value() == "unres"
    assert frame.locator(".runs label").all_inner_texts() == ["unresolved"]
    fill(frame, "filter", "")
    read_in(frame, "label", "2 of 2 shown")
    page.wait_for_function("location.hash.includes('filter')")
    page.reload()
    frame = drawn(page)
    assert frame.locator("label", has_text="2 of 2 shown").is_visible()

    frame.locator("input[name=all]").uncheck()
    read_in(frame, "#status", "No run is chosen.")
    page.reload()
    read_in(frame, "#status", "No run is chosen.")
    page.close()


@pytest.mark.slow
def test_nothing_is_cut_on_a_phone(page: "Page") -> None:
    page.set_viewport_size({"width": 390, "height": 844})
    page.reload()
    frame = drawn(page)

    assert texts_cut(inside(page), 390) == []
    assert not frame.locator("form").is_visible()
    frame.locator("summary", has_text="Runs and settings (1 of 2 shown)").click()
    assert frame.locator("html").evaluate("page => page.scrollWidth") == 390
    assert frame.locator("form").is_visible()


@pytest.mark.slow
def test_a_zoom_is_kept_while_the_axes_are_the_same_and_can_be_undone(page: "Page") -> None:
    frame = drawn(page)
    across = frame.locator("#front .xaxislayer-above")
    changed = "was => document.querySelector('#front .xaxislayer-above').textContent !== was"
    fill(frame, "kappa", "2")
    read_in(frame, "dd", "384 examples")
    whole = across.text_content()

    drag(page, 300)
    inside(page).wait_for_function(changed, arg=whole)
    zoomed = across.text_content()
    fill(frame, "kappa", "2.1")
    read_in(frame, "dd", "403 examples")
    assert across.text_content() == zoomed != ""

    area = frame.locator("#front .nsewdrag").first
    area.dblclick(position={"x": 200, "y": 100})
    inside(page).wait_for_function(changed, arg=zoomed)
    reset = across.text_content()
    fill(frame, "price", "60")
    read_in(frame, "#front .infolayer", "cost")
    assert across.text_content() != reset

    # News wait while a zoom is dragged.
    zoomed_in = "e => String(e.layout.xaxis.range) !== e.sentRanges.xaxis"
    set_kappa = "e => { e.value = '7'; e.dispatchEvent(new Event('input', {bubbles: true})); }"

    drag(page, 200, release=False)
    with page.expect_response("**/noise_scale/prediction?*"):
        frame.locator("input[name=kappa]").evaluate(set_kappa)
    inside(page).evaluate("fetch('./runs').then(reply => reply.text())")
    during = frame.locator("dd", has_text="1,344 examples").count()
    page.mouse.move(600, 400, steps=4)
    page.mouse.up()
    read_in(frame, "dd", "1,344 examples")

    assert during == 0
    assert frame.locator("#front").evaluate(zoomed_in)


@pytest.mark.slow
def test_answers_are_there_without_the_library_of_figures_and_the_page_says_why(
    show: "Callable[..., Page]",
) -> None:
    page = show(f"&{ONE}", **{"plotly.js": lambda route: route.abort()})
    frame = page.frame_locator("iframe")
    read_in(frame, "#status", "./plotly.js")
    look_again(page)

    assert "./plotly.js" in frame.locator("#status.error").inner_text()
    assert answers(frame)[3].startswith("192 examples")


@pytest.mark.slow
def test_an_answer_that_is_slower_than_the_poll_is_shown(page: "Page") -> None:
    frame = drawn(page)
    held: list[Route] = []
    page.route("**/noise_scale/prediction?*", lambda route: held.append(route))

    fill(frame, "kappa", "2")
    frame.locator("#status.busy").wait_for()
    look_again(page)
    look_again(page)
    assert len(held) == 1
    held[0].continue_()
    read_in(frame, "dd", "384 examples")


@pytest.mark.slow
def test_a_filter_shows_runs_that_are_not_among_the_first(show: "Callable[..., Page]") -> None:
    names = [*(f"other{k}" for k in range(12)), "one"]
    runs = [{"id": f"run={name}", "name": name, "colours": ["#000", "#fff"]} for name in names]
    page = show(runs=lambda route: route.fulfill(json=runs))
    frame = page.frame_locator("iframe")
    read_in(frame, "label", "10 of 13 shown")
    fill(frame, "filter", "one")
    read_in(frame, "dd", "192 examples")


@pytest.mark.slow
def test_the_keyboards_place_and_a_tables_scroll_stay_when_the_page_is_drawn_again(
    show: "Callable[..., Page]",
) -> None:
    page = show(width=420)
    frame = drawn(page)
    focused = "() => document.activeElement.dataset.key"
    inner = inside(page)
    table = frame.get_by_role("region", name="2 runs beside each other")

    table.evaluate("e => { e.scrollLeft = 40; }")
    frame.get_by_role("button", name="unresolved").focus()
    page.keyboard.press("Enter")
    read_in(frame, "h1", "unresolved")
    on_button, scrolled = inner.evaluate(focused), table.evaluate("e => e.scrollLeft")
    frame.locator("summary").click()
    frame.locator(".runs input").nth(1).focus()
    runs = inner.evaluate("fetch('./runs').then(reply => reply.json())")
    more = [*runs, runs[0] | {"id": "run=new", "name": "new"}]
    page.route("**/noise_scale/runs", lambda route: route.fulfill(json=more))
    look_again(page)
    read_in(frame, ".runs label", "new")

    assert (on_button, scrolled) == ("run=unresolved", 40)
    assert inner.evaluate(focused) == "run=unresolved"


@pytest.mark.slow
def test_runs_that_fail_alike_have_headings_of_their_own(show: "Callable[..., Page]") -> None:
    failed = {"json": {"error": "Too few rows."}, "status": 400}
    page = show(**{"prediction?*": lambda route: route.fulfill(**failed)})
    frame = page.frame_locator("iframe")
    read_in(frame, "h1", "one")
    frame.get_by_role("button", name="unresolved").click()
    read_in(frame, "h1", "unresolved")

    assert frame.locator("#results .error").inner_text() == "Too few rows."


@pytest.mark.slow
def test_without_plotly_the_tab_names_the_package_to_install(
    monkeypatch: pytest.MonkeyPatch, browser: "Browser"
) -> None:
    from tensorboard.plugins.base_plugin import TBContext
    from werkzeug.test import Client

    from noisescale.tensorboard_plugin.loader import NoiseScaleLoader

    monkeypatch.setitem(sys.modules, "plotly", None)
    tab = NoiseScaleLoader().load(TBContext())
    script = Client(tab.get_plugin_apps()["/index.js"]).get("/index.js").text
    page = browser.new_page()
    page.add_script_tag(content=f"{script}\nrender();", type="module")

    assert 'pip install "noisescale[report]"' in (page.locator("p").text_content() or "")
    page.close()
