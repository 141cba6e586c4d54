# SPDX-License-Identifier: Apache-2.0
"""What the trainings of suite.py say: scores, profiles, speed-ups and how sure they are."""

from __future__ import annotations

import math
import warnings
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from _suite_submissions import (
    EXTERNAL,
    EXTERNALS,
    SELF,
    SELVES,
    SPACES,
    TUNERS,
    Size,
    Submission,
)
from _suite_trials import CLOCK, DEVICES, Row
from _suite_workloads import PROBLEMS, VARIANTS
from scipy.special import stdtrit

from noisescale import algoperf_score, performance_profile
from noisescale.history.metrics import Goal
from noisescale.time_to_result import Measurements, Trial, compare
from noisescale.time_to_result.algoperf import Ruleset, TrialTime, times_to_result
from noisescale.time_to_result.profiles import speed_up

DRAWS = 300
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

    The number of an evaluation is its time, as evaluations come at steps and not at seconds.
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


def drawn(trials: Sequence[Row], draws: int = DRAWS) -> list[list[Row]]:
    """Trials with the studies of each workload drawn anew, the same for all submissions."""
    rng = np.random.default_rng(0)
    of: dict[tuple[str, int], list[Row]] = defaultdict(list)
    for row in trials:
        of[row["workload"], row["study"]].append(row)
    workloads = dict.fromkeys(w for w, _ in of)
    studies = {w: sorted(s for v, s in of if v == w) for w in workloads}
    return [
        [
            row | {"study": place}
            for w in workloads
            for place, study in enumerate(rng.choice(studies[w], len(studies[w])))
            for row in of[w, int(study)]
        ]
        for _ in range(draws)
    ]


def interval(values: Sequence[float]) -> tuple[float, float]:
    low, high = np.quantile(values, (0.025, 0.975))
    return float(low), float(high)


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


def between(mean: float, low: float, high: float) -> str:
    """One workload alone has no interval."""
    return f"{mean:.2f} ({low:.2f} to {high:.2f})" if low > 0 else f"{mean:.2f} (?)"


def overall(
    ours: Mapping[str, float], theirs: Mapping[str, float], budget: float = 1.0
) -> tuple[float, float, float]:
    """The geometric mean over workloads of speed-ups, with its interval, for workloads like these.

    A workload and its variants are alike. Where both missed the goal the ratio is 1: nothing is
    known of it.
    """
    factors: dict[str, list[float]] = defaultdict(list)
    for name, time in ours.items():
        factors[VARIANTS.get(name, name)].append(speed_up_on(name, time, theirs[name], budget))
    return mean_factor(factors)


def over_studies(
    ours: Mapping[tuple[str, int], float], theirs: Mapping[tuple[str, int], float]
) -> tuple[float, float, float]:
    """As `overall`, of the time of each study of a workload. The studies of one are alike."""
    factors: dict[str, list[float]] = defaultdict(list)
    for (name, study), time in ours.items():
        factors[name].append(speed_up_on(name, time, theirs[name, study]))
    return mean_factor(factors)


def speed_up_on(workload: str, ours: float, theirs: float, budget: float = 1.0) -> float:
    seconds = budget * PROBLEMS[workload].budget
    return speed_up({workload: ours}, {workload: theirs}, {workload: seconds})


def as_trials(rows: Sequence[Row], goals: Mapping[str, float]) -> list[Trial]:
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
            batch_size=row["settings"]["batch_size"],
            learning_rate=row["settings"]["learning_rate"],
            hyperparameters=row["settings"],
        )
        for row in rows
        if row["workload"] in goals
    ]


def goals_of(rows: Sequence[Row]) -> dict[str, float]:
    return {row["workload"]: row["goal"] for row in rows if row["kind"] == "target"}


def verdicts(rows: Sequence[Row], goals: Mapping[str, float], control: str) -> list[str]:
    """On how many workloads each submission was faster, slower, or neither for sure.

    Where some studies reached the goal and others did not, nothing is sure: a study that found no
    setting that gets there is no slow one, as `compare` takes it for.
    """
    wanted = {name: Goal("loss", goal, "<") for name, goal in goals.items()}
    compared = compare(as_trials(rows, goals), wanted, clock="seconds", reference=control)
    mixed = {
        (each.submission, each.workload)
        for each in compared.standings
        if len({outcome.reached is None for outcome in each.counting}) > 1
    }
    found: dict[str, list[str]] = defaultdict(list)
    for standing in compared.standings:
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


def report(rows: Sequence[Row], size: Size) -> None:
    """Print the tables of docs/suite.md."""
    _print_targets(rows)
    for group in GROUPS:
        names = [name for name in group.submissions if name in size.externals + size.selves]
        workloads = trained_on(rows, names, size)
        print(f"\n## {group.title}: {len(workloads)} of {len(PROBLEMS)} workloads are trained\n")
        if not workloads:
            continue
        trials = trials_of(rows, names, workloads, size)
        _print_scores(trials, names, group.ruleset)
        _print_speed_ups(trials, group, names, goals_of(rows))
        _print_times(trials, names, group.ruleset)
    _print_tuners(rows, size)


def _print_targets(rows: Sequence[Row]) -> None:
    print(f"| workload | target | {' | '.join(SPACES)} |\n|---|---|{'---|' * len(SPACES)}")
    for row in rows:
        if row["kind"] == "target":
            medians = " | ".join(f"{row['of_each'][name]:.4g}" for name in SPACES)
            print(f"| {row['workload']} | {row['goal']:.4g} | {medians} |")


def _print_scores(trials: Sequence[Row], names: Sequence[str], ruleset: Ruleset) -> None:
    times = times_of(trials, ruleset)
    clocks = [*map(str, DEVICES), "steps"]
    other = {clock: scored(times_of(trials, ruleset, clock)) for clock in clocks}
    scores, again = scored(times), [scored(times_of(t, ruleset)) for t in drawn(trials)]
    within = performance_profile(times)
    ones, twos = within.at(1.25), within.at(2)
    reached = {
        name: sum(r["ended"] == "goal" for r in trials if r["submission"] == name) for name in names
    }
    count = {name: sum(r["submission"] == name for r in trials) for name in names}
    print(
        "| submission | score (95 %) | 1 device | 64 devices | steps | within 1.25 | within 2 |"
        " trials at the goal |\n|---|---|---|---|---|---|---|---|"
    )
    for name in sorted(names, key=lambda n: -scores[n]):
        low, high = interval([of[name] for of in again])
        print(
            f"| {name} | {scores[name]:.2f} ({low:.2f} to {high:.2f}) | {other['1'][name]:.2f} |"
            f" {other['64'][name]:.2f} | {other['steps'][name]:.2f} | {ones[name]:.0%} |"
            f" {twos[name]:.0%} | {reached[name]} of {count[name]} |"
        )


def _print_speed_ups(
    trials: Sequence[Row], group: Group, names: Sequence[str], goals: Mapping[str, float]
) -> None:
    times = times_of(trials, group.ruleset)
    print(
        "\n| submission | over | speed-up (95 %) | faster / slower / open | verdict |"
        "\n|---|---|---|---|---|"
    )
    for name in names:
        control = group.submissions[name].control
        if control not in names:
            continue
        pair = [r for r in trials if r["submission"] in (name, control)]
        (counts,) = verdicts(pair, {w: goals[w] for w in times[name]}, control)
        mean, low, high = overall(times[name], times[control], group.ruleset.budget)
        said = "helped" if low > 1 else "was slower" if high < 1 else "not shown"
        print(f"| {name} | {control} | {between(mean, low, high)} | {counts} | {said} |")


def _print_times(trials: Sequence[Row], names: Sequence[str], ruleset: Ruleset) -> None:
    times = times_of(trials, ruleset)
    workloads = list(times[names[0]])
    print(f"\n| submission | {' | '.join(workloads)} |\n|---|{'---|' * len(workloads)}")
    for name in names:
        cells = (f"{t:.2f}" if math.isfinite(t := times[name][w]) else "-" for w in workloads)
        print(f"| {name} | {' | '.join(cells)} |")


def _print_tuners(rows: Sequence[Row], size: Size) -> None:
    """CARBS against quasi-random search: the best time after so many trials."""
    names = [name for name in TUNERS if name in size.externals]
    of: dict[str, dict[tuple[str, int], list[Row]]] = {name: defaultdict(list) for name in names}
    for row in rows:
        if row["kind"] == "trial" and row["submission"] in names:
            of[row["submission"]][row["workload"], row["study"]].append(row)
    whole = [key for key in of[names[0]] if all(len(of[name][key]) == size.long for name in names)]
    if len(names) < 2 or not whole:
        return
    print(
        f"\n## CARBS over quasi-random search, {len(whole)} studies\n"
        "\n| trials | speed-up (95 %) | studies at the goal: CARBS, quasi-random |\n|---|---|---|"
    )
    for count in sorted({size.trials, 2 * size.trials, size.long} & set(range(size.long + 1))):
        best = {
            name: {
                key: min(clock_of(r) for r in of[name][key] if r["trial"] < count) for key in whole
            }
            for name in names
        }
        ours, theirs = best["sgd, CARBS"], best["sgd"]
        mean, low, high = over_studies(ours, theirs)
        reached = [sum(map(math.isfinite, each.values())) for each in (ours, theirs)]
        print(
            f"| {count} | {between(mean, low, high)} | {reached[0]}, {reached[1]} of {len(whole)} |"
        )
