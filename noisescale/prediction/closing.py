# SPDX-License-Identifier: Apache-2.0
"""What is said at the end of a training."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from noisescale.history.history import History
from noisescale.prediction.predict import predict


def closing_lines(histories: Sequence[History], folder: Path | None, *, host: str = "") -> str:
    """Return the verdict of a run, a line for each optimizer, and how to get the whole answer.

    Empty if there is neither a row nor a reason. Without an answer, the reason names the remedy.

    Args:
        histories: Of the optimizers.
        folder: The folder with the run's record; None if there is none.
        host: The callback that has the histories.
    """
    if not any(history or history.why_nothing for history in histories):
        return ""
    said = []
    for number, history in enumerate(histories):
        named = f"Optimizer {number}: " if len(histories) > 1 else ""
        said.append(named + _verdict(history))
    if all(history.withheld or history.why_nothing for history in histories):
        return "\n".join(said)
    how = (
        f"print(noisescale.predict(x).to_text()), where x is this {host}: no logger kept a record"
        if folder is None
        else f"noisescale predict {shlex.quote(str(folder))}"
    )
    return "\n".join([*said, f"Next: {how}"])


def _verdict(history: History) -> str:
    if history.withheld:
        return f"Not known. {history.withheld}"
    if history.why_nothing:
        return f"Not measured. {history.why_nothing}"
    try:
        return predict(history).decision.headline
    except ValueError as reason:
        return f"Not known. {reason}"
