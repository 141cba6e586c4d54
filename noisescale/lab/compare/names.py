# SPDX-License-Identifier: Apache-2.0
"""The names of submissions, workloads and units of time in a comparison."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from noisescale.bounded import Bounded
from noisescale.lab.compare.outcomes import Standing
from noisescale.lab.compare.swept import Swept
from noisescale.report.numbers import SECONDS, Duration, duration_for

if TYPE_CHECKING:
    from noisescale.lab.compare.comparison import Comparison

_MOST_NAMED = 3
"""The most submissions that a short list names."""


def name_of_sweep(each: Swept) -> str:
    """Name a submission on a workload, as far as either has a name."""
    return " on ".join(filter(None, (each.submission, each.workload)))


def name_of(standing: Standing) -> str:
    """Name a submission, or its only run if it has no name."""
    return standing.submission or standing.best.trial.name


def full_list(names: Sequence[str]) -> str:
    """Return names in a sentence.

    Examples:
        >>> full_list(["sgd", "adam", "lion"])
        'sgd, adam and lion'
    """
    *first, last = names
    return f"{', '.join(first)} and {last}" if first else last


def short_list(names: Sequence[str]) -> str:
    """Return names in a sentence. Of more than four the first three are named.

    Examples:
        >>> short_list(["sgd", "adam", "lion", "lars"])
        'sgd, adam, lion and lars'
        >>> short_list([f"run {k}" for k in range(300)])
        'run 0, run 1, run 2 and 297 others'
    """
    if len(names) <= _MOST_NAMED + 1:
        return full_list(names)
    return full_list([*names[:_MOST_NAMED], f"{len(names) - _MOST_NAMED:,} others"])


def time_unit(c: Comparison) -> Duration:
    """Return the unit that suits the seconds of all trials that reached a goal."""
    hours = [
        outcome.at("seconds") / 3600
        for standing in c.standings
        for outcome in standing.outcomes
        if outcome.reached is not None and outcome.at("seconds") > 0
    ]
    return duration_for(Bounded(each, each, each) for each in hours) if hours else SECONDS
