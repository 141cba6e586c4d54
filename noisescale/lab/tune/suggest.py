# SPDX-License-Identifier: Apache-2.0
"""Ask the sampler for the parameters of the next training."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from noisescale.lab.jobs.jobs import Entry, Record
from noisescale.lab.parameters import Value
from noisescale.lab.tune.prior_cost import prior_cost
from noisescale.lab.tune.tune_job import DONE, TuneJob

if TYPE_CHECKING:
    from optuna.samplers import BaseSampler
    from optuna.trial import FrozenTrial

COST = "cost"
"""The user attribute of a trial that has its cost."""

_LEAST = 1e-4
"""Device-seconds of a training that took no time that a clock would show."""

Prior = Callable[[Mapping[str, Any]], float]


def suggest(
    job: TuneJob, entries: Mapping[str, Entry], *, with_prior: bool = True
) -> dict[str, Value]:
    """Return the parameters of the next training.

    The first has the module's own settings: it is what the others are compared with. After that
    the sampler is asked. It sees a study that is made anew from the results, so that any worker
    asks the same question. Trainings under way are trials that run.

    Args:
        job: The search.
        entries: All trainings.
        with_prior: Whether the sampler gets the cost from `prior_cost`, or learns it from nothing.
    """
    if not entries:
        return job.center
    import optuna

    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    try:
        study = optuna.create_study(
            direction="maximize" if job.maximize else "minimize",
            sampler=sampler_of(job, prior_cost(job, entries) if with_prior else None),
        )
        for entry in entries.values():
            study.add_trial(_trial(job, entry))
        trial = study.ask({each.name: each.distribution for each in job.parameters})
    finally:
        optuna.logging.set_verbosity(before)
    return {each.name: each.nearest(trial.params[each.name]) for each in job.parameters}


def sampler_of(job: TuneJob, prior: Prior | None) -> BaseSampler:
    """Return the sampler of a search."""
    from noisescale.lab.tune.carbs.sampler import CarbsSampler

    spaces = {each.name: each.space for each in job.parameters if each.space is not None}
    return CarbsSampler(
        seed=job.seed,
        centers=job.center,
        spaces=spaces,
        max_cost=job.max_cost,
        cost=COST,
        cost_prior=prior,
    )


def _trial(job: TuneJob, entry: Entry) -> FrozenTrial:
    from optuna.trial import TrialState, create_trial

    values, result = entry.spec["parameters"], entry.result
    of_study: dict[str, Any] = {
        "params": {each.name: values[each.name] for each in job.parameters},
        "distributions": {each.name: each.distribution for each in job.parameters},
    }
    if not result:
        return create_trial(state=TrialState.RUNNING, **of_study)
    if result.get("ended") == DONE:
        attributes = {COST: max(cost_of(result), _LEAST)}
        value = float(result["value"])
        return create_trial(
            state=TrialState.COMPLETE, value=value, user_attrs=attributes, **of_study
        )
    # Also one that was given up: it failed twice, or was lost with three workers.
    return create_trial(state=TrialState.FAIL, **of_study)


def cost_of(result: Record) -> float:
    """Return the device-seconds of training, without the start of the process; NaN if unknown."""
    return float(result.get("seconds", math.nan)) * int(result.get("devices", 1))
