# SPDX-License-Identifier: Apache-2.0
"""The seconds of a step, by a run's own steps and by other timings of the same device."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import astuple, replace

from noisescale.history.segments import Array
from noisescale.prediction.run_hardware import TimedPlan, memory_in
from noisescale.printable import printable
from noisescale.step_time import FILE, DeviceTimes, FittedStepTime, StepTiming, fit_step_time

ALIKE = 1.5
"""Steps of a run and of a profile that differ by a larger factor are doubtful."""

_REMEDY = (
    "Time steps on the run's device, by `noisescale profile` with `--run`. To predict times on the"
    " other device, give the file as `step_times`."
)

APART = 4.0
"""Steps that differ by a larger factor are of different devices, or of different models."""


def find_profile(
    history: Mapping[str, Array], plans: Sequence[TimedPlan]
) -> tuple[DeviceTimes | None, tuple[str, ...]]:
    """Return what `profile` left in a run's folder, and doubts about it in whole sentences.

    Step times of another device than the run's are left out. They would be scaled to the run's, but
    another device has another largest batch, and other batch sizes are efficient on it.

    Args:
        history: The run, with the folder that it was read from.
        plans: The configurations that it was timed at.
    """
    source = getattr(history, "source", None)
    file = source and (source if source.is_dir() else source.parent) / FILE
    if not file or not file.is_file():
        return None, ()
    try:
        found = DeviceTimes.read(file)
    except (ValueError, OSError) as error:
        return None, (f"The step times in the run's folder are left out. {error}",)
    own, other = memory_in(history), found.memory
    if own is not None and not (other and own / 1.1 < other < 1.1 * own):
        memory = "without a memory of its own" if other is None else f"with {_gigabytes(other)}"
        return None, (
            f"Step times of another device are left out: {printable(file)} is of"
            f" {printable(found.device)}, {memory}, and the run's device has"
            f" {_gigabytes(own)}. {_REMEDY}",
        )
    factor = _factor(plans, found.timings)
    if max(factor, 1 / factor) <= ALIKE:
        return found, ()
    took = (
        f"a step of this run took {factor:.2g} times as long as a step like it in {printable(file)}"
    )
    if max(factor, 1 / factor) <= APART:
        return found, (
            f"Step times are doubtful: {took}. Another device may have been timed, or a busy one."
            " Times at other batch sizes are scaled by this factor. Time them again on the run's"
            " device, by `noisescale profile` with `--run`.",
        )
    return None, (
        f"Step times of another device, or of another model, are left out: {took}. {_REMEDY}",
    )


def _gigabytes(memory: float) -> str:
    return f"{memory / 1e9:.3g} GB"


def _factor(plans: Sequence[TimedPlan], profiled: tuple[StepTiming, ...]) -> float:
    """Return how many times as long the run's steps took as the same steps of a profile; else 1."""
    known = {(timing.devices, timing.nodes > 1) for timing in profiled}
    both = [x for x in plans if (x.timing.devices, x.timing.nodes > 1) in known]
    model = step_time_of((), profiled)
    return _seconds_of(both) / _seconds_of(both, model) if both and model else 1.0


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
    model = model.scale(_seconds_of(plans) / _seconds_of(plans, model))
    return replace(model, timings=(*model.timings, *(t for t in own if t not in fitted)))


def _seconds_of(plans: Sequence[TimedPlan], model: FittedStepTime | None = None) -> float:
    """Return the seconds that the timed steps of a run took, or take by a model."""
    if model is None:
        return sum(plan.steps * plan.mean for plan in plans)
    return sum(plan.steps * model.seconds(*astuple(plan.timing.plan)).value for plan in plans)
