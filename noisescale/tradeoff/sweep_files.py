# SPDX-License-Identifier: Apache-2.0
"""Sweeps and branched runs in CSV files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import NamedTuple

from noisescale.csv_lines import csv_lines
from noisescale.refusal import Refusal


class Sweep(NamedTuple):
    """One curve: what was measured at each batch size."""

    batch_sizes: list[float]
    measured: list[float]
    """Steps to the goal, or losses."""


def read_sweeps(
    path: str | PathLike[str],
    *,
    measured: str = "steps",
    batch_size_column: str | None = None,
    measured_column: str | None = None,
    by: str | None = None,
) -> dict[str, Sweep]:
    """Read the curves of a CSV file, one for each value of the column `by`.

    Args:
        path: Of a file with a line of column names.
        measured: What was measured at each batch size: "steps" or "loss".
        batch_size_column: Default: the only column whose name begins with "batch_size".
        measured_column: Default: the only column whose name begins with `measured`.
        by: Column whose values name the curves (model, goal). Default: all lines are one curve.

    Raises:
        ValueError: If a column is missing or ambiguous, a cell is not a number, or the file has
            several curves and `by` is not given.
        OSError: If the file cannot be read.
    """
    path = Path(path)
    (_, names), *rows = list(csv_lines(path)) or [(0, [])]
    lines = [(number, dict(zip(names, cells, strict=True))) for number, cells in rows]
    if not lines:
        raise Refusal(
            path,
            "have a line of column names and lines of numbers",
            f"{len(names)} names and no numbers",
            f"Give columns batch_size and {measured}.",
        )
    size_name = _column(path, names, "batch_size", batch_size_column)
    measured_name = _column(path, names, measured, measured_column)
    if by is not None and by not in names:
        raise Refusal(
            "by",
            f"be a column of {path}",
            repr(by),
            f"It has {', '.join(names)}.",
        )
    if by is None:
        _refuse_several_curves(path, names, [line for _, line in lines])
    sweeps: dict[str, Sweep] = {}
    for number, line in lines:
        sweep = sweeps.setdefault(line[by] if by else "", Sweep([], []))
        sweep.batch_sizes.append(_number(path, number, size_name, line[size_name]))
        sweep.measured.append(_number(path, number, measured_name, line[measured_name]))
    return sweeps


def _column(path: Path, names: Sequence[str], begins: str, given: str | None) -> str:
    matching = [name for name in names if name == given or (not given and name.startswith(begins))]
    if begins in matching and not given:
        return begins
    if len(matching) == 1:
        return matching[0]
    wanted = f"named {given!r}" if given else f"that begins with {begins!r}"
    raise Refusal(
        path,
        f"have one column {wanted}",
        ", ".join(names) or "none",
        f"Rename the right column to {begins!r}, and separate columns by commas.",
    )


def _refuse_several_curves(
    path: Path, names: Sequence[str], lines: Sequence[Mapping[str, str]]
) -> None:
    for name in names:
        values = {line[name] for line in lines}
        if len(values) > 1 and not any(_is_number(value) for value in values):
            raise Refusal(
                "by",
                f"name the column that separates the curves of {path}",
                f"none for {len(values)} values of {name!r}",
                f"Give a file of one curve, or pass `--by {name}` to `noisescale fit`.",
            )


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _number(path: Path, line: int, name: str, text: str) -> float:
    if not _is_number(text):
        raise Refusal(
            name,
            "be a number",
            repr(text),
            "Leave out runs that did not reach the goal.",
            at=(path, line),
        )
    return float(text)
