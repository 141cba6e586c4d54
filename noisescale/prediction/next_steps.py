# SPDX-License-Identifier: Apache-2.0
"""What to do after a prediction: commands that can be pasted."""

from __future__ import annotations

import math
import shlex

from noisescale.prediction.position import Position
from noisescale.prediction.prediction import PredictionRecord
from noisescale.prediction.questions import fastest_timed, on_devices
from noisescale.prediction.second_run import telling_batch_size
from noisescale.report.numbers import count

TARGET = "train.py:make"
"""Stands for a user's own script and function."""


def next_steps_of(p: PredictionRecord, position: Position) -> list[str]:
    """Return the next steps: what is most uncertain first."""
    source = getattr(p.history, "source", None)
    run = "RUN" if source is None else shlex.quote(str(source))
    found = []
    if (position.rough or not position.resolved) and p.second_run is None:
        own = p.run_batch_size
        middle = position.critical.value
        known = 0 < middle < math.inf
        other = telling_batch_size(own, middle) if known else 16 * own
        found.append(
            f"Next: train at batch size {count(other)} to the same result, and then run\n"
            f"  noisescale predict {run} --second-run RUN2"
        )
    if fastest_timed(p) is None and position.place not in ("above", "unknown"):
        what = "Next" if not found else "And"
        found.append(f"{what}: {_how_to_time(p, run)}")
    return found


def _how_to_time(p: PredictionRecord, run: str) -> str:
    """Return how other batch sizes are timed: `profile` times modules of Lightning alone."""
    if getattr(p.history, "loop", "") in ("", "lightning"):
        return (
            f"time other batch sizes. {TARGET} stands for your script and function:\n"
            f"  noisescale profile {TARGET} --run {run}"
        )
    return (
        f"time another batch size: train 100 steps at {count(2 * p.run_batch_size)} on"
        f" {on_devices(p)}, and then run\n  noisescale predict {run} --step-times RUN2"
    )
