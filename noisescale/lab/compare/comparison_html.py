# SPDX-License-Identifier: Apache-2.0
"""A comparison as one page that needs nothing from anywhere else."""

from __future__ import annotations

from pathlib import Path

from noisescale.lab.compare.comparison import Comparison
from noisescale.lab.compare.comparison_answers import headline_of
from noisescale.lab.compare.comparison_figures import comparison_figures
from noisescale.lab.compare.comparison_tables import comparison_tables
from noisescale.lab.compare.comparison_words import few, named
from noisescale.report.document import Document, Statement
from noisescale.report.numbers import plural
from noisescale.report.page import page_html, write_page

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


def write_comparison(c: Comparison, path: Path) -> Path:
    """Write the page of a comparison, whole or not at all, and return its path.

    Raises:
        OSError: If the folder does not exist, or cannot be written to.
    """
    return write_page(_page(c), path)


def comparison_html(c: Comparison) -> str:
    """Return the page of a comparison: answers, figures, tables, what is doubtful."""
    return page_html(_page(c))


def _page(c: Comparison) -> Document:
    heading = _heading(c)
    repeated = any(len(standing.outcomes) > 1 for standing in c.standings)
    return Document(
        title=f"{heading}: time to result",
        headline=heading,
        answers=[Statement(name.strip(), text) for name, text in headline_of(c)],
        doubts=c.warnings,
        figures=lambda: comparison_figures(c),
        tables=comparison_tables(c, every_trial=repeated or len(c.standings) == 1),
        assumptions=(),
        how_to_read=_HOW_TO_READ
        + (_HOW_TO_READ_SWEEPS if c.sweeps else "")
        + (_HOW_TO_READ_SCORES if c.scores is not None else ""),
    )


def _heading(c: Comparison) -> str:
    """Who was first."""
    if not c.reached:
        goals = {str(goal) for goal in c.goals.values()}
        return f"No run reached {goals.pop() if len(goals) == 1 else 'its goal'}"
    if len(c.workloads) > 1:
        return _heading_of_workloads(c)
    standings = [standing for standing in c.standings if standing.best.reached is not None]
    goal = c.goals[c.workloads[0]]
    if not standings:
        return f"{goal} was reached by some runs only"
    best = standings[0].best.at(c.clock)
    first = few([named(each) for each in standings if each.best.at(c.clock) == best])
    return f"{first} reached {goal}{' first' if len(c.standings) > 1 else ''}"


def _heading_of_workloads(c: Comparison) -> str:
    workloads = plural(len(c.workloads), "workload")
    if not c.scores or not any(c.scores.values()):
        return f"Time to result on {workloads}"
    names = {standing.submission: named(standing) for standing in c.standings}
    best = max(c.scores.values())
    first = [names[submission] for submission, score in c.scores.items() if score == best]
    verb = "have" if len(first) > 1 else "has"
    return f"{few(first)} {verb} the highest score on {workloads}: {best:.2f}"
