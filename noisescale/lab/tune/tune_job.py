# SPDX-License-Identifier: Apache-2.0
"""A search along the front of cost and result, as a job: what is trained next, and until when."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar

from noisescale.checks import refuse, require_count, require_positive
from noisescale.lab.jobs.jobs import Entry, Record, State, Task, Training, device_hours
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
from noisescale.lab.sweep.settings import STREAM, ModuleDefaults, equal_shares
from noisescale.plan import Plan

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
        if self.epochs is not None and self.steps is not None:
            refuse(STEPS, f"be left out with `{EPOCHS}`", f"{self.steps}", "Give one of both.")

    def factor(self, size: float, base: float) -> float:
        """Return the steps at a batch size that make the progress of one step at the base.

        Examples:
            >>> Length(noise_scale=64.0).factor(64, 16)
            0.4
        """
        noise_scale = self.noise_scale
        return 1.0 if noise_scale is None else (1 + noise_scale / size) / (1 + noise_scale / base)


Suggest = Callable[["TuneJob", Mapping[str, Entry]], dict[str, Value]]
"""A function from a search and its tasks to the parameters of the next training."""


@dataclass(frozen=True)
class TuneJob:
    """The settings of a search. All workers have the same ones.

    A task's key is its number. What it trains depends on the results before it and on what is under
    way then, so it is settled when the task is added to the ledger. If two workers add the same
    number at once, the first one counts.
    """

    training: Training
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
    suggest: Suggest = field(kw_only=True, compare=False, repr=False)
    """Returns the parameters of the next training; `suggest` asks the sampler."""

    kind: ClassVar[str] = "tune"
    adjustable: ClassVar[tuple[str, ...]] = ("budget", "trials")

    def __post_init__(self) -> None:
        """Check that the trainings can be had."""
        if self.budget is None and self.trials is None:
            refuse("budget", "be given, or `trials`", "neither", "Give 1h, for example.")
        if self.budget is not None:
            require_positive("budget", self.budget, "Give 1h, for example.")
        if self.trials is not None:
            require_count("trials", self.trials, "Give 50, for example.")
        if self.max_cost is not None:
            require_positive("max_cost", self.max_cost, "Give a time such as 10m.")
        self._check_batch_sizes()

    def _check_batch_sizes(self) -> None:
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
    def devices(self) -> int:
        """Devices of each training."""
        return self.training.devices

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
        examples = self.own.examples if math.isfinite(self.own.examples) else None
        settings = asdict(self)
        del settings["suggest"]
        return {
            **settings,
            "own": {**asdict(self.own), "examples": examples},
            "parameters": [each.as_dict() for each in self.parameters],
        }

    @classmethod
    def from_dict(cls, read: Mapping[str, Any], suggest: Suggest) -> TuneJob:
        """Return what `as_dict` was called on."""
        own = dict(read["own"])
        own["examples"] = math.inf if own["examples"] is None else own["examples"]
        own["schedules"] = tuple(own["schedules"])
        fields = {
            "training": Training(**read["training"]),
            "own": ModuleDefaults(**own),
            "parameters": tuple(Parameter.from_dict(each) for each in read["parameters"]),
            "length": Length(**read["length"]),
            "timings": tuple(tuple(each) for each in read["timings"]),
        }
        return cls(**{**read, **fields}, suggest=suggest)

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
            steps = epochs * self._steps_of_epoch(self.base if equal else size)
        return max(1, math.ceil(steps * self.length.factor(size, self.base)))

    def _steps_of_epoch(self, size: float) -> int:
        examples = self.own.examples if math.isfinite(self.own.examples) else STREAM
        return max(1, math.floor(examples / size))

    def next_tasks(self, entries: Mapping[str, Entry]) -> list[Task]:
        """Return what waits; else a new training, while the budget lasts; else what is under way.

        A new training is only thought of when nothing waits: it learns from all results so far.
        """
        left = [entry for entry in entries.values() if not entry.result]
        waiting = [e for e in left if e.state in (State.WAITING, State.FAILED)]
        if waiting or self._is_spent(entries):
            return [Task(entry.key, entry.spec) for entry in waiting or left]
        number = len(entries)
        return [Task(str(number), self.spec(number, self.suggest(self, entries)))]

    def is_finished(self, entries: Mapping[str, Entry]) -> bool:
        """Return whether the budget is spent, and nothing is under way."""
        return self._is_spent(entries) and all(entry.result for entry in entries.values())

    def _is_spent(self, entries: Mapping[str, Entry]) -> bool:
        if self.trials is not None and len(entries) >= self.trials:
            return True
        return self.budget is not None and device_hours(entries.values()) >= self.budget

    def limit_of(self, spec: Record, entries: Mapping[str, Entry]) -> float:
        """Trainings end by themselves."""
        return math.inf

    def spec(self, number: int, parameters: Mapping[str, Value]) -> dict[str, Any]:
        """Return what a training needs to know."""
        plan, steps = self.plan(parameters), self.steps_of(parameters)
        size = plan.batch_size
        numbers = {name: parameters[name] for name in SWEPT if name in parameters}
        found: dict[str, Any] = {
            "kind": self.kind,
            "training": asdict(self.training),
            "metric": self.metric,
            "parameters": dict(parameters),
            "arguments": {k: value for k, value in parameters.items() if k not in FITTED},
            "batch_size": int(size),
            "device_batch_size": int(plan.device_batch_size),
            "accumulation": plan.accumulation,
            "hyperparameters": numbers,
            "beta2": None,
            "seed": self.seed + number,
            "most_steps": steps,
            "most_epochs": -1,
            "batches_of_epoch": None,
            "most_seconds": None if self.max_cost is None else self.max_cost / self.devices,
        }
        if math.isfinite(self.own.examples):
            found["batches_of_epoch"] = self._steps_of_epoch(size) * plan.accumulation
            found["most_epochs"] = math.ceil(steps / self._steps_of_epoch(size))
        if self.own.beta2 is not None:  # as in a sweep: the same half-life in examples
            found["beta2"] = self.own.beta2 ** (size / self.base)
        return found


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
