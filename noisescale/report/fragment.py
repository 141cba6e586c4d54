# SPDX-License-Identifier: Apache-2.0
"""A document as the output of a notebook's cell."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

from noisescale.report.document import Cell, Document, Figure, Line, Statement, Table, ToCopy

_LEFT = 'style="text-align: left; white-space: normal"'
"""Notebooks align cells to the right."""


def fragment_of(document: Document) -> str:
    """Return HTML without styles of its own, so that it suits light and dark notebooks.

    It has the headline, the lead, the summary, the answers, the doubts and the tables that are no
    details; without a summary the first table in any case.
    """
    answers = "".join(_statements(document.answers))
    summary = document.summary
    first = _table(summary) if summary else ""
    least = 0 if summary else 1
    shown = [table for k, table in enumerate(document.tables) if k < least or not table.detail]
    doubts = "".join(f"<p><b>Warning:</b> {escape(doubt)}</p>" for doubt in document.doubts)
    steps = (escape(step).replace("\n", "<br>") for step in document.next)
    after = "".join(f"<p>{said}</p>" for said in (*steps, *map(escape, document.written)))
    lead = f"<p>{escape(document.lead)}</p>" if document.lead else ""
    return (
        f"<p><b>{escape(document.headline)}</b></p>{lead}"
        f"{first}<table><tbody>{answers}</tbody></table>{doubts}"
        f"{''.join(map(_table, shown))}{after}{''.join(map(_to_copy, document.to_copy))}"
    )


def finding_of(figure: Figure) -> str:
    """Return what stands above a figure, as HTML: what the figure shows, and how to read it."""
    return f"<p><b>{escape(figure.finding)}</b><br>{escape(figure.caption)}</p>"


def _statements(statements: Iterable[Statement], indent: str = "") -> Iterable[str]:
    for one in statements:
        yield (
            f"<tr><th {_LEFT}>{indent}{escape(one.label)}</th>"
            f"<td {_LEFT}>{escape(one.sentence)}</td></tr>"
        )
        yield from _statements(one.parts, indent + "&emsp;")


def _to_copy(one: ToCopy) -> str:
    notes = "".join(f"<p><small>{escape(note)}</small></p>" for note in one.notes)
    text = escape("\n".join(one.lines))
    return f'<p>{escape(one.label)}:</p><pre style="white-space: pre-wrap">{text}</pre>{notes}'


def _table(table: Table) -> str:
    headings = "".join(f"<th>{escape(heading)}</th>" for heading in table.headings)
    rows = "".join(map(_row, table.lines))
    notes = "".join(f"<p><small>{escape(note)}</small></p>" for note in table.notes)
    return (
        f"<table>{f'<caption>{escape(table.title)}</caption>' if table.title else ''}"
        f"<thead><tr>{headings}</tr></thead><tbody>{rows}</tbody></table>{notes}"
    )


def _row(line: Line) -> str:
    first, *others = line.cells
    marks = f"<br><small>{escape(', '.join(line.marks))}</small>" if line.marks else ""
    return f"<tr><th>{escape(first.text)}{marks}</th>{''.join(map(_cell, others))}</tr>"


def _cell(cell: Cell) -> str:
    bounds = f"<br><small>{escape(cell.bounds)}</small>" if cell.bounds else ""
    return f"<td>{escape(cell.text)}{bounds}</td>"
