# SPDX-License-Identifier: Apache-2.0
"""What the trainings of run.py say: scores, profiles, speed-ups and how sure they are."""

from __future__ import annotations

import math
import warnings
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from scipy.special import stdtrit

from benchmarks.suite._submissions import (
    EXTERNAL,
    EXTERNALS,
    SELF,
    SELVES,
    Size,
    Submission,
)
from benchmarks.suite._trials import CLOCK, Row
from benchmarks.suite._workloads import PROBLEMS, VARIANTS
from noisescale import algoperf_score
from noisescale.history.metrics import Goal
from noisescale.lab.compare.algoperf import Ruleset, TrialTime, times_to_result
from noisescale.lab.compare.compare import compare
from noisescale.lab.compare.comparison import Comparison
from noisescale.lab.compare.measurements import Measurements, Trial
from noisescale.lab.compare.profiles import speed_up

Times = dict[str, dict[str, float]]


@dataclass(frozen=True)
class Group:
    """Submissions under one ruleset."""

    title: str
    submissions: Mapping[str, Submission]
    ruleset: Ruleset


GROUPS = (
    Group("External tuning", EXTERNALS, EXTERNAL),
    Group("Self-tuning", SELVES, SELF),
)


def clock_of(row: Row, clock: str = str(CLOCK)) -> float:
    """When a trial reached its goal: modelled seconds on so many devices, or "steps"."""
    if row["ended"] != "goal":
        return math.inf
    last = row["last"][-1]
    return float(last["step"] if clock == "steps" else last["seconds"][clock])


def trained_on(rows: Sequence[Row], names: Iterable[str], size: Size) -> list[str]:
    """The workloads on which all of these submissions have all their trials."""
    have: dict[tuple[str, str], int] = defaultdict(int)
    for row in rows:
        if row["kind"] == "trial" and row["trial"] < size.trials:
            have[row["workload"], row["submission"]] += 1
    wanted = {name: size.studies * (1 if name in SELVES else size.trials) for name in names}
    return [w for w in PROBLEMS if all(have[w, name] == count for name, count in wanted.items())]


def trials_of(
    rows: Sequence[Row], names: Iterable[str], workloads: Iterable[str], size: Size
) -> list[Row]:
    wanted = set(names), set(workloads)
    return [
        row
        for row in rows
        if row["kind"] == "trial"
        and row["submission"] in wanted[0]
        and row["workload"] in wanted[1]
        and row["trial"] < size.trials
    ]


def times_of(trials: Sequence[Row], ruleset: Ruleset | None, clock: str = str(CLOCK)) -> Times:
    """Time to the goal of each submission on each workload.

    Its time stands for the number of an evaluation, too, as both rise together.
    """
    found = (
        TrialTime(
            row["submission"],
            row["workload"],
            str(row["study"]),
            clock_of(row, clock),
            clock_of(row, clock),
        )
        for row in trials
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a smoke run has fewer studies
        return times_to_result(found, ruleset=ruleset)


def counting_variants(workloads: Iterable[str]) -> dict[str, str]:
    names = set(workloads)
    return {name: base for name, base in VARIANTS.items() if {name, base} <= names}


def scored(times: Times) -> dict[str, float]:
    return algoperf_score(times, variants=counting_variants(next(iter(times.values()))))


class SpeedUp(NamedTuple):
    """A geometric mean of speed-ups."""

    mean: float
    low: float
    high: float
    workloads: int
    """On how many workloads one of the two reached the goal; the others tell nothing."""

    def __str__(self) -> str:
        if not self.workloads:
            return "?"
        known = f"{self.low:.2f} to {self.high:.2f}" if self.low > 0 else "?"
        return f"{self.mean:.2f} ({known})"

    @property
    def verdict(self) -> str:
        return "helped" if self.low > 1 else "slower" if self.high < 1 else "open"


def mean_factor(factors: Mapping[str, Sequence[float]]) -> tuple[float, float, float]:
    """The geometric mean over groups of factors that are alike, and its 95 % interval.

    It is the wider of two intervals of Student's: with the mean of each group as one observation,
    and with each factor as one. Few groups can agree by chance. Factors of one group can be alike.
    A single group says nothing of others.
    """
    logs = [np.log(of) for of in factors.values()]
    means = np.array([of.mean() for of in logs])
    middle, width = float(means.mean()), math.inf
    if len(means) > 1:
        width = max(half_width(means), half_width(np.concatenate(logs)))
    return math.exp(middle), math.exp(middle - width), math.exp(min(middle + width, 700.0))


def half_width(values: npt.NDArray[np.float64]) -> float:
    """Of Student's 95 % interval of a mean."""
    spread = float(np.std(values, ddof=1)) / math.sqrt(len(values))
    return float(stdtrit(len(values) - 1, 0.975)) * spread


def mean_speed_up(pairs: Iterable[tuple[str, float, float]], budget: float = 1.0) -> SpeedUp:
    """The mean over workloads like these, of times (workload, ours, theirs).

    A workload and its variants are alike. Where both missed the goal nothing is known.

    Args:
        pairs: Times may be infinite. A workload may come several times.
        budget: Of the workloads' budgets, which a missed goal counts as.
    """
    factors: dict[str, list[float]] = defaultdict(list)
    known: set[str] = set()
    for name, ours, theirs in pairs:
        if min(ours, theirs) < math.inf:
            known.add(name)
            seconds = budget * PROBLEMS[name].budget
            factor = speed_up({name: ours}, {name: theirs}, {name: seconds})
            factors[VARIANTS.get(name, name)].append(factor)
    if not factors:
        return SpeedUp(math.nan, 0.0, math.inf, 0)
    return SpeedUp(*mean_factor(factors), len(known))


class SameTrials(NamedTuple):
    """Trials of two submissions with the same settings and initial weights."""

    speed_up: SpeedUp
    """Of those that reached the goal in both."""
    both: int
    """That reached the goal in both."""
    won: int
    """That reached the goal, which the others missed."""
    lost: int

    def __str__(self) -> str:
        return f"{self.speed_up} of {self.both}; {self.won}, {self.lost}"


def trial_by_trial(rows: Sequence[Row], ours: str, theirs: str, sizes: Sequence[int]) -> SameTrials:
    """Compare each trial that begins with one of these batch sizes with that of another."""
    of: dict[str, dict[tuple[str, int, int], Row]] = {ours: {}, theirs: {}}
    for row in rows:
        if row["submission"] in of:
            of[row["submission"]][row["workload"], row["study"], row["trial"]] = row
    pairs: list[tuple[str, float, float]] = []
    for place, row in of[ours].items():
        other = of[theirs][place]
        assert row["settings"] == other["settings"]
        if int(row["settings"]["batch_size"]) in sizes:
            pairs.append((place[0], clock_of(row), clock_of(other)))
    both = [pair for pair in pairs if max(pair[1:]) < math.inf]
    return SameTrials(
        mean_speed_up(both),
        len(both),
        sum(mine < other == math.inf for _, mine, other in pairs),
        sum(other < mine == math.inf for _, mine, other in pairs),
    )


def as_trials(rows: Sequence[Row], goals: Mapping[str, float]) -> list[Trial]:
    """Without `batch_size`, as these are no sweeps: it is one of the settings."""
    return [
        Trial(
            name="/".join(str(row[k]) for k in ("workload", "submission", "study", "trial")),
            measurements=Measurements(
                [e["step"] for e in row["last"]],
                [math.nan if e["loss"] is None else e["loss"] for e in row["last"]],
                examples=[e["examples"] for e in row["last"]],
                seconds=[e["seconds"][str(CLOCK)] for e in row["last"]],
            ),
            submission=row["submission"],
            workload=row["workload"],
            study=str(row["study"]),
            learning_rate=row["settings"]["learning_rate"],
            hyperparameters=row["settings"],
        )
        for row in rows
        if row["workload"] in goals
    ]


def goals_of(rows: Sequence[Row]) -> dict[str, float]:
    return {row["workload"]: row["goal"] for row in rows if row["kind"] == "target"}


def compared(rows: Sequence[Row], goals: Mapping[str, float], reference: str) -> Comparison:
    """What a user of `compare` gets from these trials."""
    wanted = {name: Goal("loss", goal, "<") for name, goal in goals.items()}
    return compare(
        as_trials(rows, goals),
        wanted,
        by="seconds",
        reference=reference,
        variants=counting_variants(goals),
    )


def verdicts(rows: Sequence[Row], goals: Mapping[str, float], control: str) -> list[str]:
    """On how many workloads each submission was faster, slower, or neither for sure.

    Where some studies reached the goal and others did not, nothing is sure: a study that found no
    setting that gets there is no slow one, as `compare` takes it for.
    """
    found_by = compared(rows, goals, control)
    mixed = {
        (each.submission, each.workload)
        for each in found_by.standings
        if len({outcome.reached is None for outcome in each.counting}) > 1
    }
    found: dict[str, list[str]] = defaultdict(list)
    for standing in found_by.standings:
        if standing.submission == control:
            continue
        s, pair = standing.speed_up, {standing.submission, control}
        unsure = any((name, standing.workload) in mixed for name in pair)
        found[standing.submission].append(
            "open" if unsure else "faster" if s.low > 1 else "slower" if s.high < 1 else "open"
        )
    return [
        f"{of.count('faster')} / {of.count('slower')} / {of.count('open')}" for of in found.values()
    ]
