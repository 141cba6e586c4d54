# SPDX-License-Identifier: Apache-2.0
"""Trials in a CSV file with one line for each evaluation."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from noisescale.csv_lines import table
from noisescale.history.reading import refuse_metric
from noisescale.lab.compare.measurements import Measurements, Trial
from noisescale.lab.compare.readers.found import (
    Found,
    broken_trial,
    is_number,
    measurements_of,
    number,
)
from noisescale.lab.compare.readers.hyperparameters import (
    LEARNING_RATES,
    setting_in_words,
)
from noisescale.refusal import Refusal

STEPS = ("step", "steps", "global_step")
TRIALS = ("trial", "run", "seed")
SEED = {"seed"}
"""The columns of trials that are hyperparameters too."""
EPOCHS = ("epoch", "epochs")
GROUPS = ("submission", "workload", "study")
"""Columns of text that say where a trial belongs."""


class _Line(NamedTuple):
    number: int
    cells: Mapping[str, str]


def read_long_csv(path: Path, metric: str, submission: str | None) -> Found:
    """Read a CSV file with one line for each evaluation, in any order.

    | column | meaning |
    |---|---|
    | `step`, `steps` or `global_step` | the optimizer step; needed |
    | the metric | needed; lines in which its cell is empty are no evaluations |
    | `submission`, `workload`, `study` | see `Trial` |
    | `optimizer` | its name; the submission, if there is no other |
    | `trial`, `run` or `seed` | the name or number of the trial |
    | `batch_size` | global, in examples |
    | `learning_rate`, `lr` or `initial_learning_rate` | the peak learning rate |
    | `examples`, `epoch` or `epochs`, `seconds` | what had passed until the evaluation |

    Of several names the first that is there counts. Lines with the same submission, workload,
    study, optimizer, trial, batch size and learning rate are one trial. Other columns of
    numbers or words are hyperparameters if each is constant within every trial.

    If several lines of a trial still have the same step, other columns tell trials apart, for
    example `momentum`: those with different values at one step, in which every value occurs at two
    steps or more. In a file with a column for the trial, steps that repeat after this are those of
    a resumed training: the last line counts.

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
    return _Evaluations(path, metric).read(submission)


class _Evaluations:
    """The lines of one file, and what its columns mean."""

    def __init__(self, path: Path, metric: str) -> None:
        names, rows, self.cut = table(path, ends=True)
        self.path, self.metric = path, metric
        self.lines = [_Line(at, dict(zip(names, cells, strict=True))) for at, cells in rows]
        names = [name for name in names if name]  # an index of pandas has none
        self.step, self.epoch, self.trial, self.rate = (
            _first_name(names, of) for of in (STEPS, EPOCHS, TRIALS, LEARNING_RATES)
        )
        if not self.step:
            raise Refusal(
                path,
                "have a column `step`",
                ", ".join(names),
                "Rename the column of the optimizer step.",
            )
        key = (*GROUPS, "optimizer", self.trial, "batch_size", self.rate)
        self.key = [name for name in key if name in names]
        """Columns of which each trial has one value."""
        clocks = {"examples": "examples", "epochs": self.epoch, "seconds": "seconds"}
        self.clocks = {clock: name for clock, name in clocks.items() if name in names}
        known = (*self.key, self.step, metric, *self.clocks.values())
        self.others = [name for name in names if name not in known]
        if metric not in names:
            refuse_metric(path, metric, _number_columns(self.lines, self.others))

    def read(self, submission: str | None) -> Found:
        """Return the trials of the file."""
        self._refuse_schedules()
        groups = self._groups()
        if any(map(self._find_repetition, groups)):
            groups = self._separate(groups)
        hyperparameters = [
            name
            for name in [*self.others, *SEED.intersection([self.trial])]
            if all(len(_values(group, name)) <= 1 for group in groups)
        ]
        varying = [n for n in self.key if len({line.cells[n] for line in self.lines}) > 1]
        trials: list[Trial] = []
        errors: list[Exception] = []
        for group in groups:
            cells = group[0].cells
            name = "/".join(_part(n, cells[n]) for n in varying) or self.path.stem
            given = cells.get("optimizer", "") if submission is None else submission
            shared = {name: _settings(group, name) for name in hyperparameters}
            measured, fault = Measurements([], []), ""
            size = rate = math.nan
            try:
                self._refuse_gap(group, groups)
                size = self._number(group[0], "batch_size")
                rate = self._number(group[0], self.rate)
                measured = self._measurements_of(group, name, size)
            except ValueError as error:
                errors.append(error)
                fault = str(error)
            trials.append(
                Trial(
                    name,
                    measured,
                    submission=cells.get("submission") or given,
                    workload=cells.get("workload", ""),
                    study=cells.get("study", ""),
                    batch_size=size,
                    learning_rate=rate,
                    hyperparameters=MappingProxyType({n: v.pop() for n, v in shared.items() if v}),
                    optimizer=cells.get("optimizer", ""),
                    fault=fault,
                )
            )
        if self.cut is not None:
            errors.append(self.cut)
            trials.append(broken_trial(f"the last line of {self.path.name}", self.cut))
        metrics = partial(_number_columns, self.lines, [*self.others, self.metric])
        return Found(trials, metrics, errors)

    def _measurements_of(self, group: Sequence[_Line], name: str, size: float) -> Measurements:
        """Return the evaluations of one trial."""
        evaluated = [line for line in group if line.cells[self.metric]]
        return measurements_of(
            f"{name} in {self.path}",
            [self._number(line, self.step) for line in evaluated],
            [self._number(line, self.metric) for line in evaluated],
            batch_size=size,
            **{of: [self._number(e, n) for e in evaluated] for of, n in self.clocks.items()},
        )

    def _number(self, line: _Line, name: str) -> float:
        """Return the number in a cell; NaN if the cell is empty, or there is no such column."""
        text = line.cells.get(name, "") if name else ""
        return number(text, self.path, line.number, name) if text else math.nan

    def _groups(self, without: str = "") -> list[list[_Line]]:
        groups: dict[tuple[str, ...], list[_Line]] = {}
        for line in self.lines:
            cells = (
                str(self._number(line, name))  # 0.1 and 0.10 are one
                if name in ("batch_size", self.rate) and is_number(line.cells[name])
                else line.cells[name]
                for name in self.key
                if name != without
            )
            groups.setdefault(tuple(cells), []).append(line)
        return list(groups.values())

    def _separate(self, groups: Sequence[Sequence[_Line]]) -> list[list[_Line]]:
        """Return the trials of groups in which steps repeat, by other columns."""
        self.key += [
            name
            for name in self.others
            if all(self._is_setting(group, name) for group in groups)
            and any(self._tells_apart(group, name) for group in groups)
        ]
        trials = self._groups()
        if self.trial:
            return trials  # which may have been resumed
        for first, again in filter(None, map(self._find_repetition, trials)):
            raise Refusal(
                self.path,
                "have one line for each step of a trial",
                f"the step {first.cells[self.step]} in lines {first.number} and {again.number}",
                "Add a column `trial` with the name or number of each line's trial.",
            )
        return trials

    def _find_repetition(self, group: Sequence[_Line]) -> tuple[_Line, _Line] | None:
        """Return two evaluations of one step, if there are any."""
        seen: dict[str, _Line] = {}
        for line in group:
            if line.cells[self.metric]:
                before = seen.setdefault(line.cells[self.step], line)
                if before is not line:
                    return before, line
        return None

    def _is_evaluated(self, group: Sequence[_Line]) -> bool:
        return any(line.cells[self.metric] for line in group)

    def _is_setting(self, group: Sequence[_Line], name: str) -> bool:
        """Return whether each value occurs at several steps, as no metric's does."""
        steps = _values_beside(group, name, self.step)
        return len(steps) == 1 or all(len(at) > 1 for at in steps.values())

    def _tells_apart(self, group: Sequence[_Line], name: str) -> bool:
        """Return whether lines of one step have several values."""
        return any(len(values) > 1 for values in _values_beside(group, self.step, name).values())

    def _refuse_gap(self, group: Sequence[_Line], groups: Sequence[Sequence[_Line]]) -> None:
        """Refuse evaluations without a cell with which they would be those of another group."""
        if not self._is_evaluated(group):
            return
        cells = group[0].cells
        for name in self.key:
            rest = [of for of in self.key if of != name]
            if not cells[name] and any(
                other[0].cells[name]
                and all(other[0].cells[of] == cells[of] for of in rest)
                and self._is_evaluated(other)
                for other in groups
            ):
                raise Refusal(
                    name,
                    "be in every line of a trial, or in none",
                    "an empty cell",
                    "Fill it in, or remove the line.",
                    at=(self.path, group[0].number),
                )

    def _refuse_schedules(self) -> None:
        """Refuse learning rates that change along a trial: each would make a trial of its own."""
        for group in self._groups(without=self.rate) if self.rate else ():
            cells = {line.cells[self.rate] for line in group}
            rates = {float(cell) for cell in cells if is_number(cell)} - {math.nan}
            if len(rates) > 1 and not self._find_repetition(group):
                raise Refusal(
                    str(self.rate),
                    "be one number for each trial",
                    f"{len(rates)} numbers from {min(rates):g} to {max(rates):g} at different"
                    f" steps of what may be one trial, in line {group[0].number} of"
                    f" {self.path} and others",
                    "Write the peak learning rate into each line of a trial. If these are several"
                    " trials, give each its own name in a column `trial`.",
                )


def _first_name(names: Sequence[str], wanted: Iterable[str]) -> str:
    return next((name for name in wanted if name in names), "")


def _number_columns(lines: Sequence[_Line], names: Iterable[str]) -> list[str]:
    """Return the columns that have numbers alone."""
    cells = {name: [line.cells[name] for line in lines if line.cells[name]] for name in names}
    return [name for name, texts in cells.items() if texts and all(map(is_number, texts))]


def _values_beside(group: Sequence[_Line], name: str, of: str) -> dict[str, set[str]]:
    """Return the values of one column beside each value of another."""
    found: dict[str, set[str]] = {}
    for line in group:
        found.setdefault(line.cells[name], set()).add(line.cells[of])
    return found


def _values(group: Sequence[_Line], name: str) -> set[float | str]:
    """Return the numbers and words of a column."""
    cells = {line.cells[name] for line in group if line.cells[name]}
    return {float(cell) if is_number(cell) else cell for cell in cells}


def _settings(group: Sequence[_Line], name: str) -> set[float | str]:
    """Return the numbers of a column, and the words that are settings."""
    values = _values(group, name)
    found = {setting_in_words(name, v) if isinstance(v, str) else v for v in values}
    return {value for value in found if value is not None}


def _part(name: str, text: str) -> str:
    return text if name in GROUPS else f"{name}={text}"
