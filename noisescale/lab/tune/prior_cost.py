# SPDX-License-Identifier: Apache-2.0
"""What a training will cost, before it was tried: its steps times the seconds of a step."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
from scipy.optimize import nnls

from noisescale.lab.jobs.jobs import Entry
from noisescale.lab.parameters import Value
from noisescale.lab.tune.tune_job import TuneJob


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
