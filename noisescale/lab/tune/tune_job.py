# SPDX-License-Identifier: Apache-2.0
"""A search along the front of cost and result, as a job: what is trained next, and until when."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from scipy.optimize import nnls

from noisescale.checks import refuse, require_count, require_positive
from noisescale.lab.jobs.jobs import Entry, Job, Record, State, Task, Training, device_hours
from noisescale.lab.parameters import (
    BATCH_SIZE,
    EPOCHS,
    FITTED,
    LEARNING_RATE,
    MOMENTUM,
    POW2,
    STEPS,
    SWEPT,
    WEIGHT_DECAY,
    Parameter,
    Value,
)
from noisescale.lab.sweep.settings import ModuleDefaults, equal_shares, training_spec
from noisescale.plan import Plan

if TYPE_CHECKING:
    from optuna.samplers import BaseSampler
    from optuna.trial import FrozenTrial

DONE, TOO_DEAR = "done", "too dear"
"""How trainings end, besides "diverged"."""


@dataclass(frozen=True)
class Length:
    """How long a training is, unless this is searched.

    With a noise scale, all batch sizes get the steps that make the same progress by the law of
    McCandlish et al. 2018, S(B) = S_min·(1 + B_crit/B): a training of S steps at the batch size of
    the loader, B0, is one of S·(1 + B_crit/B)/(1 + B_crit/B0) steps at B.
    """

    epochs: float | None = None
    steps: int | None = None
    noise_scale: float | None = None
    """B_crit, in examples; None for the same number of epochs, or steps, at all batch sizes."""

    def __post_init__(self) -> None:
        """Check the numbers."""
        if self.epochs is not None:
            require_positive(EPOCHS, self.epochs, "Give 10, for example.")
        if self.steps is not None:
            require_count(STEPS, self.steps, "Give 1000, for example.")
        if self.noise_scale is not None:
            require_positive("noise_scale", self.noise_scale, "Give what a run measured.")

    def factor(self, size: float, base: float) -> float:
        """Return the steps at a batch size that make the progress of one step at the base.

        Examples:
            >>> Length(noise_scale=64.0).factor(64, 16)
            0.4
        """
        noise_scale = self.noise_scale
        return 1.0 if noise_scale is None else (1 + noise_scale / size) / (1 + noise_scale / base)


COST = "cost"
"""The user attribute of a trial that has its cost."""

_LEAST = 1e-4
"""Device-seconds of a training that took no time that a clock would show."""

Prior = Callable[[Mapping[str, Value]], float]
"""A function from parameters to the device-seconds that their training is to cost."""


@dataclass(frozen=True)
class TuneJob(Job):
    """The settings of a search. All workers have the same ones.

    A task's key is its number. What it trains depends on the results before it and on what is under
    way then, so it is settled when the task is added to the ledger. If two workers add the same
    number at once, the first one counts.
    """

    own: ModuleDefaults
    metric: str
    maximize: bool
    parameters: tuple[Parameter, ...]
    length: Length
    budget: float | None = None
    """Device-hours, with the starts of processes; None for no limit."""
    trials: int | None = None
    """None for no limit."""
    max_cost: float | None = None
    """Device-seconds of one training; None for no limit."""
    seed: int = 0
    timings: tuple[tuple[float, int, float], ...] = ()
    """Device batch, micro-batches and seconds of steps that were timed before the search."""
    max_device_batch_size: int | None = None

    kind: ClassVar[str] = "tune"
    adjustable: ClassVar[tuple[str, ...]] = ("budget", "trials")

    def __post_init__(self) -> None:
        """Check that the batch sizes can be trained."""
        searched = {each.name: each for each in self.parameters}.get(BATCH_SIZE)
        if searched is None:
            self.plan({})
            return
        if searched.high > self.own.examples:
            refuse(
                "search",
                f"have batch sizes of at most the number of examples, {self.own.examples:,.0f}",
                f"{searched.high:,.0f}",
                "Give a smaller end.",
            )
        devices = self.training.devices
        if devices > 1 and (searched.kind != POW2 or devices & (devices - 1)):
            refuse(
                "search",
                f"have batch sizes that {devices} devices share, powers of two",
                f"{searched.text()} ({searched.kind})",
                "Give powers of two, for a number of devices that is one.",
            )
        if searched.low < devices:
            refuse(
                "search",
                f"have batch sizes of at least the number of devices, {devices}",
                f"{searched.low:g}",
                "Give a larger one.",
            )

    @property
    def base(self) -> float:
        """The batch size of the module's loader."""
        return self.own.batch_size or 1

    @property
    def center(self) -> dict[str, Value]:
        """The parameters with which the search begins."""
        return {
            each.name: each.middle if each.center is None else each.center
            for each in self.parameters
        }

    def as_dict(self) -> dict[str, Any]:
        """Return the settings as JSON can hold them."""
        return {**asdict(self), "parameters": [each.as_dict() for each in self.parameters]}

    @classmethod
    def from_dict(cls, read: Mapping[str, Any]) -> TuneJob:
        """Return what `as_dict` was called on."""
        fields = {
            "training": Training(**read["training"]),
            "own": ModuleDefaults.from_dict(read["own"]),
            "parameters": tuple(Parameter.from_dict(each) for each in read["parameters"]),
            "length": Length(**read["length"]),
            "timings": tuple(tuple(each) for each in read["timings"]),
        }
        return cls(**{**read, **fields})

    def plan(self, parameters: Mapping[str, Value]) -> Plan:
        """Return how a batch is made up."""
        size = int(parameters.get(BATCH_SIZE, self.base))
        return equal_shares(size, self.devices, self.max_device_batch_size or size)

    def steps_of(self, parameters: Mapping[str, Value]) -> int:
        """Return the steps of a training."""
        size = self.plan(parameters).batch_size
        steps = float(parameters.get(STEPS, self.length.steps or 0))
        if not steps:
            epochs = float(parameters.get(EPOCHS, self.length.epochs or 1.0))
            equal = self.length.noise_scale is not None
            steps = epochs * self.own.steps_of_epoch(self.base if equal else size)
        return max(1, math.ceil(steps * self.length.factor(size, self.base)))

    def next_tasks(self, entries: Mapping[str, Entry]) -> list[Task]:
        """Return what waits; else a new training, while the budget lasts; else what is under way.

        A new training is only thought of when nothing waits: it learns from all results so far.
        """
        left = [entry for entry in entries.values() if not entry.result]
        waiting = [e for e in left if e.state in (State.WAITING, State.FAILED)]
        if waiting or self._is_spent(entries):
            return [Task(entry.key, entry.spec) for entry in waiting or left]
        number = len(entries)
        return [Task(str(number), self.spec(number, suggest(self, entries)))]

    def is_finished(self, entries: Mapping[str, Entry]) -> bool:
        """Return whether the budget is spent, and nothing is under way."""
        return self._is_spent(entries) and all(entry.result for entry in entries.values())

    def _is_spent(self, entries: Mapping[str, Entry]) -> bool:
        if self.trials is not None and len(entries) >= self.trials:
            return True
        return self.budget is not None and device_hours(entries.values()) >= self.budget

    def spec(self, number: int, parameters: Mapping[str, Value]) -> dict[str, Any]:
        """Return what a training needs to know."""
        plan, steps = self.plan(parameters), self.steps_of(parameters)
        numbers = {name: parameters[name] for name in SWEPT if name in parameters}
        return {
            "kind": self.kind,
            "training": asdict(self.training),
            "metric": self.metric,
            "parameters": dict(parameters),
            "arguments": {k: value for k, value in parameters.items() if k not in FITTED},
            **training_spec(self.own, plan, steps, self.base, numbers, self.seed + number),
            "most_seconds": None if self.max_cost is None else self.max_cost / self.devices,
        }


def values_of(own: ModuleDefaults) -> dict[str, Any]:
    """Return what module and data bring along, by the names of parameters."""
    return {
        LEARNING_RATE: own.learning_rate,
        MOMENTUM: own.momentum,
        WEIGHT_DECAY: own.weight_decay,
        BATCH_SIZE: own.batch_size,
    }


def center_parameters(
    parameters: Iterable[Parameter],
    own: ModuleDefaults,
    length: Length,
    arguments: Mapping[str, Any],
) -> tuple[Parameter, ...]:
    """Return parameters that begin at the module's own settings, as far as it has them.

    Args:
        parameters: As they were given. A centre that was given stays.
        own: Of module and data.
        length: Of a training.
        arguments: Defaults of the function that makes the module.
    """
    begin = {**arguments, **values_of(own), EPOCHS: length.epochs, STEPS: length.steps}
    found = []
    for each in parameters:
        value = begin.get(each.name)
        real = isinstance(value, float) and each.name not in FITTED
        if real and each.whole and each.kind != POW2:
            each = Parameter.from_dict({**each.as_dict(), "whole": False})
        found.append(each.with_center(value))
    return tuple(found)


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


def prior_cost(job: TuneJob, entries: Mapping[str, Entry]) -> Prior | None:
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
