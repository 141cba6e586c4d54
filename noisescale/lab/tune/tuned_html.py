# SPDX-License-Identifier: Apache-2.0
"""A search along the front of cost and result as one page that needs nothing from elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from noisescale.lab.tune.cost_front import CostFront
from noisescale.lab.tune.tuned_figures import tuned_figures
from noisescale.lab.tune.tuned_tables import front_answers, front_tables, number_of
from noisescale.report.document import Document, Statement
from noisescale.report.numbers import plural
from noisescale.report.page import write_page

_HOW_TO_READ = (
    "Cost is the time of training on one device, times the devices, without the start of the"
    " process and without evaluations. The front has the trainings that no cheaper one equals. A"
    " result may be lucky: repeat the setting that you choose with other seeds. A power of 0.5 says"
    " that a parameter doubles where the cost is four times as high; where its interval includes"
    " 0, the parameter may as well stay as it is."
)


def write_tuned_html(found: CostFront, path: Path, warnings: Sequence[str] = ()) -> Path:
    """Write the page of a search, whole or not at all, and return its path.

    Raises:
        OSError: If the folder does not exist, or cannot be written to.
    """
    heading = f"No training has a result, of {plural(len(found.trials), 'training')}"
    if found.best is not None:
        heading = f"Best {found.metric} of {plural(len(found.trials), 'training')}:"
        heading += f" {number_of(found.best.value)}"
    page = Document(
        title=f"{heading}: cost and result",
        headline=heading,
        answers=[Statement(name.strip(), text) for name, text in front_answers(found)],
        doubts=warnings,
        figures=lambda: tuned_figures(found),
        tables=front_tables(found),
        assumptions=(),
        how_to_read=_HOW_TO_READ,
    )
    return write_page(page, path)
