# SPDX-License-Identifier: Apache-2.0
"""Several runs beside each other: what each of them says about the batch size."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from noisescale.bounded import Bounded
from noisescale.prediction.prediction import PredictionRecord
from noisescale.printable import printable
from noisescale.report.answers import batch_on_devices, own_batch_size
from noisescale.report.numbers import count, plural
from noisescale.report.records import as_dict
from noisescale.report.tables import Cell, Line, Table, cell_of

HEADINGS = ("run", "steps", "batch size", "devices", "last noise scale", "critical batch size")


class PredictedRun(NamedTuple):
    """A run with what is predicted from it, or why nothing is."""

    run: Path
    found: PredictionRecord | None
    word: str = ""
    """Why nothing is predicted, for a cell of a table."""
    reason: str = ""
    """The same in a sentence."""


def runs_table(folder: Path, runs: Sequence[PredictedRun]) -> Table:
    """Return a line for each run of a folder, in their order."""
    title = f"{plural(len(runs), 'run')} in {printable(folder)}, the newest at the end"
    named = [(printable(each.run.relative_to(folder)), each) for each in runs]
    return compared(title, [(name, each.found, each.word) for name, each in named])


def compared(title: str, runs: Iterable[tuple[str, PredictionRecord | None, str]]) -> Table:
    """Return a line for each run.

    Args:
        title: Of the table.
        runs: The name of each run, what is predicted from it, and if nothing is, why in a word.
    """
    lines = [Line([Cell(name), *_cells(found, word)], []) for name, found, word in runs]
    return Table(title, [*HEADINGS, "recommended"], lines, [])


def runs_as_dicts(runs: Sequence[PredictedRun]) -> list[dict[str, Any]]:
    """Return the runs in builtins.

    | key | meaning |
    |---|---|
    | `run` | its folder |
    | `prediction` | as `as_dict` has it; None where nothing is predicted |
    | `word`, `reason` | why nothing is, in a word and in a sentence; None where something is |
    """
    return [
        {
            "run": str(each.run),
            "prediction": as_dict(each.found) if each.found else None,
            "word": each.word or None,
            "reason": each.reason or None,
        }
        for each in runs
    ]


def _cells(p: PredictionRecord | None, word: str) -> list[Cell]:
    if p is None:
        return [*(Cell("") for _ in HEADINGS[1:]), Cell(word)]
    columns = ("noise_scale", "low", "high")
    last = Bounded(*(float(np.asarray(p.history[name])[-1]) for name in columns))
    at_least = "" if p.resolved else ">= "
    return [
        Cell(count(float(p.run.steps.sum()))),
        Cell(count(own_batch_size(p))),
        Cell(count(p.own_devices)),
        cell_of(last),
        cell_of(p.critical_batch_size),
        Cell(f"{at_least}{batch_on_devices(p.recommended)}"),
    ]
