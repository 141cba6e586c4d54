# SPDX-License-Identifier: Apache-2.0
"""The record of a comparison: who reached the goal, when, how much faster, and how sure that is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from noisescale.history.metrics import Goal
from noisescale.lab.compare.measurements import Trial
from noisescale.lab.compare.outcomes import Outcome, Standing
from noisescale.lab.compare.profiles import PerformanceProfile
from noisescale.lab.compare.swept import Swept


@dataclass(frozen=True, eq=False)
class ComparisonRecord:
    """Submissions compared on one or more workloads, see `compare_trials`."""

    goals: Mapping[str, Goal]
    """The goal of each workload."""
    clock: str
    """What times and speed-ups are counted in: one of `CLOCKS`."""
    reference: str
    """The submission that speed-ups are over."""
    standings: tuple[Standing, ...]
    """One for each submission on each workload, by workload and the fastest first."""
    sweeps: tuple[Swept, ...]
    """Submissions with several batch sizes."""
    profile: PerformanceProfile | None
    """The performance profile, if there are several workloads, and no goal was reached at a time
    of 0."""
    scores: Mapping[str, float] | None
    """AlgoPerf's score of each submission, where there is a profile."""
    speed_ups: Mapping[str, float]
    """How many times as fast as the reference over all workloads, in the geometric mean; NaN where
    a goal was missed and no budget says what that costs. Empty where there is no profile."""
    confidence: float
    left_out: tuple[Trial, ...]
    """Trials that do not count. The `fault` of each says why."""
    warnings: tuple[str, ...]

    @property
    def reached(self) -> bool:
        """Whether any trial reached its goal."""
        return any(standing.reached for standing in self.standings)

    @property
    def workloads(self) -> tuple[str, ...]:
        """Names of the workloads, in the order in which they were first met."""
        return tuple(dict.fromkeys(standing.workload for standing in self.standings))

    @property
    def submissions(self) -> tuple[str, ...]:
        """Names of the submissions, the reference first."""
        names = dict.fromkeys([self.reference, *(s.submission for s in self.standings)])
        return tuple(names)

    def standings_of(self, workload: str) -> list[Standing]:
        """Return the standings on a workload, the fastest first."""
        return [standing for standing in self.standings if standing.workload == workload]

    def outcomes_of(self, workload: str) -> list[Outcome]:
        """Return the outcomes of all trials on a workload."""
        return [each for standing in self.standings_of(workload) for each in standing.outcomes]
