# SPDX-License-Identifier: Apache-2.0
"""The page in TensorBoard, in a real browser."""

import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from logged_runs import log_run

if TYPE_CHECKING:
    from playwright.sync_api import Browser, ConsoleMessage, FrameLocator, Page

PREFIX = "/behind/a/proxy"


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


@pytest.fixture
def page(browser: "Browser", address: str) -> "Iterator[Page]":
    page = browser.new_page(viewport={"width": 1200, "height": 1600})
    said: list[str] = []

    def hear(message: "ConsoleMessage") -> None:
        """Not TensorBoard's own fonts, which it does not find behind a path prefix."""
        if message.type == "error" and "/font-roboto/" not in message.location["url"]:
            said.append(message.text)

    page.on("console", hear)
    page.on("pageerror", lambda error: said.append(str(error)))
    page.goto(f"{address}#noise_scale")
    yield page
    page.close()
    assert [text for text in said if "status of 400" not in text] == []


def drawn(page: "Page") -> "FrameLocator":
    frame = page.frame_locator("iframe")
    frame.locator("#speed-up .main-svg").first.wait_for(timeout=20_000)
    return frame


def answers(frame: "FrameLocator") -> list[str]:
    return frame.locator("dd").all_inner_texts()


def test_the_tab_lists_the_runs_and_draws_the_reports_figures(page: "Page") -> None:
    frame = drawn(page)

    assert page.locator("text=Noise scale").first.is_visible()
    assert frame.locator("select[name=run] option").all_inner_texts() == ["one", "unresolved"]
    assert not frame.locator("select[name=optimizer]").is_visible()
    assert answers(frame)[1] == "192 examples (95 % interval 154 to 250)"
    for figure, axis in (
        ("front", "time (seconds)"),
        ("noise-scale", "optimizer steps"),
        ("speed-up", "speed-up over this run"),
    ):
        assert axis in (frame.locator(f"#{figure} .infolayer").text_content() or "")
        assert frame.locator(f"#{figure} .scatterlayer .trace").count() >= 3
    assert frame.locator("tr.marked").first.inner_text().startswith("64")


def test_prices_redraw_at_once_and_a_bad_one_keeps_what_is_drawn(page: "Page") -> None:
    frame = drawn(page)
    before = answers(frame)[0]

    frame.locator("input[name=price]").fill("1")
    frame.locator("input[name=worth]").fill("500")
    frame.locator("th", has_text="cost with waiting").first.wait_for(timeout=5_000)
    hurried = answers(frame)[0]
    frame.locator("input[name=price]").fill("-1")
    frame.locator("#status.error").wait_for(timeout=5_000)

    assert before != hurried
    assert frame.locator("#status").inner_text() == (
        "`price_per_device_hour` must be positive and finite, got -1.0. Leave it out if it is"
        " unknown."
    )
    assert answers(frame)[0] == hurried
    assert frame.locator("#results.old").count() == 1


def test_devices_and_another_run_are_chosen(page: "Page") -> None:
    frame = drawn(page)

    frame.locator("input[name=devices]").fill("2, 6")
    frame.locator("tbody th", has_text="6").first.wait_for(timeout=5_000)
    frame.locator("select[name=run]").select_option("unresolved")
    frame.locator("dd", has_text="at least 154 examples, not resolved").wait_for(timeout=5_000)

    assert "1,024 or more" not in answers(frame)[0]
    assert "or more examples" in answers(frame)[0]


def test_the_page_fits_a_narrow_window(page: "Page") -> None:
    page.set_viewport_size({"width": 800, "height": 1200})
    frame = drawn(page)

    overflow = frame.locator("html").evaluate("page => page.scrollWidth - page.clientWidth")

    assert overflow <= 0
