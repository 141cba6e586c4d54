# SPDX-License-Identifier: Apache-2.0
"""What came of a training of a sweep."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from noisescale.history.metrics import Goal
from noisescale.lab.compare.measurements import Measurements, Trial
from noisescale.lab.compare.outcomes import Outcome, outcome_of
from noisescale.lab.jobs.jobs import FAILED, Record
from noisescale.lab.parameters import LEARNING_RATE

REACHED, DIVERGED, PRUNED, OUT_OF_STEPS = "reached", "diverged", "pruned", "out of steps"
"""How trainings end."""


@dataclass(frozen=True)
class TrialResult:
    """The evaluations of one training, and how the training ended."""

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
    devices: int = 1
    device_seconds: float = 0.0
    """The time of the whole process, with its start and its evaluations, times the devices."""
    reason: str = ""
    """Why it failed."""

    @classmethod
    def of(cls, spec: Record, result: Record) -> TrialResult:
        """Return the result of a task."""
        failed = result.get(FAILED, "")
        return cls(
            spec["batch_size"],
            spec["hyperparameters"],
            spec["seed"],
            result.get("steps", ()),
            [math.nan if value is None else value for value in result.get("values", ())],
            result.get("seconds", ()),
            FAILED if failed else result["ended"],
            result.get("devices", 1),
            result.get("device_seconds", 0.0),
            failed,
        )

    def outcome(self, goal: Goal) -> Outcome:
        """Return when the training reached the goal."""
        return outcome_of(self.trial(), goal)

    def trial(self, submission: str = "", name: str = "") -> Trial:
        """Return the training as `compare` takes it."""
        settings: dict[str, Any] = dict(self.hyperparameters)
        rate = settings.pop(LEARNING_RATE)
        examples = [step * self.batch_size for step in self.steps]
        return Trial(
            name or trial_name(self.batch_size, self.hyperparameters, self.seed),
            Measurements(self.steps, self.values, examples=examples, seconds=self.seconds),
            submission,
            batch_size=self.batch_size,
            learning_rate=rate,
            hyperparameters=MappingProxyType({**settings, "seed": float(self.seed)}),
            feasible=self.ended not in (DIVERGED, FAILED),
        )


def trial_name(batch_size: float, hyperparameters: Mapping[str, float], seed: int) -> str:
    """Return the name of a training, which its folder has too.

    Examples:
        >>> trial_name(64, {"learning_rate": 0.1, "momentum": 0.9}, 2)
        'batch_size=64,learning_rate=0.1,momentum=0.9,seed=2'
    """
    parts = {"batch_size": batch_size, **hyperparameters, "seed": seed}
    return ",".join(f"{name}={value:.15g}" for name, value in parts.items())
