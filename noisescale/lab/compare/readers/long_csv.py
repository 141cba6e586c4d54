# SPDX-License-Identifier: Apache-2.0
"""Trials in a CSV file with one line for each evaluation."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from noisescale.csv_lines import table
from noisescale.history.reading import refuse_metric
from noisescale.lab.compare.measurements import CLOCKS, Measurements, Trial
from noisescale.lab.compare.readers.found import (
    Found,
    broken_trial,
    is_number,
    measurements_of,
    number,
)
from noisescale.refusal import Refusal

GROUPS = ("submission", "workload", "study")
"""Columns that say where a trial belongs."""

TRIALS = (*GROUPS, "trial", "seed")
"""Columns that a file with one run does not have."""

NUMBERS = ("batch_size", "learning_rate")
"""Columns in which 0.1 and 0.10 are one."""

NAMES = (*GROUPS, "optimizer", "trial", "seed", *NUMBERS)
"""Columns that say which trial a line is of. Lines that are alike in all of them are one trial."""


class _Line(NamedTuple):
    number: int
    cells: Mapping[str, str]


def read_long_csv(path: Path, metric: str, submission: str | None) -> Found:
    """Read a CSV file with one line for each evaluation, in any order.

    | column | meaning |
    |---|---|
    | `step` | the optimizer step; needed |
    | the metric | needed; lines in which its cell is empty are no evaluations |
    | `submission`, `workload`, `study` | see `Trial` |
    | `optimizer` | its name; the submission, if there is no other |
    | `trial`, `seed` | the name or number of the training, and its seed |
    | `batch_size` | global, in examples |
    | `learning_rate` | the peak learning rate |
    | `examples`, `epochs`, `seconds` | what had passed until the evaluation |

    Other columns are hyperparameters if each has one number or word within every trial. Either all
    lines have a batch size, or none, and so for the learning rate. In a file with a column `trial`,
    a step that repeats is one of a resumed training: its last line counts. In other files it is
    refused.

    Args:
        path: The file.
        metric: The name of a column.
        submission: The submission of trials without a cell in a column `submission`; None for the
            column `optimizer`, if there is one.

    Raises:
        ValueError: If a column is missing, a cell that is needed has no number, or trials cannot be
            told apart.
        OSError: If the file cannot be read.
    """
    names, rows, cut = table(path, ends=True)
    lines = [_Line(at, dict(zip(names, cells, strict=True))) for at, cells in rows]
    others = [name for name in names if name and name not in ("step", metric, *NAMES, *CLOCKS)]
    if "step" not in names:
        raise Refusal(
            path,
            "have a column `step`",
            ", ".join(filter(None, names)),
            "Rename the column of the optimizer step.",
        )
    if metric not in names:
        refuse_metric(path, metric, _number_columns(lines, others))
    key = [name for name in NAMES if name in names]
    groups = _groups(lines, key)
    _refuse_schedules(path, lines, key)
    if "trial" not in key:
        _refuse_repetitions(path, groups, metric)
    settings = [name for name in others if all(len(_values(of, name)) < 2 for of in groups)]
    varying = [name for name in key if len({line.cells[name] for line in lines}) > 1]
    trials: list[Trial] = []
    errors: list[Exception] = []
    for group in groups:
        cells = group[0].cells
        parts = [cells[n] if n in GROUPS else f"{n}={cells[n]}" for n in varying]
        name = "/".join(parts) or path.stem
        given = cells.get("optimizer", "") if submission is None else submission
        given, workload = cells.get("submission") or given, cells.get("workload", "")
        try:
            _refuse_gap(path, group[0], {*varying} & {*NUMBERS})
            size, rate = (_number(path, group[0], each) for each in NUMBERS)
            measured = _measurements(f"{name} in {path}", path, group, metric, size)
        except ValueError as error:
            errors.append(error)
            trials.append(replace(broken_trial(name, error, given), workload=workload))
            continue
        trials.append(
            Trial(
                name,
                measured,
                given,
                workload,
                study=cells.get("study", ""),
                batch_size=size,
                learning_rate=rate,
                hyperparameters=MappingProxyType(_settings(group, ["seed", *settings])),
                optimizer=cells.get("optimizer", ""),
            )
        )
    if cut is not None:
        errors.append(cut)
        trials.append(broken_trial(f"the last line of {path.name}", cut))
    return Found(trials, lambda: _number_columns(lines, [*others, metric]), errors)


def _groups(lines: Sequence[_Line], key: Sequence[str]) -> list[list[_Line]]:
    """Return the lines of each trial."""
    groups: dict[tuple[float | str, ...], list[_Line]] = {}
    for line in lines:
        cells = (_value(line.cells[n]) if n in NUMBERS else line.cells[n] for n in key)
        groups.setdefault(tuple(cells), []).append(line)
    return list(groups.values())


def _measurements(
    where: str, path: Path, group: Sequence[_Line], metric: str, batch_size: float
) -> Measurements:
    """Return the evaluations of one trial."""
    evaluated = [line for line in group if line.cells[metric]]
    steps, values = ([_number(path, line, name) for line in evaluated] for name in ("step", metric))
    clocks = {name: [_number(path, line, name) for line in evaluated] for name in CLOCKS[1:]}
    return measurements_of(where, steps, values, batch_size=batch_size, **clocks)


def _number(path: Path, line: _Line, name: str) -> float:
    """Return the number in a cell; NaN if the cell is empty, or there is no such column."""
    text = line.cells.get(name, "")
    return number(text, path, line.number, name) if text else math.nan


def _refuse_repetitions(path: Path, groups: Iterable[Sequence[_Line]], metric: str) -> None:
    """Refuse two evaluations of one step: they may be of two trials."""
    for group in groups:
        seen: dict[str, _Line] = {}
        for line in group:
            first = seen.setdefault(line.cells["step"], line) if line.cells[metric] else line
            if first is not line:
                raise Refusal(
                    path,
                    "have one line for each step of a trial",
                    f"the step {line.cells['step']} in lines {first.number} and {line.number}",
                    "Add a column `trial` with the name or number of each line's trial.",
                )


def _refuse_gap(path: Path, line: _Line, names: Iterable[str]) -> None:
    """Refuse an empty cell where other lines have a number: it would make another trial."""
    for name in names:
        if not line.cells[name]:
            raise Refusal(
                name,
                "be in every line, or in none",
                "an empty cell",
                "Fill it in, or remove the line.",
                at=(path, line.number),
            )


def _refuse_schedules(path: Path, lines: Sequence[_Line], key: Sequence[str]) -> None:
    """Refuse learning rates that change along a trial: each would make a trial of its own."""
    if "learning_rate" not in key:
        return
    for group in _groups(lines, [name for name in key if name != "learning_rate"]):
        rates = {v for v in _values(group, "learning_rate") if isinstance(v, float)}
        steps = {line.cells["step"] for line in group}
        if len(rates) > 1 and len(steps) == len(group):
            raise Refusal(
                "learning_rate",
                "be one number for each trial",
                f"{len(rates)} numbers from {min(rates):g} to {max(rates):g} at different steps of"
                f" what may be one trial, in line {group[0].number} of {path} and others",
                "Write the peak learning rate into each line of a trial. If these are several"
                " trials, give each its own name in a column `trial`.",
            )


def _number_columns(lines: Sequence[_Line], names: Iterable[str]) -> list[str]:
    """Return the columns that have numbers alone."""
    cells = {name: [line.cells[name] for line in lines if line.cells[name]] for name in names}
    return [name for name, texts in cells.items() if texts and all(map(is_number, texts))]


def _settings(group: Sequence[_Line], names: Iterable[str]) -> dict[str, float | str]:
    """Return the numbers and the words of columns."""
    return {name: value for name in names for value in _values(group, name)}


def _values(group: Sequence[_Line], name: str) -> set[float | str]:
    """Return the numbers and words of a column; none if there is no such column."""
    return {_value(cell) for line in group if (cell := line.cells.get(name, ""))}


def _value(cell: str) -> float | str:
    """Return the number of a cell, or its word. What is no number is not equal to itself."""
    return float(cell) if is_number(cell) and cell.lower() != "nan" else cell
