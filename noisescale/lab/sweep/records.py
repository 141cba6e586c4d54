# SPDX-License-Identifier: Apache-2.0
"""A sweep in builtin types."""

from __future__ import annotations

from typing import Any

from noisescale.lab.jobs.jobs import FAILED
from noisescale.lab.sweep.results import DIVERGED, OUT_OF_STEPS, PRUNED
from noisescale.lab.sweep.sweep_record import SweepRecord, SweptSize
from noisescale.report.records import fields_of, finite


def as_dict(found: SweepRecord) -> dict[str, Any]:
    """Return a sweep, finished or under way, in builtin types.

    | key | meaning |
    |---|---|
    | `name`, `kind` | the name of the sweep in its storage; "sweep" |
    | `done`, `expected`, `finished` | trainings that have ended; all, as far as is known |
    | `failures` | the reason of each training that was given up, by its key |
    | `workers` | what each busy worker trains |
    | `goal`, `device_hours`, `seconds_left` | spent so far and the time left; None is unknown |
    | `batch_sizes` | trainings, steps to the goal and best learning rate of each batch size |
    """
    record: dict[str, Any] = finite(
        {
            **found.progress.as_dict(),
            "goal": str(found.job.goal),
            "expected": found.expected_trainings,
            "finished": found.finished,
            "device_hours": round(found.progress.device_hours, 4),
            "seconds_left": found.seconds_left,
            "batch_sizes": [_size_as_dict(size) for size in found.sizes],
        }
    )
    return record


def _size_as_dict(size: SweptSize) -> dict[str, Any]:
    return {
        "batch_size": size.batch_size,
        "done": len(size.results),
        "expected": size.expected_trainings,
        "reached": size.reached,
        "diverged": size.count(DIVERGED),
        "pruned": size.count(PRUNED),
        "out_of_steps": size.count(OUT_OF_STEPS),
        "failed": size.count(FAILED),
        **fields_of(size, "steps", "learning_rate", "finished"),
    }
