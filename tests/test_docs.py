# SPDX-License-Identifier: Apache-2.0
"""The site: what is in its navigation, and that its guide stays readable."""

import re
from collections.abc import Iterator
from typing import Any

import pytest
import yaml
from scripts import ROOT

DOCS = ROOT / "docs"
MOST_NUMBERS = 20

NOT_PROSE = (
    r"<!--.*?-->",
    r"^( *)```.*?^\1```$",  # blocks of code
    r"`[^`\n]*`",  # names and settings
    r"(?<=\])\([^)]*\)",  # where links lead
)


def navigation() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]
    return found


def pages(entry: Any, title: str = "") -> Iterator[tuple[str, str]]:
    """Yield the titles and the files of all pages below an entry of the navigation."""
    if isinstance(entry, str):
        yield title, entry
    elif isinstance(entry, dict):
        for name, below in entry.items():
            yield from pages(below, name)
    else:
        for below in entry:
            yield from pages(below)


GUIDE = dict(pages(navigation()[0]["Guide"]))
WRITTEN = sorted(file for file in GUIDE.values() if file.endswith(".md"))


def numbers_in(text: str) -> list[str]:
    """Return the numbers outside of code. Digits in names, such as FSDP2, are none."""
    for pattern in NOT_PROSE:
        text = re.sub(pattern, "", text, flags=re.DOTALL | re.MULTILINE)
    return re.findall(r"(?<![\w-])\d+(?:[.,]\d+)*", text)


def test_numbers_are_counted_outside_of_code() -> None:
    text = (
        "Of 1,234 runs 5 % by FSDP2 [took](a-2.md) `lr=3`:\n```\nstep 7\n```\n4 to 0.5 <!-- 6 -->"
    )

    assert numbers_in(text) == ["1,234", "5", "4", "0.5"]


@pytest.mark.parametrize("file", WRITTEN)
def test_a_page_of_the_guide_begins_with_a_sentence_and_has_few_numbers(file: str) -> None:
    """Tables of benchmarks belong to the research pages."""
    text = (DOCS / file).read_text()

    assert re.match(r"# .+\n\n(?!```|- )[^|#!>]", text)
    assert len(numbers_in(text)) <= MOST_NUMBERS, numbers_in(text)


def test_every_page_is_in_the_navigation() -> None:
    shown = [file for _, file in pages(navigation())]

    written = [
        p.relative_to(DOCS).as_posix() for kind in ("md", "ipynb") for p in DOCS.rglob(f"*.{kind}")
    ]

    assert sorted(shown) == sorted(written)
