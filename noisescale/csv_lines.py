# SPDX-License-Identifier: Apache-2.0
"""Read the lines of CSV files, refuse damaged files, and write whole ones."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from uuid import uuid4

from noisescale.refusal import FileRefusal, Refusal


def csv_lines(path: Path) -> Iterator[tuple[int, list[str]]]:
    """Yield the number and the cells of each line that is not blank. The first has the names.

    Raises:
        ValueError: If the file is not text, two columns have the same name, or a line has more or
            fewer cells than the first line.
        OSError: If the file cannot be read.
    """
    if path.is_dir():
        raise Refusal(path, "be a CSV file", "a folder", "Name a file in the folder.")
    if not path.exists():
        raise FileRefusal(path, "be a CSV file", "a path that does not exist", "Check it.")
    # Spreadsheets may begin a file with the mark that "-sig" is for.
    with path.open(newline="", encoding="utf-8-sig") as file:
        reader = csv.reader(file)
        width = 0
        try:
            for cells in reader:
                if not width:
                    _refuse_other_separators(path, cells)
                    _refuse_repeated_names(path, cells)
                width = width or len(cells)
                if len(cells) not in (0, width):
                    raise Refusal(
                        path,
                        f"have {width} cells in each line",
                        len(cells),
                        "The line may have a comma within a number, be damaged, or not be complete"
                        " yet. Correct or remove it.",
                        at=(path, reader.line_num),
                    )
                if cells:
                    yield reader.line_num, cells
        except (UnicodeDecodeError, csv.Error) as error:
            raise Refusal(
                path,
                "be a CSV file in UTF-8",
                f"{error} after line {reader.line_num}",
                "Name another file, or save this one as CSV.",
            ) from error


class CsvTable(NamedTuple):
    """A CSV file."""

    names: list[str]
    lines: list[tuple[int, list[str]]]
    """The cells of each line below the names, with the number of the line."""
    cut: Refusal | None
    """The error of a last line that has no end, as of a file that was not written to its end."""


def table(path: Path, *, ends: bool = False) -> CsvTable:
    """Read a CSV file. A last line that is cut off is left out.

    Args:
        path: The file.
        ends: Whether each line of such a file ends with the end of a line. The last number of a
            line without this end may be cut off.

    Raises:
        ValueError: If the file is empty or damaged.
        OSError: If the file cannot be read.
    """
    found: list[tuple[int, list[str]]] = []
    cut = None
    try:
        found += csv_lines(path)
    except Refusal as error:
        last = path.read_bytes().count(b"\n") + 1  # a line after the last end of a line
        if not found or error.at is None or error.at[1] != last:
            raise
        cut = error
    (_, names), *lines = found or [(0, [])]
    if not names:
        raise Refusal(path, "have a line of column names", "an empty file", "Name another file.")
    if ends and lines and cut is None and not path.read_bytes().endswith((b"\n", b"\r")):
        cut = Refusal(
            path,
            "end with the end of a line",
            "a last line that may be cut off",
            "If the line is whole, end it, as a text editor does.",
            at=(path, lines.pop()[0]),
        )
    return CsvTable(names, lines, cut)


def write_csv(path: Path, lines: Iterable[Sequence[Any]]) -> None:
    """Write a CSV file. It is never left half-written, and several processes may write it."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(lines)
    written = path.with_name(f"{path.name}.{uuid4().hex[:8]}.part")
    written.write_text(text.getvalue())
    written.replace(path)


def _refuse_other_separators(path: Path, names: Sequence[str]) -> None:
    """Refuse semicolons, which spreadsheets of some countries write, and tabs."""
    found = [sign for sign in ";\t" if len(names) == 1 and sign in names[0]]
    if found:
        separator = {";": "semicolons", "\t": "tabs"}[found[0]]
        raise Refusal(
            path,
            "have commas between its cells",
            f"{separator} in {names[0]!r}",
            "Save it with commas, and with points in numbers.",
        )


def _refuse_repeated_names(path: Path, names: Sequence[str]) -> None:
    """Refuse a name that two columns have. Empty names of a spreadsheet may repeat."""
    for name in dict.fromkeys(names):
        places = [str(number) for number, other in enumerate(names, 1) if other == name]
        if name and len(places) > 1:
            raise Refusal(
                path,
                "name each column once",
                f"{name!r} in columns {', '.join(places[:-1])} and {places[-1]}",
                "Remove or rename all but one column.",
            )
