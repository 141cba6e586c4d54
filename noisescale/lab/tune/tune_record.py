# SPDX-License-Identifier: Apache-2.0
"""The record of a search: its trainings with their front, and how far it is."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from noisescale.lab.jobs.job_progress import JobProgress, progress_of_job
from noisescale.lab.jobs.jobs import FAILED, Entry
from noisescale.lab.jobs.workers import Place
from noisescale.lab.parameters import LOG, POW2, Parameter
from noisescale.lab.tune.cost_front import CostFront, Searched, TunedTrial
from noisescale.lab.tune.doubts import doubts_about
from noisescale.lab.tune.suggest import cost_of
from noisescale.lab.tune.tune_job import DONE, TuneJob


@dataclass(frozen=True)
class TuneRecord:
    """What a search has found, and how far it is."""

    front: CostFront
    progress: JobProgress
    budget: float | None = None
    """Device-hours; None for no limit."""
    most_trials: int | None = None
    """None for no limit."""
    doubts: tuple[str, ...] = ()
    """Reasons to doubt the search, whatever comes out of it."""

    @property
    def finished(self) -> bool:
        """Whether the budget is spent, and nothing is under way."""
        return self.progress.finished

    @property
    def successes(self) -> int:
        """The number of trainings with a result."""
        return len(self.front.trials) - len(self.front.failures)


def tune_record(job: TuneJob, entries: Mapping[str, Entry], place: Place) -> TuneRecord:
    """Return what the tasks of a search have found.

    Args:
        job: The search.
        entries: All tasks of its ledger, by their keys.
        place: The storage, the name of the search in it, and the folder of the results.
    """
    return TuneRecord(
        front_of(job, entries),
        progress_of_job(job, entries, place, finished=job.is_finished(entries)),
        job.budget,
        job.trials,
        tuple(doubts_about(job)),
    )


def front_of(job: TuneJob, entries: Mapping[str, Entry]) -> CostFront:
    """Return all trainings that have ended, with the front."""
    ended = [each for each in entries.values() if each.result]
    trials = tuple(_trial_of(each) for each in sorted(ended, key=lambda each: int(each.key)))
    return CostFront(job.metric, job.maximize, tuple(map(_axis_of, job.parameters)), trials)


def _axis_of(each: Parameter) -> Searched:
    log = each.kind in (LOG, POW2)
    return Searched(each.name, log, each.is_number, each.low, each.high)


def _trial_of(entry: Entry) -> TunedTrial:
    result, spec = entry.result, entry.spec
    reason = str(result.get(FAILED, ""))
    ended = FAILED if reason else str(result["ended"])
    return TunedTrial(
        int(entry.key),
        spec["parameters"],
        cost_of(result),
        float(result["value"]) if ended == DONE else math.nan,
        ended,
        reason,
        float(spec["batch_size"]),
        float(result.get("steps", math.nan)),
    )
