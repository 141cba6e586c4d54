# SPDX-License-Identifier: Apache-2.0
"""Ask the sampler for the parameters of the next training."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from scipy.optimize import nnls

from noisescale.lab.jobs.jobs import Entry, Record
from noisescale.lab.parameters import Value
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


def prior_cost(
    job: TuneJob, entries: Mapping[str, Entry]
) -> Callable[[Mapping[str, Value]], float] | None:
    """Return a function from parameters to device-seconds; None before a step was timed.

    The steps of a training are known: from its epochs and its batch size or, for equal progress,
    from the noise scale. A step of K micro-batches of b examples on a device is taken to last
    K·(u + v·b). Both constants are fitted, with relative errors, to the trainings so far; before
    there are any, to the step times of a run. Other parameters, such as a width, may change them:
    what the prior does not know is left to the sampler to learn.
    """
    timed = [
        (each.spec["device_batch_size"], each.spec["accumulation"], seconds / steps)
        for each in entries.values()
        if (steps := each.result.get("steps", 0)) and (seconds := each.result.get("seconds", 0.0))
    ]
    timed = timed or list(job.timings)
    if not timed:
        return None
    size, count, seconds = np.array(timed, dtype=np.float64).T
    rows = np.stack([count, count * size], axis=1) / seconds[:, None]
    (fixed, each), _ = nnls(rows, np.ones(len(rows)))

    def cost(parameters: Mapping[str, Value]) -> float:
        plan = job.plan(parameters)
        step = plan.accumulation * (fixed + each * plan.device_batch_size)
        return float(job.steps_of(parameters) * step * job.devices)

    return cost
