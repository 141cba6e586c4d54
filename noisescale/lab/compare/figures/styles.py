# SPDX-License-Identifier: Apache-2.0
"""How the figures of a comparison show its submissions: each in one colour everywhere."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from noisescale.lab.compare.names import name_of
from noisescale.report.colours import SERIES
from noisescale.report.drawing import DASHES, SYMBOLS, shown_name

if TYPE_CHECKING:
    from noisescale.lab.compare.comparison import Comparison


class Style(NamedTuple):
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


def styles_of(c: Comparison) -> dict[str, Style]:
    """Return the style of each submission."""
    names = {standing.submission: name_of(standing) for standing in c.standings}
    styles = {}
    for k, submission in enumerate(c.submissions):
        again, at = divmod(k, len(SERIES))
        dash, symbol = DASHES[again % len(DASHES)], SYMBOLS[k % len(SYMBOLS)]
        styles[submission] = Style(names[submission], SERIES[at], dash, symbol)
    return styles
