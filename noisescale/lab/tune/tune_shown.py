# SPDX-License-Identifier: Apache-2.0
"""A search that is going on, in lines of a terminal and in JSON, and what makes it doubtful."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from noisescale.lab.tune.tune_job import own_values
from noisescale.lab.tune.tuned_tables import cost_unit, number_of
from noisescale.printable import printable
from noisescale.report.numbers import hours, plural

if TYPE_CHECKING:
    from noisescale.lab.tune.cost_front import CostFront
    from noisescale.lab.tune.standing import TuneProgress
    from noisescale.lab.tune.tune_job import TuneJob

OF_A_BATCH = (
    "{} is logged by the training step: it is that of the last batch. It scatters, most at small"
    " batch sizes. Log a metric in `validation_step`."
)

FIXED = (
    "The module has a hyperparameter `batch_size` = {}. It stays as it is at all batch sizes. If"
    " the loss or a schedule is made with it, use the size of the batch instead."
)

SCHEDULED = (
    "The module has a learning-rate schedule ({}). Trainings differ in their steps: make it as long"
    " as each training is, by `trainer.estimated_stepping_batches`."
)

NOT_OWN = (
    "The first training, called your own settings, has {} = {} where your module and loader have"
    " {}: the search begins there, or its range leaves yours out."
)

RISES = "{} sounds like a metric that should rise, and is minimised. If so, add `--maximize`."

_RISING = ("acc", "accuracy", "f1", "auc", "auroc", "precision", "recall", "reward", "return")


def progress_line(found: TuneProgress) -> str:
    """Return how far a search is."""
    failed = len(found.front.failed)
    parts = [f"{plural(found.done, 'training')} done"]
    if found.most_trials is not None:
        parts[0] = f"{found.done} of {plural(found.most_trials, 'training')} done"
    parts += [f"{failed} without a result"] if failed else []
    parts += [] if found.finished else [f"{len(found.running)} under way"]
    of = f" of {hours(found.budget)}" if found.budget is not None else ""
    parts.append(f"{hours(found.device_hours)}{of} device-hours spent")
    best = found.front.best
    if best is None:
        return f"{', '.join(parts)}."
    unit = cost_unit(found.front)
    said = f"{number_of(best.value)} for {unit(best.cost / 3600)} device-{unit.name}"
    return f"{', '.join(parts)}. Best {found.front.metric}: {said}."


def doubts_before(job: TuneJob) -> list[str]:
    """Return what makes a search doubtful, whatever comes out of it."""
    found = []
    words = job.metric.lower().replace("/", "_").split("_")
    if not job.maximize and words[-1] in _RISING:
        found.append(RISES.format(printable(job.metric)))
    sized = [name for name in job.own.schedules if name != "ReduceLROnPlateau"]
    if sized and not job.own.schedules_fit:
        found.append(SCHEDULED.format(", ".join(sized)))
    known = own_values(job.own)
    for each in job.parameters:
        own, first = known.get(each.name), each.center
        if own is None or first is None or isinstance(first, str):
            continue
        if not math.isclose(own, first, rel_tol=1e-5):
            found.append(NOT_OWN.format(each.name, number_of(first), number_of(own)))
    if job.own.of_a_batch:
        found.append(OF_A_BATCH.format(printable(job.metric)))
    if job.own.fixed_batch_size is not None:
        found.append(FIXED.format(job.own.fixed_batch_size))
    return found


def tuned_as_dict(job: TuneJob, found: TuneProgress) -> dict[str, Any]:
    """Return a search as JSON can hold it."""
    return {
        "metric": job.metric,
        "maximize": job.maximize,
        "finished": found.finished,
        "device_hours": round(found.device_hours, 4),
        "budget": job.budget,
        "most_trials": job.trials,
        "trials": [
            {
                "number": trial.number,
                "parameters": dict(trial.parameters),
                "device_seconds": _known(trial.cost),
                "value": _known(trial.value),
                "ended": trial.ended,
                "steps": _known(trial.steps),
            }
            for trial in found.front.trials
        ],
        "front": _front(found.front),
        "scaling_laws": {
            name: None
            if law is None
            else {"power": law.power, "low": law.low, "high": law.high, "resolved": law.resolved}
            for name, law in found.front.laws.items()
        },
    }


def _front(found: CostFront) -> list[dict[str, Any]]:
    return [
        {
            "device_seconds": each.cost,
            "value": each.value,
            "parameters": dict(each.first.parameters),
            "trials": [trial.number for trial in each.trials],
        }
        for each in found.front
    ]


def _known(value: float) -> float | None:
    return value if math.isfinite(value) else None
