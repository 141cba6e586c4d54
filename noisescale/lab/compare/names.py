# SPDX-License-Identifier: Apache-2.0
"""The names of submissions, workloads and units of time in a comparison."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from noisescale.bounded import Bounded
from noisescale.lab.compare.outcomes import Standing
from noisescale.lab.compare.swept import Swept
from noisescale.report.numbers import SECONDS, Duration, count, duration_for, plural

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


class Clock(NamedTuple):
    """What progress is counted in, and how it is written."""

    name: str
    """One of `CLOCKS`."""
    unit: Duration
    """The unit of seconds."""

    @property
    def unit_name(self) -> str:
        """The unit, such as steps or minutes."""
        return self.unit.name if self.name == "seconds" else self.name

    @property
    def factor(self) -> float:
        """How many of the unit one step, example, epoch or second is."""
        return self.unit.each_hour / 3600 if self.name == "seconds" else 1.0

    def write(self, at: float) -> str:
        """Return the number of a time."""
        return self.unit(at / 3600) if self.name == "seconds" else count(at)

    def say(self, at: float) -> str:
        """Return a time in words, such as "1,200 steps"."""
        if self.name == "seconds":
            return f"{self.write(at)} {self.unit.name}"
        return plural(at, self.name.removesuffix("s"))


def clock_of(c: Comparison, name: str) -> Clock:
    """Return a clock in the unit that suits the seconds of all trials that reached a goal.

    Without such trials it is the unit that suits the lengths of all trials.
    """
    seconds = [o.at("seconds") for o in c.outcomes if o.reached] or [
        o.after("seconds") for o in c.outcomes
    ]
    hours = [each / 3600 for each in seconds if each > 0]
    known = duration_for(Bounded(each, each, each) for each in hours) if hours else SECONDS
    return Clock(name, known)
