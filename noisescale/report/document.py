# SPDX-License-Identifier: Apache-2.0
"""What an answer says: a document, which a terminal, a page and a notebook show alike."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from noisescale.bounded import Bounded
from noisescale.report.numbers import number, rough, value_from_bounds
from noisescale.report.records import fields_of, finite

Status = Literal["under way", "done"]
Verdict = Literal["yes", "probably", "unknown"]
Basis = Literal["measured", "timed", "assumed"]


@dataclass(frozen=True)
class Statement:
    """One line of an answer: what it is about, and a sentence."""

    label: str
    sentence: str
    bounds: Bounded | None = None
    """The number that the sentence is about, with its bounds."""
    verdict: Verdict | None = None
    """How sure the sentence is. None if it gives no advice."""
    basis: Basis | None = None
    """What the sentence rests on."""
    parts: Sequence[Statement] = ()
    """Lines that belong to this one and stand below it."""


class Cell(NamedTuple):
    """A value and its bounds."""

    text: str
    bounds: str = ""


@dataclass(frozen=True)
class Line:
    """A row of a table: its cells, and marks such as "this run"."""

    cells: Sequence[Cell]
    marks: Sequence[str] = ()


@dataclass(frozen=True)
class Table:
    """A title, headings and lines. The first cell of a line is its name."""

    title: str
    headings: Sequence[str]
    lines: Sequence[Line]
    notes: Sequence[str] = ()
    detail: bool = False
    """Whether a terminal leaves the table out unless it is asked for details."""


class Figure(NamedTuple):
    """A figure as a page shows it: the page writes the title, which then wraps at any width."""

    id: str
    heading: str
    finding: str
    """What the figure shows, in a sentence. Plain text."""
    caption: str
    """How to read the figure. Plain text."""
    drawing: dict[str, Any]
    """`data` and `layout` for plotly."""

    @property
    def height(self) -> float:
        """The pixels that the drawing takes at a usual width."""
        return float(self.drawing["layout"]["height"])


class ToCopy(NamedTuple):
    """Text for another program or page."""

    label: str
    """What the text is for."""
    lines: Sequence[str]
    """The text. No line of it is ever wrapped."""
    notes: Sequence[str] = ()
    """What a user has to know of it, in whole sentences."""


@dataclass(frozen=True)
class Document:
    """What an answer says, from top to bottom. All of it is plain text."""

    title: str
    """The title of the browser's window."""
    headline: str
    """The answer in one sentence."""
    answers: Sequence[Statement]
    lead: str = ""
    """What the answer means for the reader, in a second line below the headline."""
    summary: Table | None = None
    """Three to five rows that stand below the headline, each in a line of its own."""
    tables: Sequence[Table] = ()
    figures: Callable[[], Sequence[Figure]] = field(default=tuple)
    """Draw the figures. Only a page needs them, and plotly with them."""
    doubts: Sequence[str] = ()
    """Reasons not to trust the answer, in whole sentences."""
    assumptions: Sequence[str] = ()
    how_to_read: str = ""
    status: Status = "done"
    written: Sequence[str] = ()
    """Files that were written, each with what it is: "Report: a.html"."""
    next: Sequence[str] = ()
    """What to do next: sentences that end with a command, or have it in a line of its own."""
    to_copy: Sequence[ToCopy] = ()
    """What stands at the end, to be copied."""

    def to_dict(self) -> dict[str, Any]:
        """Return headline, lead, status, statements, doubts and next steps in builtins."""
        said = {"answers": [*map(_as_dict, self.answers)]}
        kept = fields_of(self, "headline", "lead", "status", "doubts", "next")
        found: dict[str, Any] = finite({**kept, **said})
        return found


def _as_dict(one: Statement) -> dict[str, Any]:
    parts = {"parts": [*map(_as_dict, one.parts)]} if one.parts else {}
    return fields_of(one, "label", "sentence", "bounds", "verdict", "basis") | parts


def cell_of(found: Bounded | str, *, whole: bool = False) -> Cell:
    """Return a value with its bounds as a cell of a table; in whole numbers, such as of steps."""
    if isinstance(found, str):
        return Cell(found)
    band = value_from_bounds(found)
    if not band.known:
        return Cell("")

    def number_text(value: float, write: Callable[[float], str]) -> str:
        return f"{value:.0f}" if whole and value < 999.5 else write(value)

    low, high = number_text(band.low, rough), number_text(band.high, rough)
    around = f">= {low}" if math.isinf(band.high) else f"{low}–{high}"
    if not math.isfinite(band.value):
        return Cell(around)
    return Cell(number_text(band.value, number), "" if low == high else around)
