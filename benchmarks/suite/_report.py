# SPDX-License-Identifier: Apache-2.0
"""The tables of docs/suite.md, and the scores to save."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from benchmarks.suite._scores import (
    GROUPS,
    Group,
    SpeedUp,
    clock_of,
    compared,
    goals_of,
    mean_speed_up,
    scored,
    times_of,
    trained_on,
    trial_by_trial,
    trials_of,
    verdicts,
)
from benchmarks.suite._submissions import CARBS, EXTERNAL, SELF, SPACES, TUNERS, Size
from benchmarks.suite._trials import DEVICES, Row
from benchmarks.suite._workloads import PROBLEMS
from noisescale import performance_profile

STARTS = {
    "16": [16],
    "32": [32],
    "64 to 256": [64, 128, 256],
    "512 and 1,024": [512, 1024],
    "2,048": [2048],
}
"""Batch sizes that trainings begin with, in groups."""

RATIOS = (1.0, 1.25, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0)
"""At which the performance profile is saved."""


def report(rows: Sequence[Row], size: Size) -> list[Row]:
    """Print the tables, and return a row for each submission."""
    _print_targets(rows)
    found: list[Row] = []
    for group in GROUPS:
        names = [n for n in group.submissions if n in size.externals + size.selves and n != CARBS]
        workloads = trained_on(rows, names, size)
        print(f"\n## {group.title}: {len(workloads)} of {len(PROBLEMS)} workloads are trained")
        if workloads:
            trials = trials_of(rows, names, workloads, size)
            found += _of_group(trials, group, names, goals_of(rows))
            found += _by_batch_size(trials, group, names)
    found += untuned(rows, size)
    found += tuners(rows, size)
    return found


def write_page(rows: Sequence[Row], size: Size, path: Path) -> None:
    """Write the report of `noisescale compare` on external tuning."""
    from noisescale.lab.compare.document import document_of
    from noisescale.report.page import write_page as write_document

    names = [name for name in size.externals if name != CARBS]
    workloads = trained_on(rows, names, size)
    goals = {w: goal for w, goal in goals_of(rows).items() if w in workloads}
    found = compared(trials_of(rows, names, workloads, size), goals, "sgd")
    write_document(document_of(found), path)
    print(f"\nReport: {path}")


def _of_group(
    trials: Sequence[Row], group: Group, names: Sequence[str], goals: Mapping[str, float]
) -> list[Row]:
    """Print speed-ups and scores."""
    times = times_of(trials, group.ruleset)
    found = _scores(trials, group, names)
    lines = []
    for row in found:
        name = row["submission"]
        compared_with: list[object] = ["", "", "", ""]
        if (control := group.submissions[name].control) in names:
            pair = [r for r in trials if r["submission"] in (name, control)]
            (counts,) = verdicts(pair, {w: goals[w] for w in times[name]}, control)
            ours, theirs = times[name], times[control]
            mean = mean_speed_up(((w, ours[w], theirs[w]) for w in ours), group.ruleset.budget)
            row |= {"over": control, "speed_up": _saved(mean)}
            compared_with = [control, mean, mean.verdict, counts]
        goal = f"{row['at_the_goal']} of {row['trials']}"
        lines.append([name, *compared_with, f"{row['score']:.2f}", goal])
    headings = "submission | over | speed-up (95 %) | verdict | faster / slower / open"
    _print_table(f"{headings} | score | at the goal", lines)
    return found


def _scores(trials: Sequence[Row], group: Group, names: Sequence[str]) -> list[Row]:
    times = times_of(trials, group.ruleset)
    clocks = [*map(str, DEVICES), "steps"]
    by_clock = {clock: scored(times_of(trials, group.ruleset, clock)) for clock in clocks}
    scores = scored(times)
    profile = performance_profile(times)
    shares = {str(ratio): profile.at(ratio) for ratio in RATIOS}
    of = {name: [row for row in trials if row["submission"] == name] for name in names}
    return [
        {
            "ruleset": group.title,
            "submission": name,
            "score": round(scores[name], 4),
            "by_other_clocks": {clock: round(by_clock[clock][name], 4) for clock in clocks},
            "profile": {ratio: round(share[name], 4) for ratio, share in shares.items()},
            "at_the_goal": sum(row["ended"] == "goal" for row in of[name]),
            "trials": len(of[name]),
            "seconds": {w: t if math.isfinite(t) else None for w, t in times[name].items()},
        }
        for name in names
    ]


def _by_batch_size(trials: Sequence[Row], group: Group, names: Sequence[str]) -> list[Row]:
    """Print adaptive against fixed batch sizes, with the same settings otherwise."""
    scheduled = [n for n in names if group.submissions[n].method.policy]
    if not scheduled or not group.submissions[scheduled[0]].space:
        return []
    lines, found = [], []
    for name in scheduled:
        control = group.submissions[name].control
        each = [trial_by_trial(trials, name, control, sizes) for sizes in STARTS.values()]
        lines.append([name, *each])
        found += [
            {"submission": name, "over": control, "from": start}
            | {"speed_up": _saved(e.speed_up), "both": e.both, "won": e.won, "lost": e.lost}
            for start, e in zip(STARTS, each, strict=True)
        ]
    _print_table(f"policy | {' | '.join(STARTS)}", lines)
    return found


def untuned(rows: Sequence[Row], size: Size) -> list[Row]:
    """Print one setting for all workloads against the best of each study.

    The budget is that of external tuning.
    """
    lines, found = [], []
    for name in SPACES:
        pair = (f"{name}, untuned", name)
        workloads = trained_on(rows, pair, size)
        if not workloads or not set(pair) <= {*size.selves, *size.externals}:
            continue
        of = {n: trials_of(rows, (n,), workloads, size) for n in pair}
        ours, theirs = times_of(of[pair[0]], SELF)[pair[0]], times_of(of[name], EXTERNAL)[name]
        ours = {w: t if t <= PROBLEMS[w].budget else math.inf for w, t in ours.items()}
        mean = mean_speed_up((w, ours[w], theirs[w]) for w in workloads)
        faster = sum(ours[w] < theirs[w] for w in workloads)
        lines.append([*pair, mean, mean.verdict, f"{faster} of {len(workloads)}"])
        found.append({"submission": pair[0], "over": name, "speed_up": _saved(mean)})
    if lines:
        print("\n## One setting over the best of five")
        _print_table("submission | over | speed-up (95 %) | verdict | faster on", lines)
    return found


def _print_targets(rows: Sequence[Row]) -> None:
    _print_table(
        f"workload | target | {' | '.join(SPACES)}",
        [
            [row["workload"], f"{row['goal']:.4g}"]
            + [f"{row['of_each'][name]:.4g}" for name in SPACES]
            for row in rows
            if row["kind"] == "target"
        ],
    )


def tuners(rows: Sequence[Row], size: Size) -> list[Row]:
    """Print CARBS against quasi-random search: the best time after so many trials.

    A workload counts once all of its studies are there.
    """
    of: dict[str, dict[tuple[str, int], list[Row]]] = {n: defaultdict(list) for n in TUNERS}
    for row in sorted(rows, key=lambda row: int(row["trial"])):
        if row["kind"] == "trial" and row["submission"] in of:
            of[row["submission"]][row["workload"], row["study"]].append(row)
    whole = [
        (workload, study)
        for workload in dict.fromkeys(workload for workload, _ in of[CARBS])
        for study in range(size.studies)
        if all(len(of[n][workload, k]) >= size.long for n in TUNERS for k in range(size.studies))
    ]
    if not whole:
        return []
    theirs, ours = ({k: of[n][k] for k in whole} for n in TUNERS)
    workloads = len({workload for workload, _ in whole})
    print(f"\n## CARBS over quasi-random search, {len(whole)} studies of {workloads} workloads")
    lines, found = [], []
    for count in sorted({size.trials, 2 * size.trials, size.long} & set(range(size.long + 1))):
        best = [{k: _best(each[k][:count]) for k in whole} for each in (ours, theirs)]
        mean = mean_speed_up((k[0], best[0][k], best[1][k]) for k in whole)
        once = {k: _without_repeats(ours[k][:count]) for k in whole}
        fair = mean_speed_up((k[0], _best(once[k]), best[1][k]) for k in whole)
        reached = [sum(map(math.isfinite, each.values())) for each in best]
        at_goal = [
            sum(row["ended"] == "goal" for trials in of.values() for row in trials[:count])
            for of in (ours, once, theirs)
        ]
        tried = [sum(len(trials[:count]) for trials in of.values()) for of in (ours, once, theirs)]
        shares = [f"{a} of {b}" for a, b in zip(at_goal, tried, strict=True)]
        lines.append([count, mean, fair, f"{reached[0]}, {reached[1]}", *shares])
        speed_ups = {"speed_up": _saved(mean), "without_repeats": _saved(fair)}
        found.append({"submission": CARBS, "after": count, "studies": len(whole)} | speed_ups)
    headings = "trials | speed-up (95 %) | without repeats | studies at the goal: CARBS, others"
    headings += " | trials at the goal: CARBS | without repeats | quasi-random"
    _print_table(headings, lines)
    return found


def _saved(mean: SpeedUp) -> Row:
    return {k: round(v, 4) if math.isfinite(v) else None for k, v in mean._asdict().items()}


def _best(trials: Sequence[Row]) -> float:
    return min(map(clock_of, trials))


def _without_repeats(trials: Sequence[Row]) -> list[Row]:
    """CARBS tries some of its points again, with another seed, which may be a lucky one."""
    first: dict[str, Row] = {}
    for row in trials:
        first.setdefault(str(row["asked"]), row)
    return list(first.values())


def _print_table(headings: str, lines: Iterable[Sequence[object]]) -> None:
    print(f"\n| {headings} |\n|{'---|' * (headings.count('|') + 1)}")
    for line in lines:
        print(f"| {' | '.join(map(str, line))} |")
