# SPDX-License-Identifier: Apache-2.0
"""What is compared in run.py, and the trainings of each: targets, studies, tuners.

The rules are those of AlgoPerf 0.6: three studies of five quasi-random points from a space that is
the same for all workloads, or three trainings with settings that are the same for all workloads,
which then have 1.5 times the budget. Points and seeds depend on the workload and the study: there,
submissions with one space have the same points, initial weights and batches.
"""

from __future__ import annotations

import math
import statistics
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.suite._trials import CLOCK, DEVICES, MOST, Method, Row, Task, step_seconds
from benchmarks.suite._workloads import PROBLEMS
from noisescale.lab.compare.algoperf import RULESETS
from noisescale.lab.parameters import Parameter, points, range_parameter

EXTERNAL, SELF = RULESETS["external_tuning_v06"], RULESETS["self_tuning_v06"]
TARGET_TRIALS, RERUNS = 8, 5
"""Of each algorithm, and of its best trial with other seeds. AlgoPerf: 200, 20."""
TARGET_BUDGET = 0.25
"""Of the workload's budget: four times the fastest is as far as the score looks. AlgoPerf: 0.75."""
CARBS = "sgd, CARBS"
"""It is compared after `LONG` trials alone: the first four of CARBS are drawn around the middle."""
LONG = 15
"""Trials of a study that compares tuners."""

LARGE = range_parameter("batch_size", 512, 2 * MOST, "log")
SIZES = range_parameter("batch_size", 16, 2 * MOST, "log")
"""A value is rounded down to a power of two."""
MOMENTUM = range_parameter("momentum", 0.8, 0.98, "momentum")
SGD = range_parameter("learning_rate", 0.1, 3.0, "log")
WITH_MOMENTUM = range_parameter("learning_rate", 0.03, 1.0, "log")
ADAMW = range_parameter("learning_rate", 0.001, 0.03, "log")
DECAY = range_parameter("weight_decay", 1e-4, 0.1, "log")

Space = tuple[Parameter, ...]
SPACES: Mapping[str, Space] = {
    "sgd": (SGD, SIZES),
    "momentum": (WITH_MOMENTUM, SIZES, MOMENTUM),
    "adamw": (ADAMW, SIZES, MOMENTUM, DECAY),
}


@dataclass(frozen=True)
class Submission:
    """One line of the comparison."""

    name: str
    method: Method
    control: str
    """The submission that it is compared with; "" if it only serves others."""
    space: Space = ()
    settings: Mapping[str, float] = field(default_factory=dict)
    """Of a submission that tunes itself, instead of a space."""
    carbs: bool = False
    """Whether CARBS chooses the next trial, and not a quasi-random sequence."""


def _external() -> Iterator[Submission]:
    sgd, momentum, adamw = SPACES.values()
    yield Submission("sgd", Method("sgd"), "", sgd)
    yield Submission("momentum", Method("momentum"), "sgd", momentum)
    yield Submission("adamw", Method("adamw"), "sgd", adamw)
    for policy in ("tradeoff", "norm_test"):
        yield Submission(f"sgd, {policy}", Method("sgd", policy), "sgd", sgd)
    constant = Method("sgd", "tradeoff", lr_scaling="none")
    yield Submission("sgd, tradeoff, constant lr", constant, "sgd", sgd)
    yield Submission("adamw, tradeoff", Method("adamw", "tradeoff"), "adamw", adamw)
    large = (WITH_MOMENTUM, LARGE, MOMENTUM)
    yield Submission("momentum, large", Method("momentum"), "momentum", large)
    for combine in ("adasum", "decentlam"):
        method = Method("momentum", combine=combine, ranks=4)
        yield Submission(f"{combine} x 4, large", method, "momentum, large", large)
    yield Submission(CARBS, Method("sgd"), "sgd", sgd, carbs=True)


def _self() -> Iterator[Submission]:
    settings: dict[str, dict[str, float]] = {
        "sgd": {"learning_rate": 1.0, "batch_size": 128},  # 0.1/(1 - 0.9), as with momentum
        "momentum": {"learning_rate": 0.1, "batch_size": 128, "momentum": 0.9},
        "adamw": {"learning_rate": 0.003, "batch_size": 128, "momentum": 0.9},
    }
    for name, chosen in settings.items():
        control = "" if name == "sgd" else "sgd, untuned"
        yield Submission(f"{name}, untuned", Method(name), control, settings=chosen)
    for name in ("sgd", "adamw"):
        for least, said in ((0, "tradeoff"), (128, "tradeoff from 128 up")):
            method = Method(name, "tradeoff", least)
            yield Submission(
                f"{name}, {said}, untuned", method, f"{name}, untuned", settings=settings[name]
            )


EXTERNALS = {each.name: each for each in _external()}
SELVES = {each.name: each for each in _self()}
TUNERS = ("sgd", CARBS)
"""Their studies go on to `LONG` trials on the four workloads that are no variants."""
SEARCHES = {name: EXTERNAL.studies * rank for rank, name in enumerate(sorted(PROBLEMS))}
"""Number of the first study of each workload, so that no two have the same points and seeds."""


@dataclass(frozen=True)
class Size:
    """How much is trained."""

    externals: tuple[str, ...] = tuple(EXTERNALS)
    selves: tuple[str, ...] = tuple(SELVES)
    studies: int = EXTERNAL.studies
    trials: int = EXTERNAL.trials
    long: int = LONG
    target_trials: int = TARGET_TRIALS
    reruns: int = RERUNS
    budget: float = 1.0


Key = tuple[str, str, str, int, int]


def key_of(row: Row) -> Key:
    return row["kind"], row["workload"], row["submission"], row["study"], row["trial"]


def missing(
    rows: Sequence[Row], workloads: Sequence[str], size: Size, busy: set[Key]
) -> Iterator[Task]:
    """Yield the trainings that can begin now, in their order, a workload at a time.

    Args:
        rows: What is done.
        workloads: In their order.
        size: How many of each.
        busy: What is under way.
    """
    done = {key_of(row): row for row in rows}
    for workload in workloads:
        target = done.get(("target", workload, "", 0, 0))
        wanted = (
            _target_tasks(workload, size, done)
            if target is None
            else _study_tasks(workload, size, done, target["goal"])
        )
        yield from (t for t in wanted if key_of(t.about) not in done.keys() | busy)


def _target_tasks(workload: str, size: Size, done: Mapping[Key, Row]) -> Iterator[Task]:
    budget = TARGET_BUDGET * size.budget * PROBLEMS[workload].budget
    for name, space in SPACES.items():
        for k, point in enumerate(points(space, size.target_trials, 1000)):
            about = _about("target trial", workload, name, 0, k)
            yield Task(workload, Method(name), rounded(point), 5000 + k, -math.inf, budget, about)
        best = best_target_trial(workload, name, size, done)
        for k in range(0 if best is None else size.reruns):
            about = _about("rerun", workload, name, 0, k)
            settings = {} if best is None else best["settings"]
            yield Task(workload, Method(name), settings, 6000 + k, -math.inf, budget, about)


def best_target_trial(workload: str, name: str, size: Size, done: Mapping[Key, Row]) -> Row | None:
    """The trial of an algorithm with the lowest loss; None while some are missing."""
    keys: list[Key] = [("target trial", workload, name, 0, k) for k in range(size.target_trials)]
    if any(key not in done for key in keys):
        return None
    return min((done[key] for key in keys), key=_lowest)


def target_of(workload: str, size: Size, rows: Sequence[Row]) -> Row | None:
    """The target of a workload once all reruns are there.

    It is the median over the algorithms of the median of their lowest losses with other seeds. So
    two of three algorithms get there in a quarter of the budget, with good settings.
    """
    done = {key_of(row): row for row in rows}
    medians: dict[str, float] = {}
    for name in SPACES:
        keys: list[Key] = [("rerun", workload, name, 0, k) for k in range(size.reruns)]
        if any(key not in done for key in keys):
            return None
        medians[name] = statistics.median(_lowest(done[key]) for key in keys)
    found = {"goal": statistics.median(medians.values()), "of_each": medians}
    return _about("target", workload, "", 0, 0) | found


def _lowest(row: Row) -> float:
    return math.inf if row["best"] is None else float(row["best"])


def _study_tasks(workload: str, size: Size, done: Mapping[Key, Row], goal: float) -> Iterator[Task]:
    budget = size.budget * PROBLEMS[workload].budget
    for study in range(size.studies):
        for name in size.selves:
            each = SELVES[name]
            about = _about("trial", workload, name, study, 0)
            yield Task(
                workload,
                each.method,
                each.settings,
                _seed(workload, study, 0),
                goal,
                SELF.budget * budget,
                about,
            )
        for name in size.externals:
            each = EXTERNALS[name]
            base = not PROBLEMS[workload].variant_of
            if each.carbs and not base:
                continue
            count = size.long if name in TUNERS and base else size.trials
            search = SEARCHES[workload] + study
            for k in range(count):
                about = _about("trial", workload, name, study, k)
                if key_of(about) in done:
                    continue
                if each.carbs:
                    earlier: list[Row] = [
                        done[key]
                        for j in range(k)
                        if (key := ("trial", workload, name, study, j)) in done
                    ]
                    if len(earlier) < k:
                        break  # its next trial depends on all before
                    asked = by_carbs(each.space, earlier, search, goal, budget)
                    point, about = rounded(asked), about | {"asked": asked}
                else:
                    point = rounded(points(each.space, count, search)[k])
                yield Task(
                    workload, each.method, point, _seed(workload, study, k), goal, budget, about
                )


def by_carbs(
    space: Space, earlier: Sequence[Row], seed: int, goal: float, budget: float
) -> dict[str, float]:
    """What CARBS tries next. Its result is the log of the time to the goal; cost is time, too.

    A trial that missed the goal has the log of its budget, and more by how far off it was.
    """
    import optuna
    from optuna.distributions import FloatDistribution

    from noisescale import CarbsSampler

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    wanted: dict[str, Any] = {d.name: FloatDistribution(d.low, d.high, log=True) for d in space}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        search = optuna.create_study(sampler=CarbsSampler(seed=seed))
        for row in earlier:
            seconds = row["last"][-1]["seconds"][str(CLOCK)]
            value = math.log(seconds)
            if row["ended"] != "goal":
                value = math.log(budget) + math.log((row["best"] or 1e3 * goal) / goal) + 0.1
            search.add_trial(
                optuna.create_trial(
                    params=row["asked"],
                    distributions=wanted,
                    value=value,
                    user_attrs={"cost": seconds},
                )
            )
        asked = search.ask(wanted).params
    return {name: float(f"{value:.6g}") for name, value in asked.items()}


def protocol() -> dict[str, Any]:
    """What all rows of one file of results have in common."""
    return {
        "evaluations": "due by the clock without measuring",
        "clock": {str(d): [step_seconds(b, d) for b in (16, 128, MOST)] for d in DEVICES},
        "budgets": {name: problem.budget for name, problem in PROBLEMS.items()},
        "targets": [TARGET_TRIALS, RERUNS, TARGET_BUDGET],
        "spaces": {
            name: {d.name: [d.low, d.high] for d in each.space} or dict(each.settings)
            for name, each in {**EXTERNALS, **SELVES}.items()
        },
        "first_studies": SEARCHES,
    }


def rounded(point: Mapping[str, float]) -> dict[str, float]:
    """The point with a batch size that is a power of two."""
    size = min(2 ** math.floor(math.log2(point["batch_size"])), MOST)
    return {**point, "batch_size": size}


def _seed(workload: str, study: int, trial: int) -> int:
    return 100 * (SEARCHES[workload] + study + 1) + trial


def _about(kind: str, workload: str, submission: str, study: int, trial: int) -> Row:
    return {
        "kind": kind,
        "workload": workload,
        "submission": submission,
        "study": study,
        "trial": trial,
    }
