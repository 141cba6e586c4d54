# SPDX-License-Identifier: Apache-2.0
"""Read the lines of CSV files, refuse damaged files, and write whole ones."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any
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
        yield from valid_lines(path, file)


def write_csv(path: Path, lines: Iterable[Sequence[Any]]) -> None:
    """Write a CSV file. It is never left half-written, and several processes may write it."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(lines)
    written = path.with_name(f"{path.name}.{uuid4().hex[:8]}.part")
    written.write_text(text.getvalue())
    written.replace(path)


def valid_lines(
    path: Path, text: Iterable[str], width: int = 0, before: int = 0
) -> Iterator[tuple[int, list[str]]]:
    """Yield the number and the cells of lines. `before` lines of `width` cells came before.

    Raises:
        ValueError: See `csv_lines`.
    """
    reader = csv.reader(text)
    try:
        for cells in reader:
            line = before + reader.line_num
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
                    at=(path, line),
                )
            if cells:
                yield line, cells
    except (UnicodeDecodeError, csv.Error) as error:
        raise Refusal(
            path,
            "be a CSV file in UTF-8",
            f"{error} after line {before + reader.line_num}",
            "Name another file, or save this one as CSV.",
        ) from error


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
