# SPDX-License-Identifier: Apache-2.0
"""What a prediction says, as a document."""

from __future__ import annotations

from collections.abc import Sequence

from noisescale.prediction.prediction import PredictionRecord
from noisescale.prediction.statements import advice_of, certainty_of, cost_of_measuring
from noisescale.prediction.tables import tables_of
from noisescale.report.document import Document, Figure
from noisescale.report.numbers import count, plural

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
    answer = f"Batch size {count(p.recommended_batch_size)}{'' if p.resolved else ' or more'}"
    if p.recommended.devices != p.own_devices:
        answer += f" on {plural(p.recommended.devices, 'device')}"

    def figures() -> Sequence[Figure]:
        from noisescale.prediction.figures import figures_of

        return figures_of(p)

    return Document(
        title=f"{answer}: what other batch sizes cost",
        headline=f"{answer} is recommended for this run",
        answers=[*advice_of(p), certainty_of(p), *cost_of_measuring(p)],
        tables=tables_of(p),
        figures=figures,
        doubts=p.warnings,
        assumptions=p.assumptions,
        how_to_read=_HOW_TO_READ.format(unit=p.unit),
    )
