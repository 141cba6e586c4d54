# SPDX-License-Identifier: Apache-2.0
"""How the figures of a comparison show its submissions: each in one colour everywhere."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from noisescale.lab.compare.names import name_of
from noisescale.lab.compare.swept import SweptBatch
from noisescale.report.colours import SERIES
from noisescale.report.drawing import DASHES, SYMBOLS, shown_name
from noisescale.report.numbers import count, plural

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


def hover_text(batch: SweptBatch, style: Style) -> str:
    """Write what was tried at a batch size, for a label under the pointer."""
    said = [f"<b>batch size {count(batch.batch_size)}</b>"]
    if style.name:
        said.insert(0, style.label)
    rates, rate = batch.learning_rates, batch.best.trial.learning_rate
    if rate > 0 and batch.steps:
        edge = {"low": ", the lowest", "high": ", the highest"}.get(batch.edge, "")
        tried = f"{len(rates)} from {rates[0]:.3g} to {rates[-1]:.3g}" if batch.searched else "one"
        said.append(f"learning rate {rate:.3g}{edge} of {tried}")
    said.append(f"{count(batch.reached)} of {plural(batch.tried, 'run')} reached the goal")
    if batch.diverged:
        said.append(f"{count(batch.diverged)} diverged or failed")
    return "<br>".join(said)


def styles_of(c: Comparison) -> dict[str, Style]:
    """Return the style of each submission."""
    names = {standing.submission: name_of(standing) for standing in c.standings}
    styles = {}
    for k, submission in enumerate(c.submissions):
        again, at = divmod(k, len(SERIES))
        dash, symbol = DASHES[again % len(DASHES)], SYMBOLS[k % len(SYMBOLS)]
        styles[submission] = Style(names[submission], SERIES[at], dash, symbol)
    return styles
