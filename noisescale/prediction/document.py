# SPDX-License-Identifier: Apache-2.0
"""What a prediction says, as a document."""

from __future__ import annotations

from collections.abc import Sequence

from noisescale.prediction.headline import headline_of, short_headline_of
from noisescale.prediction.next_steps import next_steps_of
from noisescale.prediction.position import position_of
from noisescale.prediction.prediction import PredictionRecord
from noisescale.prediction.statements import statements_of
from noisescale.prediction.tables import summary_of, tables_of
from noisescale.report.document import Document, Figure

_HOW_TO_READ = (
    "Steps, hours and costs are those to reach the result of this run. The range under a value has"
    " two causes: the interval of the noise scale, and what is not known of the seconds a step"
    " takes. At the critical batch size the run takes twice its fewest steps and twice its fewest"
    " {unit}. Below the critical batch size more devices save time at almost no cost. Above it they"
    " save little. All of this holds for a well-tuned learning rate at each batch size. Check a"
    " large change by a short run."
)


def document_of(p: PredictionRecord) -> Document:
    """Return what a prediction says: answers, figures, tables, what is doubtful and assumed."""
    position = position_of(p)

    def figures() -> Sequence[Figure]:
        from noisescale.prediction.figures import figures_of

        return figures_of(p)

    return Document(
        title=short_headline_of(position),
        headline=headline_of(p, position),
        summary=summary_of(p, position),
        answers=[*statements_of(p, position)],
        tables=tables_of(p),
        figures=figures,
        doubts=p.warnings,
        assumptions=p.assumptions,
        how_to_read=_HOW_TO_READ.format(unit=p.unit),
        status="under way" if p.under_way else "done",
        next=next_steps_of(p, position),
    )
