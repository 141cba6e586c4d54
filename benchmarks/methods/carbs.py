# SPDX-License-Identifier: Apache-2.0
"""`CarbsSampler` beside other samplers at equal cost: the front that each has found.

Each search tunes the settings of one of five problems (`_carbs_problems.py`) until it has spent
100 times the cost of its first settings, or has tried 1,000 (150 for two slow samplers). Its front
is what it would choose by its own noisy measurements at each cost, with the means of repeated
trials. Reported is the hypervolume that these points dominate by their losses without noise, in log
cost and loss, as a share of the known front's (of the largest that any search found, where no front
is known).

Four further problems (`_carbs_development.py`) were used to choose between forms of the search.
They run only where `--problems` names them.

Two opponents need packages beside Optuna (see ../peers-requirements.txt), and are left out without.

    python benchmarks/methods/carbs.py [--seeds 10] [--only CARBS random] [--problems digits]
    python benchmarks/methods/carbs.py --report
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import torch

sys.path.append(str(Path(__file__).resolve().parents[2]))
from benchmarks.lib.results import saved_rows, write_results
from benchmarks.methods._carbs_development import DEVELOPMENT
from benchmarks.methods._carbs_problems import PROBLEMS, Problem, six_problem
from benchmarks.methods._carbs_samplers import SEARCHES, installed

COST, TRIALS = 100.0, 1000
"""What a search may spend, in costs of the first settings, and its largest number of trials."""

FEWER_TRIALS = {"GP, two objectives": 150, "Protein": 150}
"""Of samplers whose suggestions take seconds."""

SHARES = (0.1, 0.2, 0.3, 0.5, 0.7, 1.0)
"""Of the allowed cost."""

AT = [2, 3, 4, 5]
"""Places of the shares that are reported."""

Tried = tuple[dict[str, float], float, float]
"""Settings, cost and measured loss."""


def chosen(tried: Sequence[Tried]) -> list[tuple[dict[str, float], float]]:
    """The front by measurements: settings and cost, each better than all that are cheaper."""
    groups: dict[tuple[float, ...], list[Tried]] = {}
    for one in tried:
        groups.setdefault(tuple(one[0].values()), []).append(one)
    means = [
        (same[0][1], float(np.mean([loss for _, _, loss in same])), same[0][0])
        for same in groups.values()
    ]
    means.sort(key=lambda mean: mean[:2])
    front: list[tuple[dict[str, float], float]] = []
    best = float("inf")
    for cost, loss, params in means:
        if loss < best:
            best = loss
            front.append((params, cost))
    return front


def searched(
    problem: Problem, sampler: str, seed: int, trials: int | None = None
) -> dict[str, Any]:
    """One search, as a row."""
    trials = trials or FEWER_TRIALS.get(sampler, TRIALS)
    search = SEARCHES[sampler](problem, seed)
    noise = np.random.default_rng([seed, 1])
    allowed = COST * problem.cost(problem.center)
    spent, tried, seconds, failed = [0.0], [], [], ""
    while len(tried) < trials:
        began = time.process_time()
        try:
            params = search.ask()
        except torch.linalg.LinAlgError as error:  # an opponent's own: what it has is what counts
            failed = " ".join(str(error).split())[:100]
            break
        seconds.append(time.process_time() - began)
        cost, loss = problem.cost(params), problem.measured(params, noise)
        if spent[-1] + cost > allowed:
            break
        search.tell(params, loss, cost)
        tried.append((params, cost, loss))
        spent.append(spent[-1] + cost)
    areas: dict[bool, list[float]] = {False: [], True: []}
    largest = {each: problem.largest_area(from_center=each) for each in areas}
    for share in SHARES:
        front = chosen(tried[: int(np.searchsorted(spent[1:], share * allowed, side="right"))])
        losses = [problem.loss(params) for params, _ in front]
        costs = [cost for _, cost in front]
        for each, found in areas.items():
            found.append(round(problem.area(costs, losses, from_center=each) / largest[each], 4))
    return {
        "problem": problem.name,
        "sampler": sampler,
        "seed": seed,
        "trials": len(tried),
        "spent": round(spent[-1] / allowed, 3),
        "areas": areas[False],
        "areas_from_center": areas[True],
        "cpu_seconds": round(float(np.median(seconds)), 4),
        **({"failed": failed} if failed else {}),
    }


def timed(sampler: str, trials: int = 100, repetitions: int = 3) -> dict[str, Any]:
    """Times of a suggestion after 100 trials of six settings, as a row."""
    problem, random = six_problem(), np.random.default_rng(0)
    search = SEARCHES[sampler](problem, 0)
    ends = {name: (kind, low, high) for name, (kind, low, high) in problem.space.items()}
    for _ in range(trials):
        params = {}
        for name, (kind, low, high) in ends.items():
            value = (
                random.uniform(low, high)
                if kind == "linear"
                else low * (high / low) ** random.random()
            )
            params[name] = round(value) if kind == "int" else float(value)
        told(search, params, problem.measured(params, random), problem.cost(params))
    wall, cpu = [], []
    for _ in range(repetitions):
        began = time.perf_counter(), time.process_time()
        params = search.ask()
        wall.append(time.perf_counter() - began[0])
        cpu.append(time.process_time() - began[1])
        search.tell(params, problem.measured(params, random), problem.cost(params))
    return {
        "problem": "time of a suggestion",
        "sampler": sampler,
        "seed": 0,
        "wall_seconds": round(float(np.median(wall)), 4),
        "cpu_seconds": round(float(np.median(cpu)), 4),
        "load": round(os.getloadavg()[0], 1),
    }


def told(search: Any, params: dict[str, float], loss: float, cost: float) -> None:
    """Tell a search of settings that it has not asked for."""
    if hasattr(search, "study"):
        search.study.enqueue_trial(params)
        if len(search.study.trials) == 2 and search.study.trials[0].state.name == "WAITING":
            search.ask()  # the first settings
            search.tell(params, 2.0, cost)
        search.ask()
    search.tell(params, loss, cost)


def report(rows: Sequence[dict[str, Any]]) -> None:
    """Print medians and quartiles over the seeds, and in how many of them CARBS was ahead."""
    names = dict.fromkeys(row["problem"] for row in rows if "areas" in row)
    unknown = [p.name for make in (*PROBLEMS, *DEVELOPMENT) if (p := make()).front is None]
    for name, area in ((name, area) for name in names for area in ("areas", "areas_from_center")):
        of = [row for row in rows if row["problem"] == name]
        scale = max(row[area][-1] for row in of) if name in unknown else 1.0
        whole = " from the first settings' cost" if area != "areas" else ""
        print(f"\n{name}, % of the front's area{whole} at 30, 50, 70 and 100 % of the budget")
        ours = {row["seed"]: row[area] for row in of if row["sampler"] == "CARBS"}
        for sampler in SEARCHES:
            mine = [row for row in of if row["sampler"] == sampler]
            if not mine:
                continue
            areas = 100 * np.array([row[area] for row in mine])[:, AT] / scale
            low, median, high = np.quantile(areas, (0.25, 0.5, 0.75), axis=0)
            bands = "  ".join(
                f"{b:5.1f} ({a:5.1f} to {c:5.1f})"
                for a, b, c in zip(low, median, high, strict=True)
            )
            trials = np.median([row["trials"] for row in mine])
            cap = FEWER_TRIALS.get(sampler, TRIALS)
            capped = sum(row["trials"] == cap for row in mine)
            ended = f"{capped} capped, {sum('failed' in row for row in mine)} failed"
            print(f"{sampler:20} {bands}  {len(mine)} seeds, {trials:.0f} trials, {ended}")
            pairs = [(ours[row["seed"]], row[area]) for row in mine if row["seed"] in ours]
            if sampler != "CARBS" and pairs:
                won = [sum(our[at] > their[at] for our, their in pairs) for at in AT]
                print(f"{'':20} CARBS ahead in {', '.join(map(str, won))} of {len(pairs)}")
    for row in rows:
        if "wall_seconds" in row:
            wall, cpu = row["wall_seconds"], row["cpu_seconds"]
            print(f"{row['sampler']:20} {wall:.3f} s, CPU {cpu:.3f} s, load {row['load']}")


def main() -> None:
    problems = {p.name: p for make in (*PROBLEMS, *DEVELOPMENT) if (p := make())}
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=list(range(10)))
    parser.add_argument("--only", nargs="+", choices=list(SEARCHES), help="samplers")
    parser.add_argument("--problems", nargs="+", choices=list(problems))
    parser.add_argument("--times", action="store_true", help="the times of a suggestion alone")
    parser.add_argument("--again", action="store_true", help="replace saved rows")
    parser.add_argument("--budget", type=float, default=float("inf"), help="minutes to begin in")
    parser.add_argument("--report", action="store_true", help="print what was saved")
    parser.add_argument("--smoke", action="store_true", help="12 trials, nothing is saved")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    if arguments.smoke:
        print(searched(PROBLEMS[0](), "CARBS", 0, 12), searched(PROBLEMS[3](), "random", 0, 12))
        print(timed("CARBS", 12, 1))
        return
    rows = saved_rows("methods/carbs")
    if arguments.report:
        return report(rows)
    versions = installed()
    samplers = [name for name in arguments.only or SEARCHES if name in versions]
    for name in SEARCHES.keys() - versions.keys():
        print(f"{name} is not installed.")
    until = time.monotonic() + 60 * arguments.budget
    wanted = [
        (name, sampler, seed)
        for seed in arguments.seeds
        for name in arguments.problems or [make().name for make in PROBLEMS]
        for sampler in samplers
    ]
    if arguments.times:
        wanted = [("time of a suggestion", sampler, 0) for sampler in samplers]
    for key in wanted:
        saved = [row for row in rows if (row["problem"], row["sampler"], row["seed"]) == key]
        if (saved and not arguments.again) or time.monotonic() > until:
            continue
        name, sampler, seed = key
        row = timed(sampler) if arguments.times else searched(problems[name], sampler, seed)
        rows = [one for one in saved_rows("methods/carbs") if one not in saved] + [row]
        print(row, flush=True)
        facts: dict[str, Any] = {"samplers": versions, "cost": COST, "trials": TRIALS}
        write_results("methods/carbs", rows, quiet=True, shares=SHARES, **facts)
    report(rows)


if __name__ == "__main__":
    main()
