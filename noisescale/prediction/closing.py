# SPDX-License-Identifier: Apache-2.0
"""What is said at the end of a training."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from noisescale.history.history import History
from noisescale.prediction.predict import predict


def closing_lines(histories: Sequence[History], folder: Path) -> str:
    """Return the verdict of a run, a line for each optimizer, and the command for the whole answer.

    Args:
        histories: Of the optimizers.
        folder: The folder with the run's record.
    """
    said = []
    for number, history in enumerate(histories):
        named = f"Optimizer {number}: " if len(histories) > 1 else ""
        said.append(named + _verdict(history))
    return "\n".join([*said, f"Next: noisescale predict {shlex.quote(str(folder))}"])


def _verdict(history: History) -> str:
    if reason := history.withheld or history.why_nothing:
        return f"Not known. {reason}"
    try:
        return predict(history).decision.headline
    except ValueError as reason:
        return f"Not known. {reason}"
