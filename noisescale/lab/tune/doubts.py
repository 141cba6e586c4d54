# SPDX-License-Identifier: Apache-2.0
"""Reasons to doubt a search, in sentences."""

from __future__ import annotations

import math

from noisescale.lab.tune.tune_job import TuneJob, values_of
from noisescale.report.numbers import four_digits

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


def doubts_about(job: TuneJob) -> list[str]:
    """Return what makes a search doubtful, whatever comes out of it."""
    found = []
    words = job.metric.lower().replace("/", "_").split("_")
    if not job.maximize and words[-1] in _RISING:
        found.append(RISES.format(job.metric))
    sized = [name for name in job.own.schedules if name != "ReduceLROnPlateau"]
    if sized and not job.own.schedules_fit:
        found.append(SCHEDULED.format(", ".join(sized)))
    known = values_of(job.own)
    for each in job.parameters:
        own, first = known.get(each.name), each.center
        if own is None or first is None or isinstance(first, str):
            continue
        if not math.isclose(own, first, rel_tol=1e-5):
            found.append(NOT_OWN.format(each.name, four_digits(first), four_digits(own)))
    if job.own.of_a_batch:
        found.append(OF_A_BATCH.format(job.metric))
    if job.own.fixed_batch_size is not None:
        found.append(FIXED.format(job.own.fixed_batch_size))
    return found
