# SPDX-License-Identifier: Apache-2.0
"""The seconds of a step, by a run's own steps and by other timings of the same device."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import astuple, replace

from noisescale.prediction.run_hardware import TimedPlan
from noisescale.step_time import FittedStepTime, StepTiming, fit_step_time


@functools.lru_cache(maxsize=64)  # pages and reports use one run many times
def step_time_of(
    plans: tuple[TimedPlan, ...], profiled: tuple[StepTiming, ...] = ()
) -> FittedStepTime | None:
    """Return step times that reproduce the time of a run's own steps; None if none are known.

    A run is slower than a profile, as it writes logs and waits for its data. So the profile says
    how the time of a step depends on its configuration, and the run says how long it takes:

        seconds = level·model(configuration)
        level   = Σ steps·mean seconds / Σ steps·model(configuration of these steps)

    The medians of the run's own configurations take part in the fit of the model if no profile has
    their number of devices.

    Args:
        plans: The configurations that the run was timed at.
        profiled: Timings of the same device by `profile`.
    """
    known = {(timing.devices, timing.nodes > 1) for timing in profiled}
    own = [plan.timing for plan in plans]
    fitted = [*profiled, *(t for t in own if (t.devices, t.nodes > 1) not in known)]
    if not fitted:
        return None
    model = fit_step_time(fitted)
    if not plans:
        return model
    model = model.scaled(_seconds_of(plans) / _seconds_of(plans, model))
    return replace(model, timings=(*model.timings, *(t for t in own if t not in fitted)))


def _seconds_of(plans: Sequence[TimedPlan], model: FittedStepTime | None = None) -> float:
    """Return the seconds that the timed steps of a run took, or take by a model."""
    if model is None:
        return sum(plan.steps * plan.mean for plan in plans)
    return sum(plan.steps * model.seconds(*astuple(plan.timing.plan)).value for plan in plans)
