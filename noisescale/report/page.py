# SPDX-License-Identifier: Apache-2.0
"""A document as a page that needs nothing from anywhere else."""

from __future__ import annotations

import gzip
import json
import os
from base64 import b64encode
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from html import escape
from importlib.resources import files
from pathlib import Path
from string import Template

import plotly
from plotly.offline import get_plotlyjs

from noisescale._version import __version__
from noisescale.refusal import FileRefusal, FolderRefusal
from noisescale.report.colours import DARK
from noisescale.report.document import Cell, Document, Figure, Line, Statement, Table, ToCopy
from noisescale.report.drawing import SETTINGS

MOST_OPEN = 40
"""Lines of a table above which it is folded up."""


def page_html(document: Document) -> str:
    """Return a document as HTML, with every script and style in it."""
    figures = document.figures()
    # With a summary the page is short: two figures, the summary between them, and the answers.
    short = document.summary is not None
    first, second = (figures[:1], figures[1:2]) if short else ((), ())
    shown = [table for table in document.tables if not table.detail]
    folded = [table for table in document.tables if table.detail]
    template = Template(_file("page.html"))
    return template.substitute(
        title=escape(document.title),
        heading=escape(document.headline),
        lead=f'<p class="lead">{escape(document.lead)}</p>' if document.lead else "",
        status="" if document.status == "done" else '<p class="notes">Still under way.</p>',
        summary="" if document.summary is None else _table(document.summary),
        answers="\n".join(["<dl>", *_statements(document.answers), "</dl>"]),
        first=_figures(first),
        second=_figures(second),
        figures="" if short else _figures(figures),
        tables="\n".join(map(_table, shown)),
        warnings=_list("Warnings", document.doubts),
        more=_fold(
            _figures(figures[2:] if short else ()),
            *map(_table, folded),
            _list("Assumptions", document.assumptions),
            _paragraph("How to read this", document.how_to_read),
        ),
        next="\n".join(f'<p class="next">{escape(step)}</p>' for step in document.next),
        to_copy="\n".join(map(_to_copy, document.to_copy)),
        versions=escape(f"noisescale {__version__}, plotly {plotly.__version__}"),
        plotly=packed_plotly(),
        drawing=drawing_script(),
        settings=_script(dict(SETTINGS)),
        dark=_script(dict(DARK)),
        data=_script({figure.id: figure.drawing for figure in figures}),
    )


def write_page(document: Document, path: Path) -> Path:
    """Write a document as a page, whole or not at all, and return its path.

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
        unfinished.write_text(page_html(document), encoding="utf-8")
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
    return path


@cache
def plotly_gzipped() -> bytes:
    """Return plotly's script, compressed: 1.5 MB instead of 4.8. Browsers inflate it."""
    return gzip.compress(get_plotlyjs().encode(), compresslevel=6, mtime=0)


def packed_plotly() -> str:
    """Return plotly's script as a page has it: compressed, in characters."""
    return b64encode(plotly_gzipped()).decode()


def drawing_script() -> str:
    """Return the script that draws figures, fitted to a page's width and theme: a module."""
    return _file("figures.js")


def _file(name: str) -> str:
    return files("noisescale.report").joinpath(name).read_text("utf-8")


def _statements(statements: Iterable[Statement], kind: str = "") -> Iterator[str]:
    for one in statements:
        yield f"<dt{kind}>{escape(one.label)}</dt><dd{kind}>{escape(one.sentence)}</dd>"
        yield from _statements(one.parts, ' class="sub"')


def _figures(figures: Iterable[Figure]) -> str:
    return "\n".join(map(_figure, figures))


def _fold(*parts: str) -> str:
    """Return parts that a reader opens; nothing if all of them are empty."""
    found = "\n".join(filter(None, parts))
    summary = "<summary>Details and assumptions</summary>"
    return f'<details class="more">{summary}\n{found}\n</details>' if found else ""


def _figure(figure: Figure) -> str:
    """Return a place for a figure, and its finding for readers who cannot see it."""
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
    label = escape(table.title or "Summary")
    scroll = f'<div class="scroll" tabindex="0" role="region" aria-label="{label}">'
    head = f"<thead><tr>{headings}</tr></thead>"
    grid = f"{scroll}<table>\n{head}\n<tbody>\n{rows}\n</tbody>\n</table></div>\n{notes}"
    if len(table.lines) > MOST_OPEN:
        summary = f"<summary>Show {len(table.lines):,} lines</summary>"
        grid = f"<details>{summary}\n{grid}</details>\n"
    return f"<h2>{escape(table.title)}</h2>\n{grid}" if table.title else grid


def _line(line: Line) -> str:
    kind = ' class="marked"' if line.marks else ""
    marks = "".join(f'<span class="mark">{escape(mark)}</span>' for mark in line.marks)
    name, *others = line.cells
    cells = "".join(map(_cell, others))
    return f'<tr{kind}><th scope="row">{escape(name.text)}{marks}</th>{cells}</tr>'


def _cell(cell: Cell) -> str:
    bounds = f'<span class="bounds">{escape(cell.bounds)}</span>' if cell.bounds else ""
    text = escape(cell.text).replace(" x", "&nbsp;x")  # on a phone a cell may break
    return f"<td>{text}{bounds}</td>"


def _list(heading: str, sentences: Sequence[str]) -> str:
    """Return a list below its heading; nothing if there is nothing to list."""
    if not sentences:
        return ""
    items = "\n".join(f"<li>{escape(sentence)}</li>" for sentence in sentences)
    return f'<h2>{heading}</h2>\n<ul class="{heading.lower()}">\n{items}\n</ul>'


def _to_copy(one: ToCopy) -> str:
    """Return text that a reader copies below what it is for, and the notes."""
    text = escape("\n".join(one.lines), quote=False)
    notes = "".join(f'<p class="notes">{escape(note)}</p>\n' for note in one.notes)
    return f"<h2>{escape(one.label)}</h2>\n<pre>{text}</pre>\n{notes}"


def _paragraph(heading: str, text: str) -> str:
    return f"<h2>{heading}</h2>\n<p>{escape(text, quote=False)}</p>" if text else ""


def _script(value: object) -> str:
    """JSON that no text in it can end the script with."""
    return json.dumps(value, allow_nan=False).replace("<", "\\u003c")
