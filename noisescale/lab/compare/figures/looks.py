# SPDX-License-Identifier: Apache-2.0
"""How the figures of a comparison show its submissions: each in one colour everywhere."""

from __future__ import annotations

from typing import NamedTuple

from noisescale.lab.compare.comparison import ComparisonRecord
from noisescale.lab.compare.names import name_of
from noisescale.report.colours import SERIES
from noisescale.report.drawing import DASHES, SYMBOLS, shown_name


class Look(NamedTuple):
    """How a submission is drawn."""

    name: str
    """The name as it was given."""
    colour: str
    dash: str
    """Another one where the colours begin anew."""
    symbol: str

    @property
    def label(self) -> str:
        """The name as plotly shows it."""
        return shown_name(self.name)


def looks_of(c: ComparisonRecord) -> dict[str, Look]:
    """Return the look of each submission."""
    names = {standing.submission: name_of(standing) for standing in c.standings}
    return {submission: _look(names[submission], k) for k, submission in enumerate(c.submissions)}


def _look(name: str, k: int) -> Look:
    again, at = divmod(k, len(SERIES))
    return Look(name, SERIES[at], DASHES[again % len(DASHES)], SYMBOLS[k % len(SYMBOLS)])
