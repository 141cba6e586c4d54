# SPDX-License-Identifier: Apache-2.0
"""The files of a search: `trials.csv` and `front.csv`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from noisescale.csv_lines import write_csv
from noisescale.lab.tune.cost_front import CostFront

TRIALS, FRONT = "trials.csv", "front.csv"
"""The files: all trainings, and those of the front."""


def write_files(found: CostFront, folder: Path) -> None:
    """Write the trainings and the front as CSV files. Neither is ever left half-written."""
    names = [each.name for each in found.searched]
    every: list[Sequence[Any]] = [
        ("trial", *names, "examples_of_a_step", "steps", "device_seconds", found.metric, "ended")
    ]
    for trial in found.trials:
        values = [trial.parameters[name] for name in names]
        numbers = (trial.batch_size, trial.steps, trial.cost, trial.value)
        every.append((trial.number, *values, *map(_number, numbers), trial.ended))
    best: list[Sequence[Any]] = [
        ("device_seconds", found.metric, *names, "trainings", "first trial")
    ]
    for each in found.front:
        values = [each.first.parameters[name] for name in names]
        means = (each.cost, each.value)
        best.append((*map(_number, means), *values, len(each.trials), each.first.number))
    write_csv(folder / TRIALS, every)
    write_csv(folder / FRONT, best)


def _number(value: float) -> str:
    return "" if math.isnan(value) else f"{value:.10g}"
