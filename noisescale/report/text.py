# SPDX-License-Identifier: Apache-2.0
"""A document in a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from io import StringIO

from rich import box
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.padding import Padding
from rich.table import Table as Grid
from rich.text import Text

from noisescale.printable import printable
from noisescale.refusal import Refusal
from noisescale.report.document import Cell, Document, Statement, Table
from noisescale.report.numbers import plural

LEAST_WIDTH = 40
"""Characters of the narrowest terminal that a document is written for."""


def text_of(document: Document, *, details: bool = False, more: str = "") -> Group:
    """Return all parts of a document in reading order.

    Args:
        document: What to show.
        details: Whether to add the tables of details and the assumptions.
        more: How to get these if they are left out: "add --details".
    """
    found: list[RenderableType] = [Text(printable(document.headline), "bold")]
    if document.lead:
        found.append(Text(printable(document.lead)))
    if document.summary is not None:
        found += [Text(""), Compact(document.summary)]
    if document.answers:
        found += [Text(""), statements_of(document.answers)]
    left_out = [table for table in document.tables if table.detail and not details]
    found += [Section(table) for table in document.tables if details or not table.detail]
    if document.doubts:
        found += bullets("Warnings", document.doubts, "! ", "bold")
    if details and document.assumptions:
        found += bullets("Assumptions", document.assumptions, "- ")
    if document.next:
        lines = [line for step in document.next for line in step.split("\n")]
        found += [Text(""), *map(_whole, lines)]
    if document.written:
        found += [Text(""), *map(_whole, document.written)]
    if more and not details and (left_out or document.assumptions):
        counts = {"table": len(left_out), "assumption": len(document.assumptions)}
        parts = ", ".join(plural(n, name) for name, n in counts.items() if n)
        found.append(Text(f"\nMore: {parts}: {more}", "dim"))
    for one in document.to_copy:
        found += [Text(""), Text(printable(one.label), "dim"), *map(_whole, one.lines)]
        found += bullets("", one.notes, "- ")[2:] if one.notes else ()
    return Group(*found)


def print_document(console: Console, content: RenderableType) -> None:
    """Print a document. A path or a command that is longer than a line stays whole.

    To a file or a pipe no spaces are printed at the ends of lines.
    """
    if console.is_terminal or console.is_jupyter:
        console.print(content, crop=False)
    else:
        console.file.write(plain(content, max(console.width, LEAST_WIDTH)))


def plain(content: RenderableType, width: int) -> str:
    """Render as plain text, without colours and without spaces at the ends of lines."""
    if width < LEAST_WIDTH:
        raise Refusal("width", f"be at least {LEAST_WIDTH}", repr(width), "Pass 80.")
    file = StringIO()
    # In a notebook rich would show the content there and write nothing to the file.
    console = Console(
        file=file, width=width, color_system=None, legacy_windows=False, force_jupyter=False
    )
    console.print(content, crop=False)
    return "\n".join(line.rstrip() for line in file.getvalue().splitlines()) + "\n"


def statements_of(statements: Iterable[Statement]) -> Grid:
    """Return a line for each statement, and for its parts, indented. A verdict is in bold."""
    grid = Grid.grid(padding=(0, 2, 0, 0))
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    _add(grid, statements, "")
    return grid


def _add(grid: Grid, statements: Iterable[Statement], indent: str) -> None:
    for one in statements:
        style = "bold" if one.label == "Verdict" else ""
        grid.add_row(Text(printable(indent + one.label)), Text(printable(one.sentence), style))
        _add(grid, one.parts, indent + "  ")


class Compact:
    """A small table without a title: a line for each row, its bounds in parentheses.

    In a terminal that is too narrow, bounds and marks are in lines of their own.
    """

    def __init__(self, table: Table) -> None:
        self.table = table

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield the compact layout if it fits."""
        lines = [[*map(printable, self.table.headings)]]
        for line in self.table.lines:
            lines.append([*map(_in_a_line, line.cells)])
            if line.marks:
                lines[-1][1] += f", {', '.join(map(printable, line.marks))}"
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        gap = min(3, (options.max_width - sum(widths)) // (len(widths) - 1))
        if gap < 1:
            yield Section(self.table)
            return
        grid = Grid.grid(padding=(0, gap, 0, 0), pad_edge=False)
        for place in range(len(widths)):
            grid.add_column(justify="left" if place else "right", no_wrap=True)
        for k, cells in enumerate(lines):
            grid.add_row(*(Text(cell, "" if k else "dim") for cell in cells))
        yield grid
        yield from (Text(printable(note), style="dim") for note in self.table.notes)


def _in_a_line(cell: Cell) -> str:
    around = f" ({cell.bounds.replace('–', ' to ')})" if cell.bounds else ""
    return printable(f"{cell.text}{around}")


class Section:
    """A table under its title. Bounds and marks are in a second, dim line of each row.

    If the table is too wide for the terminal, its last columns stand below the first ones, each
    time beside the names of the rows. No number and no range is ever cut.
    """

    def __init__(self, table: Table) -> None:
        self.table = table

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield the widest layout that fits."""
        if self.table.title:
            yield Text("")
            yield Text(printable(self.table.title), style="bold")
        columns, width = self._columns(), options.max_width
        gap = 1 if _space(columns, 1) <= width < _space(columns, 2) else 2
        while columns:
            shown = 2
            while shown < len(columns) and _space(columns[: shown + 1], gap) <= width:
                shown += 1
            yield _grid(columns[:shown], gap)
            columns = columns[:1] + columns[shown:] if shown < len(columns) else []
            if columns:
                yield Text("")
        yield from (Text(printable(note), style="dim") for note in self.table.notes)

    def _columns(self) -> list[list[Text]]:
        """Return headings and cells, in a list for each column."""
        headings = map(printable, self.table.headings)
        lines = [[Text(heading.replace("-", "-\n").replace(" ", "\n")) for heading in headings]]
        for line in self.table.lines:
            style = "bold" if line.marks else ""
            name = "\n".join(map(printable, [line.cells[0].text, *line.marks]))
            cells = (_cell(cell, style) for cell in line.cells[1:])
            lines.append([Text(name, style=style), *cells])
        return [list(column) for column in zip(*lines, strict=True)]


def bullets(
    title: str, sentences: Sequence[str], mark: str, style: str = ""
) -> list[RenderableType]:
    """Return sentences under a title, each with a mark before it."""
    grid = Grid.grid()
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")  # a path may be longer than a line
    for sentence in sentences:
        grid.add_row(Text(mark, style=style), Text(printable(sentence)))
    return [Text(""), Text(title, style="bold"), Padding(grid, (0, 0, 0, 1))]


def _whole(line: str) -> Text:
    return Text(printable(line), no_wrap=True, overflow="ignore")


def _cell(cell: Cell, style: str) -> Text:
    text = Text(printable(cell.text), style=style)
    if cell.bounds:
        text.append("\n" + cell.bounds, style="not bold dim")
    return text


def _space(columns: Sequence[Sequence[Text]], gap: int) -> int:
    """Return the characters that columns take beside each other."""
    return sum(map(_width, columns)) + gap * (len(columns) - 1)


def _grid(columns: Sequence[Sequence[Text]], gap: int) -> Grid:
    padding = (0, gap - 1, 0, 0)  # The box itself takes a column more.
    grid = Grid(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=padding)
    grid.header_style = ""
    for heading, *_ in columns:
        grid.add_column(heading, justify="right", overflow="fold", vertical="top")
    for cells in zip(*(cells for _, *cells in columns), strict=True):
        grid.add_row(*cells)
    return grid


def _width(column: Iterable[Text]) -> int:
    return max(len(line) for text in column for line in text.plain.splitlines() or [""])
