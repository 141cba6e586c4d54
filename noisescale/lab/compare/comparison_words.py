# SPDX-License-Identifier: Apache-2.0
"""How submissions, workloads and times of a comparison are named."""

from __future__ import annotations

from collections.abc import Sequence

from noisescale.bounded import Bounded
from noisescale.lab.compare.comparison import Comparison
from noisescale.lab.compare.outcomes import Standing
from noisescale.report.numbers import SECONDS, Duration, duration_for

_MOST_NAMED = 3
"""Submissions that a list of names has, if there are many."""


def whose(submission: str, workload: str) -> str:
    """Name a submission on a workload, as far as either has a name."""
    return " on ".join(filter(None, (submission, workload)))


def named(standing: Standing) -> str:
    """Name a submission, or its only run if it has no name."""
    return standing.submission or standing.best.trial.name


def listed(names: Sequence[str]) -> str:
    """Return names in a sentence.

    Examples:
        >>> listed(["sgd", "adam", "lion"])
        'sgd, adam and lion'
    """
    *first, last = names
    return f"{', '.join(first)} and {last}" if first else last


def few(names: Sequence[str]) -> str:
    """Return names in a sentence, of many the first ones alone.

    Examples:
        >>> few(["sgd", "adam", "lion", "lars"]), few([f"run {k}" for k in range(300)])
        ('sgd, adam, lion and lars', 'run 0, run 1, run 2 and 297 others')
    """
    if len(names) <= _MOST_NAMED + 1:
        return listed(names)
    return listed([*names[:_MOST_NAMED], f"{len(names) - _MOST_NAMED:,} others"])


def time_unit(c: Comparison) -> Duration:
    """Return the unit that suits the seconds of all trials that reached a goal."""
    hours = [
        outcome.at("seconds") / 3600
        for standing in c.standings
        for outcome in standing.outcomes
        if outcome.reached is not None and outcome.at("seconds") > 0
    ]
    return duration_for(Bounded(each, each, each) for each in hours) if hours else SECONDS
