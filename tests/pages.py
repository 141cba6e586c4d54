# SPDX-License-Identifier: Apache-2.0
"""Reports as HTML: their tags, and how a browser shows them."""

from html.parser import HTMLParser
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Frame, Page


class Outline(HTMLParser):
    """Tags with their attributes, and whether each is closed in its turn."""

    VOID = ("meta", "link", "img", "br", "wbr")

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def opened(
    browser: "Browser", path: Path, width: int, figures: int = 3
) -> "tuple[Page, list[str]]":
    """The page with its figures drawn, and whatever it complained of or asked others for."""
    page = browser.new_page(viewport={"width": width, "height": 900})
    noise: list[str] = []
    page.on("console", lambda message: noise.append(message.text))
    page.on("pageerror", lambda error: noise.append(str(error)))
    page.on("request", lambda asked: noise.append(asked.url))
    page.on("dialog", lambda dialog: (noise.append("dialog"), dialog.dismiss()))
    page.goto(path.as_uri())
    page.locator(".more").evaluate_all("all => all.forEach(e => { e.open = true; })")
    page.locator("figure .xtitle").nth(figures - 1).wait_for(state="attached")
    return page, [said for said in noise if said != path.as_uri()]


def background_of(page: "Page", element: str) -> str:
    return str(page.locator(element).first.evaluate("e => getComputedStyle(e).backgroundColor"))


def texts_cut(page: "Page | Frame", width: int) -> list[str]:
    return page.locator("figure svg text").evaluate_all(  # type: ignore[no-any-return]
        "all => all.map(e => [e.textContent, e.getBoundingClientRect()])"
        f".filter(([text, {{left, right}}]) => text && (left < 0 || right > {width}))"
    )


def check_fit(page: "Page", width: int, legends: int) -> None:
    """Nothing leaves the page, no text is cut, and each of the legends is inside its figure."""
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert texts_cut(page, width) == []
    bottom = "e => e.getBoundingClientRect().bottom"
    found = 0
    for figure in page.locator("figure [role=img]").all():
        below = figure.locator(".legend .bg").evaluate_all(f"all => all.map({bottom})")
        assert all(end <= figure.evaluate(bottom) + 1 for end in below)
        found += len(below)
    assert found == legends
