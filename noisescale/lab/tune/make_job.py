# SPDX-License-Identifier: Apache-2.0
"""The settings of a search, checked, and completed by what module and data bring along."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from noisescale.checks import refuse, require_count
from noisescale.lab.jobs.jobs import TOO_LARGE
from noisescale.lab.parameter_texts import Searched, search_parameters
from noisescale.made.targets import (
    module_and_data,
    own_arguments,
    refuse_out_of_memory,
    shield_process,
)

if TYPE_CHECKING:
    from noisescale.lab.jobs.jobs import Training
    from noisescale.lab.tune.tune_job import TuneJob

EPOCHS = 10.0
"""The epochs of a training, if nothing says how long it is."""

MOST_SEED = 2**31


class Known(NamedTuple):
    """What was measured before the search."""

    noise_scale: float | None
    timings: tuple[tuple[float, int, float], ...] = ()
    """Device batch, micro-batches, seconds a step."""


def tune_job(
    training: Training,
    metric: str,
    search: Searched,
    space: Path | None,
    *,
    maximize: bool,
    budget: str | None,
    trials: int | None,
    max_cost: str | None,
    seed: int,
    epochs: float | None,
    steps: int | None,
    noise_scale: float | None,
    run: Path | None,
    max_device_batch_size: int | None,
) -> TuneJob:
    """Return the settings of the search, once module and data were tried for one step."""
    from noisescale.history.metrics import Goal
    from noisescale.lab.parameters import FITTED, SWEPT
    from noisescale.lab.sweep.trial_fit import MadeModule, describe
    from noisescale.lab.tune.suggest import suggest
    from noisescale.lab.tune.tune_job import Length, TuneJob, center_parameters
    from noisescale.lightning.trainer_access import isolate_rng
    from noisescale.lightning.training import seed_all

    _check_metric(metric)
    parameters = search_parameters(search, space)
    names = {each.name for each in parameters}
    if steps is not None and (epochs is not None or "epochs" in names):
        refuse("steps", "be left out where epochs are given or searched", steps, "Leave it out.")
    if epochs is not None and "steps" in names:
        refuse("epochs", "be left out where steps are searched", f"{epochs:g}", "Leave it out.")
    if epochs is None and steps is None and "steps" not in names:
        epochs = EPOCHS
    known = _measurements(noise_scale, run)
    length = Length(epochs, steps, known.noise_scale)
    hours = None if budget is None else read_budget(budget)
    most = None if max_cost is None else 3600 * read_budget(max_cost, "max_cost")
    if hours is None and trials is None:
        refuse("budget", "be given, or `trials`", "neither", "Give a budget such as 1h.")
    if trials is not None:
        require_count("trials", trials, "Give 50, for example.")
    if not 0 <= seed < MOST_SEED:
        refuse("seed", f"be from 0 to below {MOST_SEED:,}", f"{seed:,}", "Give 0.")
    require_count("devices", training.devices, "Give 1.")
    if max_device_batch_size is not None:
        require_count("max_device_batch_size", max_device_batch_size, "Leave it out for no limit.")

    with shield_process():
        defaults = own_arguments(training.target, [n for n in names if n not in FITTED])
    begin = {each.name: each.with_center(defaults.get(each.name)).center for each in parameters}
    arguments = {name: value for name, value in begin.items() if name not in FITTED}
    size = {each.name: each for each in parameters}.get("batch_size")
    usual = int(size.low) if size is not None else training.devices
    searched = [name for name in SWEPT if name in names]
    with (
        shield_process(),
        isolate_rng(),
        refuse_out_of_memory("max_device_batch_size", TOO_LARGE),
    ):
        seed_all(seed)
        module, data = module_and_data(training.target, training.data, arguments)
        goal = Goal(metric, 0.0, "<")
        own = describe(MadeModule(module, data), training, goal, usual, searched)
    if own.batch_size is None and size is None:
        refuse(
            "search",
            "name batch_size for data whose loader does not say it",
            ", ".join(sorted(names)),
            "Add, for example, batch_size=16..1024.",
        )
    return TuneJob(
        training,
        own,
        metric,
        maximize,
        center_parameters(parameters, own, length, defaults),
        length,
        hours,
        trials,
        most,
        seed,
        known.timings,
        max_device_batch_size,
        suggest=suggest,
    )


def _check_metric(metric: str) -> None:
    if not metric or any(sign in metric for sign in "<>="):
        refuse(
            "metric",
            "be the name of a metric, and no goal",
            repr(metric),
            "Write, for example, val_loss; a metric that is to rise has `maximize`.",
        )


def read_budget(text: str, argument: str = "budget") -> float:
    """Return device-hours from a text like "0.5h", "30m" or "90s".

    Raises:
        ValueError: If the text has another form, or is not positive.

    Examples:
        >>> read_budget("0.5h"), read_budget("30m")
        (0.5, 0.5)
    """
    hours = {"h": 1.0, "m": 1 / 60, "s": 1 / 3600}
    number, unit = text.strip()[:-1], text.strip()[-1:]
    try:
        found = float(number) * hours[unit]
    except (ValueError, KeyError):
        found = math.nan
    if not 0 < found < math.inf:
        refuse(
            argument,
            "be positive device-hours with a unit",
            repr(text),
            "Write, for example, 0.5h or 30m.",
        )
    return found


def _measurements(noise_scale: float | None, run: Path | None) -> Known:
    """Return what is known before: given, or measured by a run.

    Raises:
        ValueError: If both are given, or the run does not resolve its noise scale.
    """
    if run is None:
        return Known(noise_scale)
    if noise_scale is not None:
        refuse("noise_scale", "be left out with `run`", f"{noise_scale:g}", "Give one of both.")
    from noisescale.history.reading import read_run
    from noisescale.prediction.predict import predict
    from noisescale.prediction.run_hardware import timings_of

    history = read_run(run)
    found = predict(history)
    if not found.resolved or not found.critical_batch_size.value > 0:
        at_least = found.critical_batch_size.low
        some = math.isfinite(at_least) and at_least > 0
        refuse(
            "run",
            "have a noise scale with an upper end",
            str(run) + (f", which is at least {at_least:.3g}" if some else ", without one"),
            "Train it longer, or give `noise_scale`.",
        )
    timed = [t for t in timings_of(history) if t.devices == 1]
    timings = tuple((t.device_batch_size, t.accumulation, t.seconds) for t in timed)
    return Known(found.critical_batch_size.value, timings)
