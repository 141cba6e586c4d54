# SPDX-License-Identifier: Apache-2.0
"""A search in builtin types."""

from __future__ import annotations

from typing import Any

from noisescale.lab.tune.tune_record import TuneRecord
from noisescale.report.records import fields_of, finite


def as_dict(found: TuneRecord) -> dict[str, Any]:
    """Return a search, finished or under way, in builtin types.

    | key | meaning |
    |---|---|
    | `name`, `kind` | the name of the search in its storage; "tune" |
    | `done`, `finished` | trainings that have ended, whether nothing is left to train |
    | `failures` | the reason of each training that was given up, by its number |
    | `workers` | what each busy worker trains |
    | `metric`, `maximize` | the result, and whether it is to rise |
    | `device_hours`, `budget`, `most_trials` | spent so far, and the limits; None for no limit |
    | `trials` | parameters, cost and result of each training; None is unknown |
    | `front` | cost, result and parameters of the settings that are the best for their cost |
    | `scaling_laws` | the power of the cost with which each parameter grows; None without a law |
    """
    front = found.front
    record: dict[str, Any] = finite(
        {
            **found.progress.as_dict(),
            **fields_of(front, "metric", "maximize"),
            "finished": found.finished,
            "device_hours": round(found.progress.device_hours, 4),
            **fields_of(found, "budget", "most_trials"),
            "trials": [
                {
                    "number": trial.number,
                    "parameters": dict(trial.parameters),
                    "device_seconds": trial.cost,
                    **fields_of(trial, "value", "ended", "steps"),
                }
                for trial in front.trials
            ],
            "front": [
                {
                    "device_seconds": each.cost,
                    "value": each.value,
                    "parameters": dict(each.first.parameters),
                    "trials": [trial.number for trial in each.trials],
                }
                for each in front.front
            ],
            "scaling_laws": {
                name: None if law is None else fields_of(law, "power", "low", "high", "resolved")
                for name, law in front.laws.items()
            },
        }
    )
    return record
