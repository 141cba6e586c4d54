# SPDX-License-Identifier: Apache-2.0
"""Trainings with a cost and a result, and which of them are the best for their cost."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from noisescale.lab.jobs.jobs import FAILED, Entry
from noisescale.lab.parameters import Parameter, Value
from noisescale.lab.tune.scaling_laws import PowerLaw, power_law
from noisescale.lab.tune.tune_job import DONE, TuneJob, cost_of


@dataclass(frozen=True)
class TunedTrial:
    """A training that has ended."""

    number: int
    """The number of the training, from 0. Number 0 has the module's own settings."""
    parameters: Mapping[str, Value]
    cost: float
    """Device-seconds of training; NaN if unknown."""
    value: float
    """The metric at the end; NaN if there is none."""
    ended: str = "done"
    reason: str = ""
    """Why it failed."""
    batch_size: float = math.nan
    steps: float = math.nan

    @classmethod
    def of(cls, entry: Entry) -> TunedTrial:
        """Return the training of a task that is done or given up."""
        result, spec = entry.result, entry.spec
        reason = str(result.get(FAILED, ""))
        ended = FAILED if reason else str(result["ended"])
        return cls(
            int(entry.key),
            spec["parameters"],
            cost_of(result),
            float(result["value"]) if ended == DONE else math.nan,
            ended,
            reason,
            float(spec["batch_size"]),
            float(result.get("steps", math.nan)),
        )

    @property
    def complete(self) -> bool:
        """Whether it has a result."""
        return math.isfinite(self.value) and math.isfinite(self.cost)


@dataclass(frozen=True)
class Setting:
    """All complete trainings of the same parameters."""

    trials: tuple[TunedTrial, ...]

    @property
    def first(self) -> TunedTrial:
        """The first training."""
        return self.trials[0]

    @property
    def cost(self) -> float:
        """The mean cost."""
        return math.fsum(trial.cost for trial in self.trials) / len(self.trials)

    @property
    def value(self) -> float:
        """The mean result."""
        return math.fsum(trial.value for trial in self.trials) / len(self.trials)


@dataclass(frozen=True)
class CostFront:
    """All trainings of a search, and the front of cost and result."""

    metric: str
    maximize: bool
    searched: tuple[Parameter, ...]
    trials: tuple[TunedTrial, ...]

    @classmethod
    def of(cls, job: TuneJob, entries: Mapping[str, Entry]) -> CostFront:
        """Return all trainings of a search that have ended, with the front."""
        trials = [TunedTrial.of(each) for each in entries.values() if each.result]
        trials.sort(key=lambda trial: trial.number)
        return cls(job.metric, job.maximize, job.parameters, tuple(trials))

    @cached_property
    def settings(self) -> tuple[Setting, ...]:
        """The complete trainings, those of the same parameters together."""
        of: dict[tuple[tuple[str, Value], ...], list[TunedTrial]] = {}
        for trial in self.trials:
            if trial.complete:
                of.setdefault(tuple(trial.parameters.items()), []).append(trial)
        return tuple(Setting(tuple(trials)) for trials in of.values())

    @cached_property
    def front(self) -> tuple[Setting, ...]:
        """The settings that no cheaper one equals, by rising cost."""
        sign = -1.0 if self.maximize else 1.0
        found: list[Setting] = []
        for each in sorted(self.settings, key=lambda s: (s.cost, sign * s.value)):
            if not found or sign * each.value < sign * found[-1].value:
                found.append(each)
        return tuple(found)

    @property
    def best(self) -> Setting | None:
        """The setting with the best result; None if no training has one."""
        return self.front[-1] if self.front else None

    @property
    def failures(self) -> tuple[TunedTrial, ...]:
        """The trainings without a result."""
        return tuple(trial for trial in self.trials if not trial.complete)

    @cached_property
    def laws(self) -> dict[str, PowerLaw | None]:
        """The power law of each numeric parameter along the front; None where there is none."""
        costs = [each.cost for each in self.front]
        return {
            each.name: power_law(costs, self.along_front(each.name))
            for each in self.searched
            if each.is_number
        }

    def along_front(self, name: str) -> Sequence[float]:
        """Return the values of a numeric parameter along the front."""
        return [float(each.first.parameters[name]) for each in self.front]
