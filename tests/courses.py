# SPDX-License-Identifier: Apache-2.0
"""Trials that reach a loss of 0.1 at a given step, for tests of what is made of them."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from noisescale.lab.compare.measurements import Measurements, Trial

EVERY = 10
"""Steps between two evaluations."""


def trial(
    steps: float, *, until: float | None = None, seconds: float | None = None, **where: Any
) -> Trial:
    """A trial whose loss falls from 0.9, and is 0.1 from `steps` on.

    Args:
        steps: Infinite if the goal is never reached.
        until: The last step; the one after `steps` if it is not given.
        seconds: Of each step.
        **where: Of `Trial`.
    """
    last = until if until is not None else (steps + EVERY if np.isfinite(steps) else 1000)
    at = np.arange(EVERY, last + 1, EVERY)
    losses = np.where(at >= steps, 0.1, 0.9 - 0.2 * at / last)
    clocks = {} if seconds is None else {"seconds": seconds * at}
    where.setdefault("name", f"{where.get('submission', 'run')}/{steps:g}")
    return Trial(measurements=Measurements(at, losses, **clocks), **where)


def sweep(
    steps: Mapping[float, float], rates: Mapping[float, float] | None = None, **where: Any
) -> list[Trial]:
    """Trials at batch sizes with the best of three learning rates in the middle.

    Args:
        steps: From each batch size to the steps of its best trial.
        rates: From a batch size to its best learning rate. Default: 0.1.
        **where: Of `Trial`.
    """
    return [
        trial(
            steps[size] * (1 if factor == 1 else 2),
            batch_size=float(size),
            learning_rate=(rates or {}).get(size, 0.1) * factor,
            name=f"{size}/{factor}",
            **where,
        )
        for size in steps
        for factor in (0.5, 1, 2)
    ]
