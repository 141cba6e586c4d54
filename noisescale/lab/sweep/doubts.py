# SPDX-License-Identifier: Apache-2.0
"""Reasons to doubt the answer of a sweep, in sentences."""

from __future__ import annotations

from collections.abc import Sequence

from noisescale.lab.sweep.results import OUT_OF_STEPS
from noisescale.lab.sweep.settings import SweepJob
from noisescale.lab.sweep.swept_size import SweptSize

SCHEDULED = (
    "The module has a learning-rate schedule ({}). It stays as it is at all batch sizes, with its"
    " peak at the searched learning rate. If the learning rate falls before the goal is reached,"
    " trainings take longer or miss the goal, and B_crit is wrong: for a sweep leave the decay out."
)

OF_A_BATCH = (
    "{} is logged by the training step: it is that of one batch. It scatters most at small batch"
    " sizes, where a lucky batch may reach the goal early. So B_crit may be wrong. For a sweep log"
    " a metric in `validation_step`."
)

MET = (
    "A single step has met {}. Steps to it say nothing. Stop, and begin another sweep with a harder"
    " goal and another `--output`."
)

SEEDED = (
    "{} sets a seed: all repetitions begin with the same weights. So their steps scatter less than"
    " those of other weights would. For a sweep set no seed."
)

TOO_SHORT = (
    "Batch size {}: trainings ended before the goal, by `--epochs {:g}`. Begin another sweep with"
    " more epochs, or an easier goal, and another `--output`."
)
FIXED = (
    "The module has a hyperparameter `batch_size` = {}. It stays as it is at all batch sizes. If"
    " the loss or a schedule is made with it, steps and B_crit are wrong: use the size of the batch"
    " instead."
)

ALIKE = (
    "All repetitions at batch size {} are the same: weights and order of the data do not follow the"
    " seed. How much the steps scatter is not known. Set no seed, and give no seeded generator."
)


def doubts_before(job: SweepJob) -> list[str]:
    """Return what makes a sweep doubtful before anything is trained."""
    found = []
    if job.own.schedules:
        found.append(SCHEDULED.format(", ".join(job.own.schedules)))
    if job.own.met:
        found.append(MET.format(job.goal))
    if job.own.seeded and job.search.repeats > 1:
        found.append(SEEDED.format(job.training.target))
    if job.own.of_a_batch:
        found.append(OF_A_BATCH.format(job.goal.metric))
    if job.own.fixed_batch_size is not None:
        found.append(FIXED.format(job.own.fixed_batch_size))
    return found


def doubts_about(sizes: Sequence[SweptSize], epochs: float) -> list[str]:
    """Return what the trainings of a sweep make doubtful."""
    doubts = []
    if alike := [size.batch_size for size in sizes if size.repetitions_are_alike]:
        doubts.append(ALIKE.format(_list(alike)))
    if short := [s.batch_size for s in sizes if s.count(OUT_OF_STEPS) and not s.reached]:
        doubts.append(TOO_SHORT.format(_list(short), epochs))
    return doubts


def _list(batch_sizes: list[int]) -> str:
    return ", ".join(f"{size:,}" for size in batch_sizes)
