# SPDX-License-Identifier: Apache-2.0
"""A prediction or a fit of a sweep in a terminal: answers, tables, warnings, assumptions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from io import StringIO

from rich import box
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.padding import Padding
from rich.table import Table as Grid
from rich.text import Text

from noisescale.prediction.prediction import PredictionRecord
from noisescale.printable import printable
from noisescale.refusal import Refusal
from noisescale.report.numbers import plural
from noisescale.report.sweep_tables import fit_headline, fit_table
from noisescale.report.tables import Cell, Table, headline, tables
from noisescale.tradeoff.fit import TradeoffFit


def as_text(p: PredictionRecord, width: int = 100, *, details: bool = True) -> str:
    """Return the report as plain text, `width` characters wide."""
    return plain(report(p, details=details), width)


def print_report(
    p: PredictionRecord, console: Console | None = None, *, details: bool = True, more: str = ""
) -> None:
    """Print the report to a terminal.

    Args:
        p: The prediction.
        console: The console to print to. Default: standard output.
        details: Whether to print the tables and assumptions, too.
        more: If details are left out, how to get them: "add --details".
    """
    console = console or Console()
    console.print(report(p, details=details))
    if more and not details:
        left_out = plural(len(p.assumptions), "assumption")
        console.print(Text(f"\nTables of batch sizes and devices, {left_out}: {more}", "dim"))


def fit_as_text(
    fit: TradeoffFit,
    name: str = "",
    width: int = 100,
    *,
    unit: str = "examples",
    optimal_batch_size: float | None = None,
    confidence: float = 0.95,
) -> str:
    """Return the report on a sweep as plain text, `width` characters wide.

    Args:
        fit: The fit from `fit_tradeoff`.
        name: The name of the sweep, for example its file.
        width: The width in characters, at least 40.
        unit: The unit of batch sizes.
        optimal_batch_size: B_opt of Zhang et al. 2024: up to this batch size scaling counts as
            perfect. With it, the report has the batch size that costs 20 % more than perfect
            scaling.
        confidence: Coverage of the intervals.
    """
    return plain(fit_report(fit, name, unit, optimal_batch_size, confidence), width)


def plain(content: RenderableType, width: int) -> str:
    """Render as plain text, without colours and without spaces at the ends of lines."""
    if width < 40:
        raise Refusal("width", "be at least 40", repr(width), "Pass 80.")
    file = StringIO()
    # In a notebook rich would show the content there and write nothing to the file.
    console = Console(
        file=file, width=width, color_system=None, legacy_windows=False, force_jupyter=False
    )
    console.print(content)
    return "\n".join(line.rstrip() for line in file.getvalue().splitlines()) + "\n"


def report(p: PredictionRecord, *, details: bool) -> Group:
    """Return all parts in reading order: answers, tables, warnings, assumptions."""
    found: list[RenderableType] = [pairs(headline(p))]
    if details:
        found += map(Section, tables(p))
    found += _warnings(p.warnings)
    if details:
        found += listed("Assumptions", p.assumptions, "- ")
    return Group(*found)


def fit_report(
    fit: TradeoffFit, name: str, unit: str, optimal_batch_size: float | None, confidence: float
) -> Group:
    """Return all parts of the report on a sweep. For arguments see `fit_as_text`."""
    return Group(
        pairs(fit_headline(fit, unit, optimal_batch_size, confidence)),
        Section(fit_table(fit, name, unit)),
        *_warnings(fit.warnings),
    )


def _warnings(sentences: Sequence[str]) -> list[RenderableType]:
    return listed("Warnings", sentences, "! ", "bold") if sentences else []


def pairs(lines: Iterable[tuple[str, str]]) -> Grid:
    """Return lines of a name and its text. The text is bold, unless the name is indented."""
    grid = Grid.grid(padding=(0, 2, 0, 0))
    grid.add_column(no_wrap=True)
    grid.add_column()
    for name, said in lines:
        grid.add_row(Text(name), Text(said, style="" if name.startswith(" ") else "bold"))
    return grid


class Section:
    """A table under its title. Bounds and marks are in a second, dim line of each row.

    If the table is too wide for the terminal, each bound takes a line. Nothing is ever cut off.
    """

    def __init__(self, table: Table) -> None:
        self.table = table

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield the widest layout that fits."""
        yield Text("")
        yield Text(self.table.title, style="bold")
        for gap, dash in ((2, "–"), (1, "–"), (2, "–\n"), (1, "–\n")):
            columns = self._columns(dash)
            if sum(map(_width, columns)) + gap * (len(columns) - 1) <= options.max_width:
                break
        padding = (0, gap - 1, 0, 0)  # The box itself takes a column more.
        grid = Grid(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=padding)
        grid.header_style = ""
        for heading, *_ in columns:
            grid.add_column(heading, justify="right", overflow="fold", vertical="top")
        for cells in zip(*(cells for _, *cells in columns), strict=True):
            grid.add_row(*cells)
        yield grid
        yield from (Text(note, style="dim") for note in self.table.notes)

    def _columns(self, dash: str) -> list[list[Text]]:
        """Return headings and cells, in a list for each column."""
        lines = [
            [Text(heading.replace("-", "-\n").replace(" ", "\n")) for heading in
             self.table.headings]
        ]  # fmt: skip
        for line in self.table.lines:
            style = "bold" if line.marks else ""
            named = Text("\n".join([line.cells[0].text, *line.marks]), style=style)
            lines.append([named, *(_cell(cell, style, dash) for cell in line.cells[1:])])
        return [list(column) for column in zip(*lines, strict=True)]


def listed(
    title: str, sentences: Iterable[str], mark: str, style: str = ""
) -> list[RenderableType]:
    """Return sentences under a title, each with a mark before it."""
    grid = Grid.grid()
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")  # a path may be longer than a line
    for sentence in sentences:
        grid.add_row(Text(mark, style=style), Text(printable(sentence)))
    return [Text(""), Text(title, style="bold"), Padding(grid, (0, 0, 0, 1))]


def _cell(cell: Cell, style: str, dash: str) -> Text:
    text = Text(cell.text.replace("–", dash), style=style)
    if cell.bounds:
        text.append("\n" + cell.bounds.replace("–", dash), style="not bold dim")
    return text


def _width(column: Iterable[Text]) -> int:
    return max(len(line) for text in column for line in text.plain.splitlines() or [""])
