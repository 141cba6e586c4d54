# SPDX-License-Identifier: Apache-2.0
"""A comparison of trials in builtins, for JSON."""

from __future__ import annotations

from typing import Any

from noisescale.lab.compare.comparison import ComparisonRecord
from noisescale.lab.compare.measurements import CLOCKS
from noisescale.lab.compare.outcomes import Outcome, Standing
from noisescale.lab.compare.swept import Swept, SweptBatch
from noisescale.report.records import finite


def as_dict(c: ComparisonRecord) -> dict[str, Any]:
    """Return the comparison in builtins. What is not known, or was not reached, is None.

    | key | meaning |
    |---|---|
    | `goals` | from each workload to its goal, as text |
    | `clock` | what speed-ups and scores count: steps, examples, epochs or seconds |
    | `reference` | the submission that speed-ups are over |
    | `standings` | each submission on each workload, the fastest first |
    | `trials` | when each trial reached its goal |
    | `sweeps` | steps against batch size, with the regimes |
    | `scores` | AlgoPerf's score of each submission; None for one workload, or where a time is 0 |
    | `ratios` | of each submission, from a workload to its time over the fastest; or None |
    | `speed_ups` | of each submission over all workloads; empty where there are no scores |
    | `left_out` | trials that do not count, each with the reason |
    | `warnings` | sentences |
    """
    ratios = None
    if c.profile is not None:
        ratios = {
            submission: dict(zip(c.profile.workloads, row, strict=True))
            for submission, row in zip(
                c.profile.submissions, c.profile.ratios.tolist(), strict=True
            )
        }
    record = {
        "goals": {workload: str(goal) for workload, goal in c.goals.items()},
        "clock": c.clock,
        "reference": c.reference,
        "standings": [_standing(standing) for standing in c.standings],
        "trials": [_outcome(o) for standing in c.standings for o in standing.outcomes],
        "sweeps": [_sweep(each) for each in c.sweeps],
        "scores": None if c.scores is None else dict(c.scores),
        "ratios": ratios,
        "speed_ups": dict(c.speed_ups),
        "confidence": c.confidence,
        "left_out": [
            {"trial": trial.name, "submission": trial.submission, "reason": trial.fault}
            for trial in c.left_out
        ],
        "warnings": list(c.warnings),
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
        "hyperparameters": dict(trial.hyperparameters),
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
