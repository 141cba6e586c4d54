# SPDX-License-Identifier: Apache-2.0
"""A prediction as one page that needs nothing from anywhere else."""

from __future__ import annotations

from pathlib import Path

from noisescale.prediction.prediction import PredictionRecord
from noisescale.report.figures import placed_figures
from noisescale.report.numbers import count, plural
from noisescale.report.page import Page, page_html, write_page
from noisescale.report.tables import headline, tables

_HOW_TO_READ = (
    "Steps, hours and costs are those to reach the result of this run. The range under a value has"
    " two causes: the interval of the noise scale, and what is not known of the seconds a step"
    " takes. At the critical batch size the run takes twice its fewest steps and twice its fewest"
    " {unit}. Below the critical batch size more devices save time at almost no cost. Above it they"
    " save little. All of this holds for a well-tuned learning rate at each batch size. Check a"
    " large change by a short run."
)


def write_html(p: PredictionRecord, path: Path) -> Path:
    """Write the page, whole or not at all, and return its path.

    Raises:
        OSError: If the folder does not exist, or cannot be written to.
    """
    return write_page(_page(p), path)


def as_html(p: PredictionRecord) -> str:
    """Return the page: answers, figures, tables, what is doubtful, what is assumed."""
    return page_html(_page(p))


def _page(p: PredictionRecord) -> Page:
    answer = f"Batch size {count(p.recommended_batch_size)}{'' if p.resolved else ' or more'}"
    if p.recommended.devices != p.own_devices:
        answer += f" on {plural(p.recommended.devices, 'device')}"
    return Page(
        title=f"{answer}: what other batch sizes cost",
        heading=f"{answer} is recommended for this run",
        answers=headline(p),
        warnings=p.warnings,
        figures=placed_figures(p),
        tables=tables(p),
        assumptions=p.assumptions,
        how_to_read=_HOW_TO_READ.format(unit=p.unit),
    )
