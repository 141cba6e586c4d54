# SPDX-License-Identifier: Apache-2.0
"""What a comparison says, as a document."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from noisescale.lab.compare.names import full_list, name_of_sweep
from noisescale.lab.compare.statements import headline_of, leaders_by_chance, statements_of
from noisescale.lab.compare.tables import tables_of
from noisescale.report.document import Document, Figure
from noisescale.report.numbers import count

if TYPE_CHECKING:
    from noisescale.lab.compare.comparison import Comparison

_HOW_TO_READ = (
    "A run has reached the goal at its first measurement that is as good as the goal. The time of a"
    " submission is the time of its fastest setting of hyperparameters. If this setting was trained"
    " several times, the middle repetition counts. A speed-up whose bounds include 1 may be"
    " chance. Speed-ups hold for this goal: another goal can change their order."
)
_HOW_TO_READ_SWEEPS = (
    " Up to the end of perfect scaling, twice the batch size takes about half the steps. Beyond the"
    " largest useful batch size, larger batches save at most a sixth of the steps. Both borders"
    " assume that the learning rate was tuned at each batch size."
)
_HOW_TO_READ_SCORES = (
    " A score of 1 belongs to a submission that is the fastest on each workload. A submission that"
    " takes 4 times the time of the fastest, or misses the goal, adds nothing to its score."
)

_FARTHER = {"low": ("lower", "lowest"), "high": ("higher", "highest")}


def document_of(c: Comparison) -> Document:
    """Return what a comparison says: answers, figures, tables, what is doubtful."""
    headline = headline_of(c)

    def figures() -> Sequence[Figure]:
        from noisescale.lab.compare.figures import figures_of

        return figures_of(c)

    return Document(
        title=f"{headline}: time to result",
        headline=headline,
        answers=statements_of(c),
        tables=tables_of(c),
        figures=figures,
        doubts=c.warnings,
        how_to_read=_HOW_TO_READ
        + (_HOW_TO_READ_SWEEPS if c.sweeps else "")
        + (_HOW_TO_READ_SCORES if c.scores is not None else ""),
        next=_next_steps(c, leaders_by_chance(c)),
    )


def _next_steps(c: Comparison, chance: tuple[str, ...]) -> list[str]:
    """Return what to do next.

    Args:
        c: The comparison.
        chance: The submissions whose order may be chance.
    """
    if not c.reached:
        return list(_goals_that_were_reached(c))
    found = list(_rates_to_try(c))
    if chance:
        again = f"train {full_list(chance)} again with other seeds, and compare all runs"
        found.append(f"{again}. Runs of the same settings are repetitions.")
    return [f"{'And' if number else 'Next'}: {step}" for number, step in enumerate(found)]


def _goals_that_were_reached(c: Comparison) -> Iterator[str]:
    """Yield the command with a goal that the best run reached, if there is one workload."""
    known = [outcome for outcome in c.outcomes if not math.isnan(outcome.best)]
    if len(c.workloads) > 1 or not known:
        return
    best = min(known, key=lambda outcome: outcome.rank(c.clock))
    goal = f"{best.goal.metric}{best.goal.side}={best.best!r}"
    yield (
        f"Next: ask for the value that the best run reached\n"
        f"  noisescale compare RUNS --goal {shlex.quote(goal)}"
    )


def _rates_to_try(c: Comparison) -> Iterator[str]:
    """Yield where the best learning rate has no worse one beyond it."""
    for each in c.sweeps:
        for edge, (farther, farthest) in _FARTHER.items():
            sizes = [batch.batch_size for batch in each.batches if batch.edge == edge]
            if sizes:
                at = "batch sizes" if len(sizes) > 1 else "batch size"
                yield (
                    f"try {farther} learning rates for {name_of_sweep(each) or 'the sweep'}: at"
                    f" {at} {full_list([count(size) for size in sizes])} the {farthest} one was"
                    " the best."
                )
