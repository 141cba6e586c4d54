# SPDX-License-Identifier: Apache-2.0
"""The trials of Shallue et al., in the layout in which they were published.

`noisescale.compare(read_shallue(folder, metric), goal)` compares them.
"""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from noisescale.csv_lines import table
from noisescale.lab.compare.measurements import Trial
from noisescale.lab.compare.readers.found import (
    broken_trial,
    measurements_of,
    name_of_run,
    natural_key,
    number,
)
from noisescale.lab.compare.readers.hyperparameters import hyperparameters
from noisescale.refusal import Refusal

MEASUREMENTS = "measurements.csv"
"""The file that makes a folder a trial."""

_PARAMETERS = ("parameters", "hparams", "hyperparameters")
_ABOUT_TRIAL = ("trial_id", "_internal_trial_id", "status", "steps", "step", "seconds")
_RATE = "initial_learning_rate"
_FAILED = ("infeasible", "failed", "diverged")


def read_shallue(path: Path, metric: str) -> list[Trial]:
    """Read trials from folders dataset/model/optimizer/batch_size/trial, at a path or below it.

    The optimizer is the submission, dataset/model the workload. Folders above the dataset, such as
    "solution_quality", belong to the workload if they are below the given path. The batch size is
    `batch_size` in the study.json of its folder, else the name of this folder.

    A trial's measurements.csv has a column `step` and columns of metrics. Lines without the metric
    are left out. Its metadata.json, which may be missing, has

    - the hyperparameters under "parameters", "hparams" or "hyperparameters", else beside
      "status": all numbers and words, the learning rate as "learning_rate", "lr" or
      "initial_learning_rate";
    - "status": a trial is infeasible if its status is "INFEASIBLE", "FAILED" or "DIVERGED". Trials
      with the status "INCOMPLETE" are left out, as in the analysis by Shallue et al.

    Args:
        path: The given path.
        metric: The name of a column, for example "val/classification_error".

    Returns:
        The trials. One whose files are damaged, or whose batch size is not known, has a `fault`.

    References:
        Shallue et al. 2019, arXiv:1811.03600; batch_science in google-research on GitHub.
    """
    trials = []
    for folder in sorted((file.parent for file in path.rglob(MEASUREMENTS)), key=natural_key):
        submission, workload = _place_of(folder, path)
        try:
            trial = _read_trial(folder, path, metric)
        except (ValueError, OSError) as error:
            broken = broken_trial(name_of_run(folder, path), error, submission)
            trial = replace(broken, workload=workload)
        trials += [] if trial is None else [trial]
    return trials


def _place_of(folder: Path, path: Path) -> tuple[str, str]:
    """Return the submission and the workload that the folders of a trial name."""
    whole = ("",) * 5 + folder.resolve().parts
    above = folder.relative_to(path).parts[:-5]
    return whole[-3], "/".join((*above, *whole[-5:-3]))


def _read_trial(folder: Path, path: Path, metric: str) -> Trial | None:
    """Return the trial of a folder; None if it is incomplete."""
    metadata = _read_json(folder / "metadata.json")
    status = str(metadata.get("status", "")).lower()
    if status == "incomplete":
        return None
    batch_size = _batch_size_of(folder.parent)
    steps, values = _evaluations(folder / MEASUREMENTS, metric)
    found = hyperparameters(_parameters(metadata))
    submission, workload = _place_of(folder, path)
    return Trial(
        name_of_run(folder, path),
        measurements_of(str(folder), steps, values, batch_size=batch_size),
        submission=submission,
        optimizer=submission,
        workload=workload,
        batch_size=batch_size,
        learning_rate=found.learning_rate,
        hyperparameters=MappingProxyType(dict(found.others)),
        feasible=not any(word in status for word in _FAILED),
    )


def _evaluations(file: Path, metric: str) -> tuple[list[float], list[float]]:
    names, lines, _ = table(file)
    for name in ("step", metric):
        if name not in names:
            raise Refusal(file, f"have a column `{name}`", ", ".join(names), "Add this column.")
    at, of = names.index("step"), names.index(metric)
    cells = [(line, row[at], row[of]) for line, row in lines if row[of]]
    steps = [number(step, file, line, "step") for line, step, _ in cells]
    return steps, [number(value, file, line, metric) for line, _, value in cells]


def _batch_size_of(study: Path) -> float:
    said = _read_json(study / "study.json").get("batch_size", study.resolve().name)
    try:
        size = float(said)
    except (TypeError, ValueError):
        size = math.nan
    if not 0 < size < math.inf:
        raise Refusal(
            study,
            "be named by the batch size of its trials",
            repr(said),
            "Arrange the folders as dataset/model/optimizer/batch_size/trial.",
        )
    return size


def _parameters(metadata: dict[str, Any]) -> dict[str, Any]:
    known = (metadata[key] for key in _PARAMETERS if isinstance(metadata.get(key), dict))
    at_top = {name: each for name, each in metadata.items() if name not in _ABOUT_TRIAL}
    found = next(known, at_top)
    return {"learning_rate" if name == _RATE else name: each for name, each in found.items()}


def _read_json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        found = json.loads(file.read_text("utf-8"))
    except ValueError as error:
        raise Refusal(file, "be JSON", error, "Correct or remove the file.") from error
    return found if isinstance(found, dict) else {}
