# SPDX-License-Identifier: Apache-2.0
"""Several runs beside each other: what each of them says about the batch size."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from noisescale.history.run_files import name_of
from noisescale.prediction.decision import short_verdict
from noisescale.prediction.prediction import Prediction
from noisescale.refusal import UNUSABLE, word_for
from noisescale.report.answer import Answer
from noisescale.report.document import Cell, Document, Line, Table, cell_of
from noisescale.report.numbers import count, plural

HEADINGS = ("run", "steps", "batch size", "devices", "noise scale now", "critical batch size")


class PredictedRun(NamedTuple):
    """A run with what is predicted from it, or why nothing is."""

    run: Path
    found: Prediction | None
    word: str = ""
    """Why nothing is predicted, for a cell of a table."""
    reason: str = ""
    """The same in a sentence."""


@dataclass(frozen=True)
class PredictedRuns(Answer):
    """The predictions from all runs of a folder."""

    folder: Path
    runs: Sequence[PredictedRun]
    """The runs in their order, the newest at the end."""

    def document(self) -> Document:
        """Return a line for each run, and the command for one of them."""
        title = f"{plural(len(self.runs), 'run')} in {self.folder}, the newest at the end"
        named = [(name_of(each.run, self.folder), each) for each in self.runs]
        table = compare_predictions(title, [(name, x.found, x.word) for name, x in named])
        predicted = [each.run for each in self.runs if each.found]
        refused = [each.run for each in self.runs if not each.found]
        why, whole = "To see the reason", "The full prediction of one run"
        return Document(
            title=title,
            headline=title,
            answers=[],
            tables=[replace(table, title="")],
            next=[
                f"{what}: noisescale predict {shlex.quote(str(run))}"
                for what, runs in ((why, refused), (whole, predicted))
                for run in runs[-1:]
            ],
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the runs in builtins, under the key `runs`.

        | key | meaning |
        |---|---|
        | `run` | its folder |
        | `prediction` | as `Prediction.to_dict` has it; None where nothing is predicted |
        | `word`, `reason` | why nothing is, in a word and in a sentence; None where something is |
        """
        return {"runs": [_as_dict(each) for each in self.runs]}


def predict_runs(
    folder: Path, runs: Sequence[Path], predict_one: Callable[[Path], Prediction]
) -> PredictedRuns:
    """Predict from each run of a folder. A run of which nothing can be predicted has the reason.

    Raises:
        ValueError: If an argument is wrong for every run.
    """
    found: list[PredictedRun] = []
    for run in runs:
        try:
            found.append(PredictedRun(run, predict_one(run)))
        except (ValueError, OSError) as error:
            word = word_for(error)
            if word == UNUSABLE and str(error).startswith("`--"):
                raise
            found.append(PredictedRun(run, None, word, str(error)))
    reasons = [each.reason for each in found if each.word == UNUSABLE]
    if len(reasons) > 1 and len({*reasons}) == 1 and not any(each.found for each in found):
        raise ValueError(reasons[0])  # of a file that an option names
    return PredictedRuns(folder, found)


def compare_predictions(title: str, runs: Iterable[tuple[str, Prediction | None, str]]) -> Table:
    """Return a line for each run.

    Args:
        title: Of the table.
        runs: The name of each run, what is predicted from it, and if nothing is, why in a word.
    """
    lines = [Line([Cell(name), *_cells(found, word)], []) for name, found, word in runs]
    return Table(title, [*HEADINGS, "verdict"], lines, [])


def _as_dict(each: PredictedRun) -> dict[str, Any]:
    return {
        "run": str(each.run),
        "prediction": each.found.to_dict() if each.found else None,
        "word": each.word or None,
        "reason": each.reason or None,
    }


def _cells(p: Prediction | None, word: str) -> list[Cell]:
    if p is None:
        return [*(Cell("") for _ in HEADINGS[1:]), Cell(word)]
    return [
        Cell(count(round(p.run.steps.sum()))),
        Cell(count(p.run_batch_size)),
        Cell(count(p.own_devices)),
        cell_of(p.noise_scale_now),
        cell_of(p.critical_batch_size),
        Cell(short_verdict(p.decision)),
    ]
