# SPDX-License-Identifier: Apache-2.0
"""Lines of CSV files, and what can be wrong with any such file."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from pathlib import Path

from noisescale.printable import printable


def csv_lines(path: Path) -> Iterator[tuple[int, list[str]]]:
    """Yield the number and the cells of each line that is not blank, the names of columns first.

    Raises:
        ValueError: If the file is no text, two columns have one name, or a line has not as many
            cells as the first.
        OSError: If it cannot be read.
    """
    if path.is_dir():
        raise ValueError(
            f"`{printable(path)}` must be a CSV file, got a folder. Name the file in it."
        )
    # Spreadsheets may begin a file with the mark that "-sig" is for.
    with path.open(newline="", encoding="utf-8-sig") as file:
        reader = csv.reader(file)
        width = 0
        try:
            for cells in reader:
                if not width:
                    _refuse_repeated_names(path, cells)
                width = width or len(cells)
                if len(cells) not in (0, width):
                    raise ValueError(
                        f"`{printable(path)}` must have {width} cells in each line, got"
                        f" {len(cells)} in line {reader.line_num}. Mend or remove that line: it"
                        " may have a comma within a number, be damaged, or still be written."
                    )
                if cells:
                    yield reader.line_num, cells
        except (UnicodeDecodeError, csv.Error) as error:
            raise ValueError(
                f"`{printable(path)}` must be a CSV file in UTF-8, got {error} after line"
                f" {reader.line_num}. Name another file, or save it as CSV."
            ) from error


def _refuse_repeated_names(path: Path, names: Sequence[str]) -> None:
    """Spreadsheets leave columns without a name: those may repeat."""
    for name in dict.fromkeys(names):
        places = [str(number) for number, other in enumerate(names, 1) if other == name]
        if name and len(places) > 1:
            raise ValueError(
                f"`{printable(path)}` must name each column once, got {name!r} in columns"
                f" {', '.join(places[:-1])} and {places[-1]}. Remove or rename all but one of them."
            )
