# SPDX-License-Identifier: Apache-2.0
"""What a sweep has found at one batch size."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from noisescale.lab.compare.outcomes import Outcome, middle
from noisescale.lab.jobs.jobs import FAILED, Entry
from noisescale.lab.sweep.results import DIVERGED, OUT_OF_STEPS, PRUNED, TrialResult
from noisescale.lab.sweep.search import Progress
from noisescale.lab.sweep.settings import SweepJob, results_at
from noisescale.report.records import fields_of


@dataclass(frozen=True)
class SweptSize:
    """What a sweep has found at one batch size."""

    batch_size: int
    results: tuple[TrialResult, ...]
    """All trainings that have ended, in an order that does not depend on who trained what."""
    search: Progress
    """Where the search stands: the best setting, and what is to be trained next."""

    @classmethod
    def of(cls, job: SweepJob, size: int, entries: Mapping[str, Entry]) -> SweptSize:
        """Return what the tasks of a sweep have found at a batch size."""
        results = results_at(size, entries)
        return cls(size, tuple(results), job.progress(size, results))

    @property
    def expected_trainings(self) -> int:
        """The number of trainings in all, as far as is known."""
        return max(self.search.expected, len(self.results) + len(self.search.missing))

    @property
    def finished(self) -> bool:
        """Whether nothing is left to train."""
        return not self.search.missing

    @property
    def reached(self) -> int:
        """The number of trainings that reached the goal."""
        return sum(each.reached for each in self.results)

    def count(self, ended: str) -> int:
        """Return the number of trainings with an end, such as `DIVERGED`."""
        return sum(each.ended == ended for each in self.results)

    @cached_property
    def best(self) -> Outcome | None:
        """The middle repetition of the best setting so far; None if it missed the goal."""
        repeated = self.search.best or [each for each in self.results if each.reached]
        if not repeated:
            return None
        half = middle([each.outcome for each in repeated], "steps")
        return None if half.reached is None else half

    @property
    def steps(self) -> float:
        """The steps to the goal; NaN before they are known."""
        return math.nan if self.best is None else self.best.at("steps")

    @property
    def learning_rate(self) -> float:
        """The learning rate of the best setting; NaN before it is known."""
        return math.nan if self.best is None else self.best.trial.learning_rate

    @property
    def best_is_at_edge(self) -> bool:
        """Whether no lower, or no higher, learning rate was evaluated than the best one."""
        rates = {each.learning_rate for each in self.results if len(each.steps)}
        return self.search.best[0].learning_rate in (min(rates), max(rates))

    @property
    def repetitions_are_alike(self) -> bool:
        """Whether all repetitions of the best setting are the same training.

        Something in the module or its data ignores the seed. Their scatter would read as zero.
        """
        courses = {(tuple(each.steps), tuple(each.values)) for each in self.search.best}
        return len(self.search.best) > 1 and len(courses) == 1

    @property
    def mean_device_seconds(self) -> float:
        """The mean time of a training, with its start and its evaluations; 0 before one is done."""
        times = [each.device_seconds for each in self.results if each.device_seconds]
        return sum(times) / len(times) if times else 0.0

    def as_dict(self) -> dict[str, Any]:
        """Return how far the search is, and what it has found, as JSON can hold it."""
        return {
            "batch_size": self.batch_size,
            "done": len(self.results),
            "expected": self.expected_trainings,
            "reached": self.reached,
            "diverged": self.count(DIVERGED),
            "pruned": self.count(PRUNED),
            "out_of_steps": self.count(OUT_OF_STEPS),
            "failed": self.count(FAILED),
            **fields_of(self, "steps", "learning_rate", "finished"),
        }
