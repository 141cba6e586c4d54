# SPDX-License-Identifier: Apache-2.0
"""The answer of `compare`: who reached the goal, when, how much faster, and how sure that is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from noisescale.history.metrics import Goal
from noisescale.lab.compare.document import document_of
from noisescale.lab.compare.doubts import doubts_of
from noisescale.lab.compare.measurements import CLOCKS, Trial
from noisescale.lab.compare.outcomes import Outcome, Standing, is_seed, is_setting
from noisescale.lab.compare.profiles import PerformanceProfile
from noisescale.lab.compare.swept import Swept, SweptBatch
from noisescale.report.answer import Answer
from noisescale.report.records import finite


@dataclass(frozen=True, eq=False)
class Comparison(Answer):
    """Submissions compared on one or more workloads, and the ways to show that."""

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
    budget: Mapping[str, float]
    """The most that a run might take, of `CLOCKS`."""
    left_out: tuple[Trial, ...]
    """Trials that do not count. The `fault` of each says why."""

    @cached_property
    def warnings(self) -> tuple[str, ...]:
        """What may be wrong, in sentences, the worst first."""
        return tuple(doubts_of(self))

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

    @property
    def outcomes(self) -> list[Outcome]:
        """The outcomes of all trials."""
        return [each for standing in self.standings for each in standing.outcomes]

    def outcomes_of(self, workload: str) -> list[Outcome]:
        """Return the outcomes of all trials on a workload."""
        return [each for standing in self.standings_of(workload) for each in standing.outcomes]

    document = document_of

    def to_dict(self) -> dict[str, Any]:
        """Return the comparison in builtins. What is not known, or was not reached, is None.

        | key | meaning |
        |---|---|
        | `goals` | from each workload to its goal, as text |
        | `clock` | what speed-ups and scores count: steps, examples, epochs or seconds |
        | `reference` | the submission that speed-ups are over |
        | `standings` | each submission on each workload, the fastest first |
        | `trials` | when each trial reached its goal |
        | `sweeps` | steps against batch size, with the regimes |
        | `scores` | AlgoPerf's score of each submission; None for one workload, or a time of 0 |
        | `ratios` | of each submission, from a workload to its time over the fastest; or None |
        | `speed_ups` | of each submission over all workloads; empty where there are no scores |
        | `left_out` | trials that do not count, each with the reason |
        | `warnings` | sentences |
        """
        ratios = None
        if self.profile is not None:
            ratios = {
                submission: dict(zip(self.profile.workloads, row, strict=True))
                for submission, row in zip(
                    self.profile.submissions, self.profile.ratios.tolist(), strict=True
                )
            }
        record = {
            "goals": {workload: str(goal) for workload, goal in self.goals.items()},
            "clock": self.clock,
            "reference": self.reference,
            "standings": [_standing(standing) for standing in self.standings],
            "trials": [_outcome(each) for each in self.outcomes],
            "sweeps": [_sweep(each) for each in self.sweeps],
            "scores": None if self.scores is None else dict(self.scores),
            "ratios": ratios,
            "speed_ups": dict(self.speed_ups),
            "confidence": self.confidence,
            "left_out": [
                {"trial": trial.name, "submission": trial.submission, "reason": trial.fault}
                for trial in self.left_out
            ],
            "warnings": list(self.warnings),
        }
        return dict(finite(record))


def _standing(standing: Standing) -> dict[str, Any]:
    return {
        "submission": standing.submission,
        "workload": standing.workload,
        "trials": len(standing.outcomes),
        "reached": standing.reached,
        "diverged": standing.diverged,
        "best": standing.best.trial.name,
        **{clock: standing.best.at(clock) for clock in CLOCKS},
        "speed_up": standing.speed_up,
    }


def _outcome(outcome: Outcome) -> dict[str, Any]:
    trial = outcome.trial
    return {
        "trial": trial.name,
        "submission": trial.submission,
        "workload": trial.workload,
        "study": trial.study,
        "batch_size": trial.batch_size,
        "learning_rate": trial.learning_rate,
        "hyperparameters": {
            name: value
            for name, value in trial.hyperparameters.items()
            if is_setting(name, value) or is_seed(name)
        },
        "diverged": trial.diverged,
        "reached": outcome.reached is not None,
        **{clock: outcome.at(clock) for clock in CLOCKS},
        "best": outcome.best,
        "best_step": outcome.best_step,
    }


def _sweep(each: Swept) -> dict[str, Any]:
    regimes = None
    if (found := each.regimes) is not None:
        names = ("critical_batch_size", "perfect_up_to", "maximal_from")
        regimes = {name: getattr(found, name) for name in names}
    return {
        "submission": each.submission,
        "workload": each.workload,
        "batches": [_batch(each, batch) for batch in each.batches],
        "regimes": regimes,
        "warnings": list(each.warnings),
    }


def _batch(each: Swept, batch: SweptBatch) -> dict[str, Any]:
    return {
        "batch_size": batch.batch_size,
        "steps": batch.best.at("steps"),
        "repeated_steps": list(batch.steps),
        "learning_rate": batch.best.trial.learning_rate,
        "learning_rates": list(batch.learning_rates),
        "edge": batch.edge or None,
        "unsearched": batch.unsearched,
        "counts": batch.counts,
        "trials": batch.tried,
        "reached": batch.reached,
        "diverged": batch.diverged,
        "regime": None if each.regimes is None else each.regimes.regime_of(batch.batch_size),
    }
