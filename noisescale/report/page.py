# SPDX-License-Identifier: Apache-2.0
"""A page that needs nothing from anywhere else: answers, figures, tables, and how to read them."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from pathlib import Path
from string import Template

import plotly
from plotly.offline import get_plotlyjs

from noisescale._version import __version__
from noisescale.refusal import FileRefusal, FolderRefusal
from noisescale.report.colours import DARK
from noisescale.report.figures import SETTINGS, PlacedFigure
from noisescale.report.tables import Cell, Line, Table

MOST_OPEN = 40
"""Lines of a table above which it is folded up."""


@dataclass(frozen=True)
class Page:
    """What a page says, from top to bottom. All of it is plain text."""

    title: str
    """Of the browser's window."""
    heading: str
    answers: Sequence[tuple[str, str]]
    """Names and texts. A line whose name is indented belongs to the line above it."""
    warnings: Sequence[str]
    figures: Sequence[PlacedFigure]
    tables: Sequence[Table]
    assumptions: Sequence[str]
    how_to_read: str


def page_html(page: Page) -> str:
    """Return the page as HTML, with every script and style in it."""
    template = Template(_file("page.html"))
    return template.substitute(
        title=escape(page.title),
        heading=escape(page.heading),
        answers=_answers(page.answers),
        figures="\n".join(map(_figure, page.figures)),
        tables="\n".join(map(_table, page.tables)),
        warnings=_list("Warnings", page.warnings),
        assumptions=_list("Assumptions", page.assumptions),
        how_to_read=escape(page.how_to_read, quote=False),
        versions=escape(f"noisescale {__version__}, plotly {plotly.__version__}"),
        plotly=get_plotlyjs(),
        drawing=drawing_script(),
        settings=_script(dict(SETTINGS)),
        dark=_script(dict(DARK)),
        data=_script({figure.id: figure.drawing for figure in page.figures}),
    )


def write_page(page: Page, path: Path) -> Path:
    """Write a page, whole or not at all, and return its path.

    Raises:
        OSError: If the folder does not exist, or cannot be written to.
    """
    path = Path(path)
    if not path.parent.is_dir():
        raise FileRefusal(
            "path", "be in a folder that exists", repr(str(path)), "Create its folder first."
        )
    if path.is_dir():
        raise FolderRefusal(
            "path",
            "name a file",
            f"the folder {str(path)!r}",
            "Add the name of a page to it.",
        )
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        unfinished.write_text(page_html(page), encoding="utf-8")
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
    return path


def drawing_script() -> str:
    """Return the script that draws figures, fitted to a page's width and theme: a module."""
    return _file("figures.js")


def _file(name: str) -> str:
    return files("noisescale.report").joinpath(name).read_text("utf-8")


def _answers(lines: Iterable[tuple[str, str]]) -> str:
    said = []
    for name, text in lines:
        kind = ' class="sub"' if name.startswith(" ") else ""
        said.append(f"<dt{kind}>{escape(name.strip())}</dt><dd{kind}>{escape(text)}</dd>")
    return "\n".join(["<dl>", *said, "</dl>"])


def _figure(figure: PlacedFigure) -> str:
    """A place for a figure, and its finding for readers who cannot see it."""
    finding = escape(figure.finding)
    return (
        f'<h2 id="{figure.id}-heading">{escape(figure.heading)}</h2>\n'
        f'<figure aria-labelledby="{figure.id}-heading">\n'
        f'<p class="finding">{finding}</p>\n<p class="caption">{escape(figure.caption)}</p>\n'
        f'<div id="{figure.id}" style="height: {figure.height:g}px" role="img"'
        f' aria-label="{finding}. The tables below have its numbers."></div>\n</figure>'
    )


def _table(table: Table) -> str:
    headings = "".join(f'<th scope="col">{escape(heading)}</th>' for heading in table.headings)
    rows = "\n".join(map(_line, table.lines))
    notes = "".join(f'<p class="notes">{escape(note)}</p>\n' for note in table.notes)
    scroll = f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(table.title)}">'
    head = f"<thead><tr>{headings}</tr></thead>"
    grid = f"{scroll}<table>\n{head}\n<tbody>\n{rows}\n</tbody>\n</table></div>\n{notes}"
    if len(table.lines) > MOST_OPEN:
        summary = f"<summary>Show {len(table.lines):,} lines</summary>"
        grid = f"<details>{summary}\n{grid}</details>\n"
    return f"<h2>{escape(table.title)}</h2>\n{grid}"


def _line(line: Line) -> str:
    kind = ' class="marked"' if line.marks else ""
    marks = "".join(f'<span class="mark">{escape(mark)}</span>' for mark in line.marks)
    name, *others = line.cells
    cells = "".join(map(_cell, others))
    return f'<tr{kind}><th scope="row">{escape(name.text)}{marks}</th>{cells}</tr>'


def _cell(cell: Cell) -> str:
    bounds = f'<span class="bounds">{escape(cell.bounds)}</span>' if cell.bounds else ""
    return f"<td>{escape(cell.text)}{bounds}</td>"


def _list(heading: str, sentences: Sequence[str]) -> str:
    """Return a list below its heading; nothing if there is nothing to list."""
    if not sentences:
        return ""
    items = "\n".join(f"<li>{escape(sentence)}</li>" for sentence in sentences)
    return f'<h2>{heading}</h2>\n<ul class="{heading.lower()}">\n{items}\n</ul>'


def _script(value: object) -> str:
    """JSON that no text in it can end the script with."""
    return json.dumps(value, allow_nan=False).replace("<", "\\u003c")
