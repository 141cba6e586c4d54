# SPDX-License-Identifier: Apache-2.0
"""Submissions compared over workloads: performance profiles, their score, speed-ups."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from scipy.integrate import trapezoid

from noisescale.checks import refuse, require_count
from noisescale.lab.compare.measurements import Array

Times = Mapping[str, Mapping[str, float]]
"""Times to the goal by submission and workload; infinite where it was missed."""

MAX_RATIO = 4.0
"""Times slower than the best to which AlgoPerf's profiles reach."""


@dataclass(frozen=True, eq=False)
class PerformanceProfile:
    """The share of workloads on which each submission is at most τ times as slow as the best.

    See `performance_profile`.
    """

    submissions: tuple[str, ...]
    workloads: tuple[str, ...]
    ratios: Array
    """Time over the best submission's, shape (submissions, workloads); infinite where missed."""

    def at(self, ratio: float) -> dict[str, float]:
        """Return the share of workloads on which each submission is within `ratio` of the best."""
        return self._map_submissions((self.ratios <= ratio).mean(axis=1))

    def curve(self, submission: str) -> tuple[Array, Array]:
        """Return the ratios at which a submission's profile rises, and its shares from there on."""
        if submission not in self.submissions:
            known = ", ".join(self.submissions)
            refuse("submission", f"be one of {known}", repr(submission), "Check its name.")
        rises = np.sort(self.ratios[self.submissions.index(submission)])
        rises = rises[np.isfinite(rises)]
        return rises, np.arange(1, len(rises) + 1) / len(self.workloads)

    def scores(self, max_ratio: float = MAX_RATIO, *, grid: int | None = None) -> dict[str, float]:
        """Return the mean height of each profile between the ratios 1 and `max_ratio`.

        Args:
            max_ratio: Above 1.
            grid: Number of equally spaced ratios that the trapezoid rule goes by, as AlgoPerf's
                code does with 100. Default: the exact integral.
        """
        if not 1 < max_ratio < math.inf:
            refuse("max_ratio", "be above 1 and finite", repr(max_ratio), "Pass 4, as AlgoPerf.")
        if grid is None:
            shares = np.maximum(max_ratio - self.ratios, 0) / (max_ratio - 1)
            heights = shares.mean(axis=1)
        else:
            if require_count("grid", grid, "Pass 100, as AlgoPerf.") < 2:
                refuse("grid", "have two ratios at least", grid, "Pass 100, as AlgoPerf.")
            at = np.linspace(1, max_ratio, grid)
            shares = (self.ratios[:, :, None] <= at).mean(axis=1)
            heights = trapezoid(shares, at, axis=1) / (max_ratio - 1)
        return self._map_submissions(heights)

    def _map_submissions(self, values: Array) -> dict[str, float]:
        return dict(zip(self.submissions, values.tolist(), strict=True))


def performance_profile(times: Times) -> PerformanceProfile:
    """Return how each submission compares with the best one, over all workloads.

    Args:
        times: From a submission to a workload to the time to its goal; `math.inf` where the
            submission missed the goal. A workload that a submission does not have counts as missed.

    Raises:
        ValueError: If there is no workload, or a time is negative, zero or not a number.

    Examples:
        >>> profile = performance_profile({"sgd": {"a": 10, "b": 40}, "adam": {"a": 20, "b": 10}})
        >>> profile.at(1), profile.at(2)
        ({'sgd': 0.5, 'adam': 0.5}, {'sgd': 0.5, 'adam': 1.0})

    References:
        Dolan and Moré 2002; Dahl et al. 2023, arXiv:2306.07179, section 4.3.
    """
    submissions, workloads, table = _table(times)
    best = table.min(axis=0)
    # Where nobody reached the goal nobody is credited, not even with a ratio of inf/inf.
    with np.errstate(invalid="ignore"):
        ratios = np.where(np.isinf(table), math.inf, table / best)
    return PerformanceProfile(submissions, workloads, ratios)


def algoperf_score(
    times: Times,
    *,
    variants: Mapping[str, str] | None = None,
    max_ratio: float = MAX_RATIO,
    grid: int | None = None,
) -> dict[str, float]:
    """Return the benchmark score of each submission, from 0 to 1.

    It is the mean over workloads of max(0, (max_ratio - r) / (max_ratio - 1)), with r the
    submission's time over the best one's: the integral of its performance profile.

    Held-out variants of workloads check a submission, and have no share in the mean. These steps
    are taken in this order:

    1. A variant counts as missed where its workload was missed.
    2. A time above `max_ratio` times the best of its workload, or variant, counts as missed.
    3. A workload counts as missed where one of its variants was missed.
    4. The variants are left out, and each time is divided by the best that is left.

    Args:
        times: See `performance_profile`; with times of the variants.
        variants: From each held-out variant to its workload. Default: none.
        max_ratio: Times slower than the best from which on a time counts as missed.
        grid: 100 for the published numbers, which are from a trapezoid rule on 100 ratios, up to
            0.0016 away. Default: exactly.

    Raises:
        ValueError: See `performance_profile`; or if a variant or its workload is not among the
            times.

    Examples:
        >>> algoperf_score({"sgd": {"a": 10, "b": 40}, "adam": {"a": 20, "b": 10}})
        {'sgd': 0.5, 'adam': 0.8333333333333333}

    References:
        Dahl et al. 2023, arXiv:2306.07179, sections 4.3 and 4.4.
    """
    left = times_that_count(times, variants or {}, max_ratio)
    return performance_profile(left).scores(max_ratio, grid=grid)


def times_that_count(
    times: Times, variants: Mapping[str, str], max_ratio: float = MAX_RATIO
) -> dict[str, dict[str, float]]:
    """Return the times that count for the score, see `algoperf_score`: steps 1 to 4."""
    submissions, workloads, table = _table(times)
    for variant, base in variants.items():
        for name in (variant, base):
            if name not in workloads:
                names = ", ".join(workloads)
                refuse("variants", f"name workloads of {names}", repr(name), "Give its times too.")
        if base in variants:
            refuse(
                "variants",
                "lead to workloads that count",
                f"{base!r}, a variant itself",
                "Name the workload of both.",
            )
    column = {name: k for k, name in enumerate(workloads)}
    for variant, base in variants.items():
        table[np.isinf(table[:, column[base]]), column[variant]] = math.inf
    with np.errstate(invalid="ignore"):
        table[table > max_ratio * table.min(axis=0)] = math.inf
    for variant, base in variants.items():
        table[np.isinf(table[:, column[variant]]), column[base]] = math.inf
    counting = [name for name in workloads if name not in variants]
    return {
        submission: {name: float(table[row, column[name]]) for name in counting}
        for row, submission in enumerate(submissions)
    }


def speed_up(
    times: Mapping[str, float],
    reference: Mapping[str, float],
    budgets: Mapping[str, float] | None = None,
) -> float:
    """Return how many times as fast a submission is as another: the geometric mean over workloads.

    Args:
        times: From each workload to the submission's time in seconds; `math.inf` where missed.
        reference: The same of the submission that is compared with.
        budgets: From each workload to the seconds that a training was given. A missed goal counts
            as the budget and one second. Needed where a time is infinite.

    Raises:
        ValueError: If the workloads differ, a time is not positive, or a budget is missing.

    Examples:
        >>> round(speed_up({"a": 10, "b": 10}, {"a": 20, "b": 40}), 3)
        2.828

    References:
        Kasimbeg et al. 2025, arXiv:2502.15015.
    """
    if not times or times.keys() != reference.keys():
        refuse(
            "reference",
            "have the workloads of `times`",
            f"{', '.join(reference) or 'none'} beside {', '.join(times) or 'none'}",
            "Give both times of each workload.",
        )

    def seconds(name: str, of: Mapping[str, float], workload: str) -> float:
        value = _positive_time(name, workload, of[workload])
        if math.isfinite(value):
            return value
        budget = (budgets or {}).get(workload, math.nan)
        if not 0 < budget < math.inf:
            refuse(
                "budgets",
                f"have the seconds for {workload}, whose goal was missed",
                repr(budget),
                "Give the seconds after which its trainings were ended.",
            )
        return budget + 1

    logs = [
        math.log(seconds("reference", reference, workload) / seconds("times", times, workload))
        for workload in times
    ]
    return math.exp(sum(logs) / len(logs))


def _table(times: Times) -> tuple[tuple[str, ...], tuple[str, ...], Array]:
    workloads = tuple(dict.fromkeys(name for row in times.values() for name in row))
    if not workloads:
        refuse(
            "times", "have a submission and a workload", repr(dict(times)), "Give times to compare."
        )
    rows = [
        [
            _positive_time(f"times[{submission!r}]", name, row.get(name, math.inf))
            for name in workloads
        ]
        for submission, row in times.items()
    ]
    return tuple(times), workloads, np.array(rows, dtype=np.float64)


def _positive_time(argument: str, workload: str, value: float) -> float:
    if not value > 0:
        refuse(
            argument,
            "be positive",
            f"{value!r} for {workload}",
            "Give `math.inf` where the goal was missed.",
        )
    return float(value)
