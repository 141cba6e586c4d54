# SPDX-License-Identifier: Apache-2.0
"""A prediction as the output of a notebook's cell: the answers, and the batch sizes in a table."""

from __future__ import annotations

from html import escape

from noisescale.prediction.prediction import PredictionRecord
from noisescale.report.tables import Cell, Line, headline, tables

_LEFT = 'style="text-align: left; white-space: normal"'
"""Notebooks align cells to the right."""


def as_fragment(p: PredictionRecord) -> str:
    """Return HTML without styles of its own, so that it suits light and dark notebooks."""
    answers = "".join(
        f"<tr><th {_LEFT}>{'&emsp;' if name.startswith(' ') else ''}{escape(name.strip())}</th>"
        f"<td {_LEFT}>{escape(said)}</td></tr>"
        for name, said in headline(p)
    )
    sizes = tables(p)[0]
    headings = "".join(f"<th>{escape(heading)}</th>" for heading in sizes.headings)
    rows = "".join(map(_row, sizes.lines))
    notes = "".join(f"<p><small>{escape(note)}</small></p>" for note in sizes.notes)
    warnings = "".join(f"<p><b>Warning:</b> {escape(warning)}</p>" for warning in p.warnings)
    return (
        f"<table><tbody>{answers}</tbody></table>{warnings}"
        f"<table><caption>{escape(sizes.title)}</caption>"
        f"<thead><tr>{headings}</tr></thead><tbody>{rows}</tbody></table>{notes}"
    )


def _row(line: Line) -> str:
    first, *others = line.cells
    marks = f"<br><small>{escape(', '.join(line.marks))}</small>" if line.marks else ""
    return f"<tr><th>{escape(first.text)}{marks}</th>{''.join(map(_cell, others))}</tr>"


def _cell(cell: Cell) -> str:
    bounds = f"<br><small>{escape(cell.bounds)}</small>" if cell.bounds else ""
    return f"<td>{escape(cell.text)}{bounds}</td>"
