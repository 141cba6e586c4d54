# SPDX-License-Identifier: Apache-2.0
"""The files of a sweep: `sweep.csv` and `trials.csv`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from noisescale.csv_lines import write_csv
from noisescale.lab.sweep.swept_size import SweptSize

SWEEP, TRIALS = "sweep.csv", "trials.csv"
"""The files: the steps to the goal at each batch size, and all evaluations."""


def write_files(sizes: Sequence[SweptSize], metric: str, folder: Path) -> None:
    """Write the files of a sweep.

    `sweep.csv` has a line for each repetition of the best point that reached the goal, at each
    batch size whose search is done. A batch size has none if the middle repetition missed the goal:
    the others were lucky. It has none either if the best learning rate is still at the edge: a
    better one may lie beyond, and `compare` leaves it out of the law, too. `noisescale fit` and
    `predict --sweep` take it.

    `trials.csv` has all evaluations, for `noisescale compare`. Both are the same whoever trained
    what, except for the times of `trials.csv` and how far trainings without a chance were trained.
    """
    write_csv(folder / SWEEP, _best(sizes))
    write_csv(folder / TRIALS, _evaluations(sizes, metric))


def _best(sizes: Sequence[SweptSize]) -> Iterator[Sequence[Any]]:
    yield "batch_size", "steps", "learning_rate", "seed"
    for size in sizes:
        if not size.finished or size.best is None or size.best_is_at_edge:
            continue
        for each in size.search.best:
            if each.reached:
                steps = f"{each.outcome.at('steps'):.15g}"
                yield size.batch_size, steps, f"{each.learning_rate:g}", each.seed


def _evaluations(sizes: Sequence[SweptSize], metric: str) -> Iterator[Sequence[Any]]:
    results = [each for size in sizes for each in size.results]
    names = list(dict.fromkeys(name for each in results for name in each.hyperparameters))
    yield "batch_size", *names, "seed", "step", "seconds", metric, "ended"
    for each in results:
        setting = f"{each.batch_size:.15g}", *(f"{each.hyperparameters[n]:g}" for n in names)
        for step, seconds, value in zip(each.steps, each.seconds, each.values, strict=True):
            yield *setting, each.seed, step, seconds, value, each.ended
