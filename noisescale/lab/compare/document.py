# SPDX-License-Identifier: Apache-2.0
"""What a comparison says, as a document."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from noisescale.lab.compare.names import full_list, name_of, name_of_sweep, short_list
from noisescale.lab.compare.outcomes import Standing
from noisescale.lab.compare.statements import lead_over, statements_of
from noisescale.lab.compare.tables import tables_of
from noisescale.report.document import Document, Figure
from noisescale.report.numbers import count, plural

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
        next=_next_steps(c, _leaders_by_chance(c)),
    )


def headline_of(c: Comparison) -> str:
    """Return who was first, as a sentence without its point."""
    if not c.reached:
        goals = {str(goal) for goal in c.goals.values()}
        return f"No run reached {goals.pop() if len(goals) == 1 else 'its goal'}"
    if len(c.workloads) > 1:
        return _headline_of_workloads(c)
    standings = [standing for standing in c.standings if standing.best.reached is not None]
    goal = c.goals[c.workloads[0]]
    if not standings:
        return f"{goal} was reached by some runs only"
    first = short_list([name_of(each) for each in _leaders(c, standings)])
    said = f"{first} reached {goal}{' first' if len(c.standings) > 1 else ''}"
    return f"{said}, which may be chance" if _leaders_by_chance(c) else said


def _leaders(c: Comparison, standings: Sequence[Standing]) -> list[Standing]:
    """Return those who were first."""
    return [each for each in standings if each.best.at(c.clock) == standings[0].best.at(c.clock)]


def _leaders_by_chance(c: Comparison) -> tuple[str, ...]:
    """Return the first and the next submission of one workload if their order may be chance.

    It may be if the bounds of the lead over the next include 1.
    """
    standings = [standing for standing in c.standings if standing.best.reached is not None]
    tied = len(_leaders(c, standings)) if standings else 0
    if len(c.workloads) > 1 or tied == len(standings):
        return ()  # one submission, or all of them at once
    first, following = standings[0], standings[tied]
    lead = lead_over(c, following, first)
    chance = lead is not None and lead.low <= 1 <= lead.high
    return (name_of(first), name_of(following)) if chance else ()


def _headline_of_workloads(c: Comparison) -> str:
    workloads = plural(len(c.workloads), "workload")
    if not c.scores or not any(c.scores.values()):
        return f"Time to result on {workloads}"
    names = {standing.submission: name_of(standing) for standing in c.standings}
    best = max(c.scores.values())
    first = [names[submission] for submission, score in c.scores.items() if score == best]
    verb = "have" if len(first) > 1 else "has"
    return f"{short_list(first)} {verb} the highest score on {workloads}: {best:.2f}"


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
    known = [o for w in c.workloads for o in c.outcomes_of(w) if not math.isnan(o.best)]
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
