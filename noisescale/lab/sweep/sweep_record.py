# SPDX-License-Identifier: Apache-2.0
"""The record of a sweep: what it has found at each batch size, and how far it is."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from noisescale.lab.compare.outcomes import Outcome, middle
from noisescale.lab.compare.swept import Swept, sweep_of
from noisescale.lab.jobs.job_progress import JobProgress, progress_of_job
from noisescale.lab.jobs.jobs import Entry
from noisescale.lab.jobs.workers import Place
from noisescale.lab.sweep.results import TrialResult
from noisescale.lab.sweep.search import Progress
from noisescale.lab.sweep.settings import SweepJob, results_at


@dataclass(frozen=True)
class SweptSize:
    """What a sweep has found at one batch size."""

    batch_size: int
    results: tuple[TrialResult, ...]
    """All trainings that have ended, in an order that does not depend on who trained what."""
    search: Progress
    """Where the search stands: the best setting, and what is to be trained next."""

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


@dataclass(frozen=True)
class SweepRecord:
    """What a sweep has found, and how far it is."""

    job: SweepJob
    sizes: tuple[SweptSize, ...]
    """Each batch size, in rising order."""
    progress: JobProgress

    @property
    def finished(self) -> bool:
        """Whether nothing is left to train."""
        return self.progress.finished

    @property
    def reached(self) -> bool:
        """Whether any training reached the goal."""
        return any(size.reached for size in self.sizes)

    @property
    def expected_trainings(self) -> int:
        """The number of trainings in all, as far as is known."""
        return sum(size.expected_trainings for size in self.sizes)

    @property
    def seconds_left(self) -> float:
        """The time left, by the time that trainings took so far; NaN before one is done."""
        usual = [mean for size in self.sizes if (mean := size.mean_device_seconds)]
        if not usual:
            return math.nan
        mean = sum(usual) / len(usual)
        left = sum(
            (size.expected_trainings - len(size.results)) * (size.mean_device_seconds or mean)
            for size in self.sizes
        )
        return left / self.job.devices / (self.progress.devices_at_work or 1)

    @cached_property
    def law(self) -> Swept | None:
        """The law of steps against batch size; None if fewer than two batch sizes have trainings.

        It is what `noisescale compare` finds in the trainings that have an evaluation.
        """
        return sweep_of("", "", self.outcomes)

    @property
    def outcomes(self) -> list[Outcome]:
        """The outcomes of all trainings that have an evaluation."""
        every = [each for size in self.sizes for each in size.results]
        return [each.outcome for each in every if len(each.steps)]


def sweep_record(job: SweepJob, entries: Mapping[str, Entry], place: Place) -> SweepRecord:
    """Return what the tasks of a sweep have found.

    Args:
        job: The sweep.
        entries: All tasks of its ledger, by their keys.
        place: The storage, the name of the sweep in it, and the folder of the results.
    """
    sizes = []
    for size in job.batch_sizes:
        results = results_at(size, entries)
        sizes.append(SweptSize(size, tuple(results), job.progress(size, results)))
    finished = all(size.finished for size in sizes)
    progress = progress_of_job(job, entries, place, finished=finished)
    return SweepRecord(job, tuple(sizes), progress)
