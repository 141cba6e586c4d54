# SPDX-License-Identifier: Apache-2.0
"""The result of one training of a sweep."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType

from noisescale.history.metrics import Goal
from noisescale.lab.compare.measurements import Measurements, Trial
from noisescale.lab.compare.outcomes import Outcome, outcome_of
from noisescale.lab.jobs.jobs import FAILED, Entry
from noisescale.lab.parameters import LEARNING_RATE

REACHED, DIVERGED, OUT_OF_STEPS = "reached", "diverged", "out of steps"
PRUNED = "stopped early"
"""How trainings end."""


@dataclass(frozen=True)
class TrialResult:
    """The evaluations of one training of a sweep, and how the training ended."""

    goal: Goal
    batch_size: float
    hyperparameters: Mapping[str, float]
    seed: int
    steps: Sequence[float]
    values: Sequence[float]
    """The metric at each of the steps."""
    seconds: Sequence[float]
    """The time of training until each step, without the evaluations."""
    ended: str
    """One of the words above, or `FAILED`."""
    device_seconds: float = 0.0
    """The time of the whole process, with its start and its evaluations, times the devices.

    It is 0 if it is not known, as for a training that failed.
    """

    @classmethod
    def of(cls, entry: Entry) -> TrialResult:
        """Return the result of a task that is done or given up."""
        spec, result = entry.spec, entry.result
        return cls(
            Goal(**spec["goal"]),
            spec["batch_size"],
            spec["hyperparameters"],
            spec["seed"],
            result.get("steps", ()),
            [math.nan if value is None else value for value in result.get("values", ())],
            result.get("seconds", ()),
            FAILED if FAILED in result else result["ended"],
            float(result.get("device_seconds", 0.0)),
        )

    @property
    def name(self) -> str:
        """The key of its task."""
        return trial_name(self.batch_size, self.hyperparameters, self.seed)

    @property
    def learning_rate(self) -> float:
        """The learning rate."""
        return self.hyperparameters[LEARNING_RATE]

    @property
    def reached(self) -> bool:
        """Whether the training reached the goal."""
        return self.outcome.reached is not None

    @cached_property
    def outcome(self) -> Outcome:
        """When the training reached the goal, as `compare` takes it."""
        others = {k: v for k, v in self.hyperparameters.items() if k != LEARNING_RATE}
        examples = [step * self.batch_size for step in self.steps]
        trial = Trial(
            self.name,
            Measurements(self.steps, self.values, examples=examples, seconds=self.seconds),
            batch_size=self.batch_size,
            learning_rate=self.learning_rate,
            hyperparameters=MappingProxyType({**others, "seed": float(self.seed)}),
            feasible=self.ended not in (DIVERGED, FAILED),
        )
        return outcome_of(trial, self.goal)


def trial_name(batch_size: float, hyperparameters: Mapping[str, float], seed: int) -> str:
    """Return the name of a training, which its folder has too.

    Examples:
        >>> trial_name(64, {"learning_rate": 0.1, "momentum": 0.9}, 2)
        'batch_size=64,learning_rate=0.1,momentum=0.9,seed=2'
    """
    parts = {"batch_size": batch_size, **hyperparameters, "seed": seed}
    return ",".join(f"{name}={value:.15g}" for name, value in parts.items())
