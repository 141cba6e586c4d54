# SPDX-License-Identifier: Apache-2.0
"""The settings of a search, checked, and completed by what module and data bring along."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, replace
from os import PathLike
from typing import TYPE_CHECKING, NamedTuple

from noisescale.checks import refuse, require_count
from noisescale.lab.parameter_texts import Searched, search_parameters
from noisescale.lab.sweep.make_job import check_numbers, own_of
from noisescale.user_code.targets import own_arguments, shield_process

if TYPE_CHECKING:
    from noisescale.lab.jobs.jobs import Training
    from noisescale.lab.tune.tune_job import Length, TuneJob

EPOCHS = 10.0
"""The epochs of a training, if nothing says how long it is."""


class Known(NamedTuple):
    """What was measured before the search."""

    noise_scale: float | None
    timings: tuple[tuple[float, int, float], ...] = ()
    """Device batch, micro-batches, seconds a step."""


@dataclass(frozen=True)
class TuneOptions:
    """The arguments of `noisescale.tune` that say what is searched, and for how long."""

    metric: str
    search: Searched
    space: str | PathLike[str] | None
    maximize: bool
    budget: str | None
    trials: int | None
    max_cost: str | None
    seed: int
    epochs: float | None
    steps: int | None
    noise_scale: float | None
    run: str | PathLike[str] | None
    max_device_batch_size: int | None


def tune_job(training: Training, asked: TuneOptions) -> TuneJob:
    """Return the settings of the search, once module and data were tried for one step."""
    from noisescale.history.metrics import Goal
    from noisescale.lab.parameters import FITTED, SWEPT
    from noisescale.lab.tune.tune_job import TuneJob, center_parameters

    _check_metric(asked.metric)
    parameters = search_parameters(asked.search, asked.space)
    names = {each.name for each in parameters}
    known = _measurements(asked.noise_scale, asked.run)
    length = _length(asked, names, known.noise_scale)
    budget = None if asked.budget is None else read_budget(asked.budget)
    most = None if asked.max_cost is None else 3600 * read_budget(asked.max_cost, "max_cost")
    if budget is None and asked.trials is None:
        refuse("budget", "be given, or `trials`", "neither", "Give a budget such as 1h.")
    if asked.trials is not None:
        require_count("trials", asked.trials, "Give 50, for example.")
    check_numbers(training, asked.seed, asked.max_device_batch_size)

    with shield_process():
        defaults = own_arguments(training.target, [n for n in names if n not in FITTED])
    begin = {each.name: each.with_center(defaults.get(each.name)).center for each in parameters}
    arguments = {name: value for name, value in begin.items() if name not in FITTED}
    size = {each.name: each for each in parameters}.get("batch_size")
    usual = int(size.low) if size is not None else training.devices
    searched = [name for name in SWEPT if name in names]
    own = own_of(training, Goal(asked.metric, 0.0, "<"), usual, searched, arguments)
    own = replace(own, seeded=False)  # no training is repeated with another seed
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
        asked.metric,
        asked.maximize,
        center_parameters(parameters, own, length, defaults),
        length,
        budget,
        asked.trials,
        most,
        asked.seed,
        known.timings,
        asked.max_device_batch_size,
    )


def _length(asked: TuneOptions, searched: Collection[str], noise_scale: float | None) -> Length:
    from noisescale.lab.tune.tune_job import Length

    epochs, steps = asked.epochs, asked.steps
    if steps is not None and (epochs is not None or "epochs" in searched):
        refuse("steps", "be left out where epochs are given or searched", steps)
    if epochs is not None and "steps" in searched:
        refuse("epochs", "be left out where steps are searched", f"{epochs:g}")
    if epochs is None and steps is None and "steps" not in searched:
        epochs = EPOCHS
    return Length(epochs, steps, noise_scale)


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


def _measurements(noise_scale: float | None, run: str | PathLike[str] | None) -> Known:
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
    from noisescale.prediction.run_hardware import timed_plans

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
    timed = [t.timing for t in timed_plans(history) if t.timing.devices == 1]
    timings = tuple((t.device_batch_size, t.accumulation, t.seconds) for t in timed)
    return Known(found.critical_batch_size.value, timings)
