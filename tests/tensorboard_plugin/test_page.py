# SPDX-License-Identifier: Apache-2.0
"""The page in TensorBoard, in a real browser."""

import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest
from logged_runs import log_run

if TYPE_CHECKING:
    from playwright.sync_api import Browser, ConsoleMessage, FrameLocator, Page, Route

PREFIX = "/behind/a/proxy"
ONE = "p.noise_scale.runs=run%3Done"
"""In an address: only the run "one" is chosen."""
ONE_ID = "run=one"
NEW = {"id": "run=new", "name": "new"}


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    logs = tmp_path_factory.mktemp("logs")
    log_run(logs / "one")
    log_run(logs / "unresolved", resolved=False)
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    program = [sys.executable, "-m", "tensorboard.main", "--logdir", logs, "--port", port]
    options = ["--path_prefix", PREFIX, "--load_fast", "false"]
    with subprocess.Popen(list(map(str, [*program, *options])), stderr=subprocess.PIPE) as server:
        address = f"http://localhost:{port}{PREFIX}/"
        for _ in range(100):
            try:
                listing = urllib.request.urlopen(f"{address}data/plugin/noise_scale/runs").read()
                if b"unresolved" in listing:
                    break
            except OSError:
                pass
            time.sleep(0.2)
        yield address
        server.terminate()


@pytest.fixture(scope="module")
def tensorboard(browser: "Browser", address: str) -> "Iterator[tuple[Page, list[str]]]":
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
    frame.locator("#speed-up .main-svg").first.wait_for(timeout=20_000)
    return frame


def look_again(page: "Page") -> None:
    """What the page does every ten seconds."""
    inner = next(frame for frame in page.frames if frame != page.main_frame)
    inner.evaluate("document.dispatchEvent(new Event('visibilitychange'))")


def answers(frame: "FrameLocator") -> list[str]:
    return frame.locator("dd").all_inner_texts()


def test_the_tab_lists_the_runs_and_draws_the_reports_figures(page: "Page") -> None:
    frame = drawn(page)

    assert page.locator("text=Noise scale").first.is_visible()
    assert frame.locator(".runs label").all_inner_texts() == ["one", "unresolved"]
    assert frame.locator("label", has_text="1 of 2 shown").is_visible()
    assert not frame.locator("select[name=detail]").is_visible()
    assert answers(frame)[2] == "192 examples (95 % interval 154 to 250)"
    headings = frame.locator("section h2").all_inner_texts()
    assert headings[:2] == ["What other batch sizes take", "The noise scale along the run"]
    for figure, axis in (
        ("front", "time: optimizer steps"),
        ("noise-scale", "optimizer steps"),
        ("speed-up", "speed-up over this run"),
    ):
        assert axis in (frame.locator(f"#{figure} .infolayer").text_content() or "")
        assert frame.locator(f"#{figure} .scatterlayer .trace").count() >= 3
    assert frame.locator("tr.marked").first.inner_text().startswith("64")


def test_several_runs_are_overlaid_and_beside_each_other(show: "Callable[..., Page]") -> None:
    frame = drawn(show())

    overlaid = frame.locator("#noise-scales .legendtext").all_text_contents()
    beside = frame.locator("table").first.locator("tbody tr").all_inner_texts()
    frame.locator("select[name=across]").select_option("examples")
    frame.locator("#noise-scales .xtitle", has_text="examples processed").wait_for()
    frame.get_by_role("button", name="unresolved").click()
    frame.locator("h1", has_text="unresolved").wait_for()
    frame.locator("dd", has_text="at least 154 examples, not resolved").first.wait_for()

    assert overlaid == ["one", "unresolved"]
    assert [row.split()[:2] for row in beside] == [["one", "1,000"], ["unresolved", "1,000"]]
    assert frame.locator("select[name=detail]").input_value() == "run=unresolved"


def test_runs_are_chosen_and_filtered_as_in_tensorboards_own_list(page: "Page") -> None:
    frame = drawn(page)

    frame.locator(".runs input").nth(1).check()
    frame.locator("#noise-scales .main-svg").first.wait_for()
    frame.locator("input[name=filter]").fill("unres|nothing")
    frame.locator("dd", has_text="at least 154 examples").first.wait_for()
    filtered = frame.locator(".runs label").all_inner_texts()
    frame.locator("input[name=filter]").fill("(")
    bad = frame.locator("input[name=filter]:invalid").count()
    frame.locator("input[name=filter]").fill("")
    frame.locator("input[name=all]").uncheck()
    frame.locator("#status", has_text="No run is chosen.").wait_for()

    assert filtered == ["unresolved"]
    assert bad == 1
    assert frame.locator("#results").inner_text() == ""


def test_the_tab_starts_with_the_filter_of_tensorboards_time_series(
    browser: "Browser", address: str
) -> None:
    page = browser.new_page()
    page.goto(f"{address}?runFilter=unres#noise_scale")
    frame = drawn(page)

    assert frame.locator("input[name=filter]").input_value() == "unres"
    assert frame.locator(".runs label").all_inner_texts() == ["unresolved"]
    page.close()


def test_the_address_keeps_the_state_through_a_reload_and_other_tabs(page: "Page") -> None:
    frame = drawn(page)

    frame.locator(".runs input").nth(1).check()
    frame.locator("select[name=detail]").select_option("run=unresolved")
    frame.locator("input[name=price]").fill("2")
    frame.locator("th", has_text="cost").first.wait_for()
    page.locator("[role=tab]", has_text="Scalars").first.click()
    page.locator("[role=tab]", has_text="Noise scale").first.click()
    page.reload()
    frame = drawn(page)

    assert frame.locator("h1").inner_text() == "unresolved"
    assert frame.locator("input[name=price]").input_value() == "2"
    assert frame.locator("label", has_text="2 of 2 shown").is_visible()
    assert frame.locator("th", has_text="cost").count() >= 1


def test_an_address_that_is_pasted_is_followed(page: "Page") -> None:
    frame = drawn(page)

    page.evaluate("location.hash = 'noise_scale&p.noise_scale.kappa=2'")
    frame.locator("dd", has_text="384 examples").first.wait_for()

    assert frame.locator("input[name=kappa]").input_value() == "2"
    assert frame.locator("label", has_text="2 of 2 shown").is_visible()


def test_the_page_is_dark_with_tensorboard(browser: "Browser", address: str) -> None:
    page = browser.new_page()
    page.goto(f"{address}#noise_scale&{ONE}")
    frame = drawn(page)
    text, background = "getComputedStyle(e).color", "getComputedStyle(e).backgroundColor"

    def look() -> list[str]:
        figure = frame.locator("#front .main-svg").first.evaluate(f"e => {background}")
        page_now = frame.locator("html").evaluate(f"e => {background}")
        return [page_now, figure, frame.locator("dd").first.evaluate(f"e => {text}")]

    light = look()
    page.get_by_label("Menu for changing light or dark theme").click()
    page.get_by_role("menuitem", name="Dark").click()
    frame.locator("html[data-theme=dark]").wait_for()
    frame.locator("#front .legendtext[style*='rgb(232, 234, 237)']").first.wait_for()

    assert light == ["rgb(255, 255, 255)", "rgb(255, 255, 255)", "rgb(17, 17, 17)"]
    assert look() == ["rgb(32, 33, 36)", "rgb(32, 33, 36)", "rgb(232, 234, 237)"]
    page.close()


def test_the_page_says_that_it_is_loading(show: "Callable[..., Page]") -> None:
    held: list[Route] = []
    page = show(**{file: lambda route: held.append(route) for file in ("runs", "plotly.js")})
    frame = page.frame_locator("iframe")

    frame.locator("#status.busy", has_text="Loading the runs ...").wait_for(timeout=20_000)
    page.unroute("**/noise_scale/runs")
    held.pop(0).continue_()
    frame.locator("dd").first.wait_for()
    waiting = frame.locator("#front").evaluate("e => getComputedStyle(e, '::before').content")
    held.pop(0).continue_()
    drawn(page)

    assert waiting == '"Loading the figure ..."'
    assert frame.locator("#status").inner_text() == ""


def test_nothing_is_cut_on_a_phone(page: "Page") -> None:
    page.set_viewport_size({"width": 390, "height": 844})
    page.reload()
    frame = drawn(page)

    inside = frame.locator("figure svg text").evaluate_all(
        "all => all.map(e => [e.textContent, e.getBoundingClientRect()])"
        ".filter(([text, {left, right}]) => text && (left < 0 || right > 390)).length"
    )
    folded = frame.locator("form").is_visible()
    frame.locator("summary", has_text="Runs and settings (1 of 2 shown)").click()

    assert frame.locator("html").evaluate("page => page.scrollWidth") == 390
    assert inside == 0
    assert not folded
    assert frame.locator("form").is_visible()


def test_prices_redraw_at_once_and_a_bad_one_keeps_what_is_drawn(page: "Page") -> None:
    frame = drawn(page)
    before = answers(frame)[:2]

    frame.locator("input[name=price]").fill("1")
    frame.locator("input[name=worth]").fill("500")
    frame.locator("th", has_text="cost with waiting").first.wait_for(timeout=5_000)
    hurried = answers(frame)[:2]
    frame.locator("input[name=price]").fill("-1")
    frame.locator("#status.error").wait_for(timeout=5_000)

    assert before != hurried
    assert frame.locator("#status").inner_text() == (
        "`price` must be positive and finite, got -1.0. Leave it out if it is unknown."
    )
    assert answers(frame)[:2] == hurried
    assert frame.locator("#results.old").count() == 1


def test_devices_and_another_run_are_answered(page: "Page") -> None:
    frame = drawn(page)

    frame.locator("input[name=devices]").fill("2, 6")
    frame.locator("tbody th", has_text="6").first.wait_for(timeout=5_000)
    frame.locator(".runs input").nth(1).check()
    frame.locator("select[name=detail]").select_option("run=unresolved")
    frame.locator("dd", has_text="at least 154 examples, not resolved").first.wait_for(
        timeout=5_000
    )

    assert any("4 devices" in said or "6 devices" in said for said in answers(frame))


def test_the_page_fits_a_narrow_window(page: "Page") -> None:
    page.set_viewport_size({"width": 800, "height": 1200})
    frame = drawn(page)

    overflow = frame.locator("html").evaluate("page => page.scrollWidth - page.clientWidth")

    assert overflow <= 0


def test_a_zoom_is_kept_while_the_axes_are_the_same_and_can_be_undone(page: "Page") -> None:
    frame = drawn(page)
    across = frame.locator("#front .xaxislayer-above")
    frame.locator("input[name=kappa]").fill("2")
    frame.locator("dd", has_text="384 examples").first.wait_for(timeout=5_000)
    whole = across.text_content()
    frame.locator("#front .nsewdrag").first.scroll_into_view_if_needed()
    plot = frame.locator("#front .nsewdrag").first.bounding_box()
    assert plot is not None

    page.mouse.move(plot["x"] + 100, plot["y"] + 50)
    page.mouse.down()
    page.mouse.move(plot["x"] + 300, plot["y"] + 250, steps=4)
    page.mouse.up()
    page.wait_for_timeout(500)
    zoomed = across.text_content()
    frame.locator("input[name=kappa]").fill("2.0001")
    page.wait_for_timeout(1500)
    after_kappa = across.text_content()
    frame.locator("#front .nsewdrag").first.scroll_into_view_if_needed()
    plot = frame.locator("#front .nsewdrag").first.bounding_box()
    assert plot is not None
    page.mouse.dblclick(plot["x"] + 200, plot["y"] + 100)
    page.wait_for_timeout(500)
    reset = across.text_content()
    frame.locator("input[name=price]").fill("60")
    frame.locator("#front .infolayer", has_text="cost").wait_for(timeout=5_000)

    assert zoomed not in (whole, "")
    assert after_kappa == zoomed
    assert reset == whole
    assert across.text_content() != whole


def test_runs_are_asked_for_only_while_the_tab_is_open(page: "Page") -> None:
    drawn(page)
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url.partition(PREFIX)[2]))

    page.locator("[role=tab]", has_text="Scalars").first.click()
    page.wait_for_timeout(500)
    look_again(page)
    page.wait_for_timeout(500)
    while_hidden = [url for url in asked if "/noise_scale/" in url]
    with page.expect_request("**/noise_scale/prediction?*", timeout=5_000):
        page.locator("[role=tab]", has_text="Noise scale").first.click()

    assert while_hidden == []
    assert "/data/plugin/noise_scale/runs" in asked


def test_a_folder_without_runs_says_how_to_get_one_and_shows_it_when_it_is_there(
    show: "Callable[..., Page]",
) -> None:
    no_runs = {"body": "[]", "content_type": "application/json"}
    page = show(runs=lambda route: route.fulfill(**no_runs))
    frame = page.frame_locator("iframe")
    frame.locator("#status", has_text="Add NoiseScaleMonitor()").wait_for(timeout=20_000)
    form_shown = frame.locator("form").is_visible()

    page.unroute("**/noise_scale/runs")
    look_again(page)
    drawn(page)

    assert not form_shown
    assert frame.locator("form").is_visible()
    assert frame.locator("#status").inner_text() == ""


def test_a_server_that_is_gone_is_named(page: "Page") -> None:
    frame = drawn(page)
    before = answers(frame)

    page.route("**/noise_scale/runs", lambda route: route.abort())
    look_again(page)
    frame.locator("#status.error").wait_for(timeout=5_000)

    assert frame.locator("#status").inner_text() == (
        "TensorBoard does not answer (Failed to fetch). Is it still running?"
    )
    assert answers(frame) == before


def test_answers_are_there_without_the_library_of_figures_and_the_page_says_why(
    show: "Callable[..., Page]",
) -> None:
    page = show(f"&{ONE}", **{"plotly.js": lambda route: route.abort()})
    frame = page.frame_locator("iframe")
    frame.locator("#status", has_text="./plotly.js cannot be loaded").wait_for(timeout=20_000)

    look_again(page)
    page.wait_for_timeout(500)

    assert frame.locator("#status.error").inner_text() == "./plotly.js cannot be loaded"
    assert answers(frame)[2] == "192 examples (95 % interval 154 to 250)"


def test_an_answer_that_is_slower_than_the_poll_is_shown(show: "Callable[..., Page]") -> None:
    page = show(f"&{ONE}")
    frame = drawn(page)
    held: list[Route] = []
    page.route("**/noise_scale/prediction?*", lambda route: held.append(route))

    frame.locator("input[name=kappa]").fill("2")
    frame.locator("#status.busy").wait_for()
    for _ in range(2):
        look_again(page)
        page.wait_for_timeout(300)
    asked = len(held)
    held[0].continue_()
    frame.locator("dd", has_text="384 examples").first.wait_for()

    assert asked == 1


def test_the_run_that_is_answered_for_stays_while_it_is_filtered_out(
    show: "Callable[..., Page]",
) -> None:
    page = show("&p.noise_scale.detail=run%3Dunresolved")
    frame = drawn(page)
    at_first = frame.locator("h1").inner_text()

    frame.locator("input[name=filter]").fill("one")
    frame.locator("dd", has_text="192 examples").first.wait_for()
    frame.locator("input[name=filter]").fill("")
    frame.locator("h1", has_text="unresolved").wait_for()
    page.evaluate("location.hash = 'noise_scale'")
    frame.locator("h1", has_text="one").wait_for()

    assert at_first == "unresolved"


def test_no_run_and_no_filter_are_choices_that_the_address_keeps(
    browser: "Browser", address: str
) -> None:
    page = browser.new_page()
    page.goto(f"{address}?runFilter=unres#noise_scale")
    frame = drawn(page)

    frame.locator("input[name=filter]").fill("")
    frame.locator("label", has_text="2 of 2 shown").wait_for()
    page.wait_for_function("location.hash.includes('filter')")
    page.reload()
    frame = drawn(page)
    unfiltered = frame.locator("label", has_text="2 of 2 shown").is_visible()
    frame.locator("input[name=all]").uncheck()
    frame.locator("#status", has_text="No run is chosen.").wait_for()
    page.reload()
    frame.locator("#status", has_text="No run is chosen.").wait_for(timeout=20_000)

    assert unfiltered
    page.close()


def test_a_filter_shows_runs_that_are_not_among_the_first(show: "Callable[..., Page]") -> None:
    others = [{"id": f"run=other{k}", "name": f"other{k}"} for k in range(12)]
    runs = [run | {"colours": ["#000", "#fff"]} for run in [*others, {"id": ONE_ID, "name": "one"}]]
    page = show(runs=lambda route: route.fulfill(json=runs))
    frame = page.frame_locator("iframe")
    frame.locator("label", has_text="10 of 13 shown").wait_for(timeout=20_000)

    frame.locator("input[name=filter]").fill("one")
    frame.locator("dd", has_text="192 examples").first.wait_for()


def test_the_keyboards_place_and_a_tables_scroll_stay_when_the_page_is_drawn_again(
    show: "Callable[..., Page]",
) -> None:
    page = show(width=420)
    frame = drawn(page)
    focused = "() => document.activeElement.dataset.key"
    inner = page.frames[-1]
    table = frame.get_by_role("region", name="2 runs beside each other")

    table.evaluate("e => { e.scrollLeft = 40; }")
    frame.get_by_role("button", name="unresolved").focus()
    page.keyboard.press("Enter")
    frame.locator("h1", has_text="unresolved").wait_for()
    on_button, scrolled = inner.evaluate(focused), table.evaluate("e => e.scrollLeft")
    frame.locator("summary").click()
    frame.locator(".runs input").nth(1).focus()
    runs = inner.evaluate("fetch('./runs').then(reply => reply.json())")
    page.route("**/noise_scale/runs", lambda route: route.fulfill(json=[*runs, runs[0] | NEW]))
    look_again(page)
    frame.locator(".runs label", has_text="new").wait_for()

    assert on_button == "run=unresolved"
    assert scrolled == 40
    assert inner.evaluate(focused) == "run=unresolved"


def test_news_wait_while_a_zoom_is_dragged(page: "Page") -> None:
    frame = drawn(page)
    zoomed = "e => String(e.layout.xaxis.range) !== e.sentRanges.xaxis"
    frame.locator("#front .nsewdrag").first.scroll_into_view_if_needed()
    plot = frame.locator("#front .nsewdrag").first.bounding_box()
    assert plot is not None
    set_kappa = "e => { e.value = '7'; e.dispatchEvent(new Event('input', {bubbles: true})); }"

    page.mouse.move(plot["x"] + 100, plot["y"] + 50)
    page.mouse.down()
    page.mouse.move(plot["x"] + 200, plot["y"] + 150, steps=4)
    with page.expect_response("**/noise_scale/prediction?*"):
        frame.locator("input[name=kappa]").evaluate(set_kappa)
    page.wait_for_timeout(300)
    during = frame.locator("dd", has_text="1,344 examples").count()
    page.mouse.move(plot["x"] + 300, plot["y"] + 250, steps=4)
    page.mouse.up()
    frame.locator("dd", has_text="1,344 examples").first.wait_for()

    assert during == 0
    assert frame.locator("#front").evaluate(zoomed)


def test_runs_that_fail_alike_have_headings_of_their_own(show: "Callable[..., Page]") -> None:
    failed = {"json": {"error": "Too few rows."}, "status": 400}
    page = show(**{"prediction?*": lambda route: route.fulfill(**failed)})
    frame = page.frame_locator("iframe")
    frame.locator("h1", has_text="one").wait_for(timeout=20_000)

    frame.get_by_role("button", name="unresolved").click()
    frame.locator("h1", has_text="unresolved").wait_for()

    assert frame.locator("#results .error").inner_text() == "Too few rows."


def test_a_figure_that_is_no_longer_shown_listens_to_nothing(show: "Callable[..., Page]") -> None:
    page = show()
    frame = drawn(page)
    frame.locator("#noise-scales .main-svg").first.wait_for()
    inner = page.frames[-1]
    inner.evaluate("window.before = document.getElementById('noise-scales')")

    frame.locator(".runs input").nth(1).uncheck()
    frame.locator("h1").wait_for(state="detached")

    assert inner.evaluate("[before.isConnected, before.data === undefined]") == [False, True]


def test_the_page_is_light_on_paper(browser: "Browser", address: str) -> None:
    page = browser.new_page(color_scheme="dark")
    page.goto(f"{address}#noise_scale&{ONE}")
    frame = drawn(page)
    page.get_by_label("Menu for changing light or dark theme").click()
    page.get_by_role("menuitem", name="Dark").click()
    frame.locator("html[data-theme=dark]").wait_for()
    inner = page.frames[-1]
    colour = "e => getComputedStyle(e).backgroundColor"

    page.emulate_media(media="print")
    inner.evaluate("dispatchEvent(new Event('beforeprint'))")
    figure = frame.locator("#front .main-svg").first
    printed = frame.locator("html").evaluate(colour), figure.evaluate(colour)
    width, form = figure.get_attribute("width"), frame.locator("form").is_visible()
    page.emulate_media(media="screen")
    inner.evaluate("dispatchEvent(new Event('afterprint'))")

    assert printed == ("rgb(255, 255, 255)", "rgb(255, 255, 255)")
    assert (width, form) == ("660", False)
    assert figure.evaluate(colour) == "rgb(32, 33, 36)"
    assert figure.get_attribute("width") != "660"
    page.close()
