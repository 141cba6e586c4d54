# SPDX-License-Identifier: Apache-2.0
"""`noisescale predict FOLDER` of several runs."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from noisescale.printable import printable, printable_json

if TYPE_CHECKING:
    from noisescale.prediction.prediction import PredictionRecord


def show_runs(
    folder: Path,
    runs: Sequence[Path],
    predicted: Callable[[Path], PredictionRecord],
    *,
    as_json: bool,
) -> None:
    """Print a table of the predictions from all runs of a folder, and the command for one run.

    Raises:
        ValueError: If an argument is wrong for every run.
    """
    from rich.console import Console

    from noisescale.refusal import UNUSABLE, word_for
    from noisescale.report.runs import PredictedRun, runs_as_dicts, runs_table
    from noisescale.report.text import Section

    found: list[PredictedRun] = []
    for run in runs:
        try:
            found.append(PredictedRun(run, predicted(run)))
        except (ValueError, OSError) as error:
            word = word_for(error)
            if word == UNUSABLE and str(error).startswith("`--"):
                raise
            found.append(PredictedRun(run, None, word, str(error)))
    reasons = [each.reason for each in found if each.word == UNUSABLE]
    if len(reasons) > 1 and len({*reasons}) == 1 and not any(each.found for each in found):
        raise ValueError(reasons[0])  # of a file that an option names
    if as_json:
        print(printable_json(json.dumps(runs_as_dicts(found), indent=2, ensure_ascii=False)))
        return
    console = Console(highlight=False)
    console.print(Section(runs_table(folder, found)))
    one = next((each for each in reversed(found) if each.found), found[-1])
    what = "The full prediction of one run" if one.found else "To see the reason"
    said = f"{what}: noisescale predict {shlex.quote(printable(one.run))}"
    console.print(said, markup=False, soft_wrap=True)
