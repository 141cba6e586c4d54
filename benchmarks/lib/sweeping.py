# SPDX-License-Identifier: Apache-2.0
"""Tune the learning rate of fixed batch sizes for the fewest steps to a goal.

Doubled and halved until both neighbours of the best are worse, then tried between, by the median
over seeds. What was tried is kept in rows that a benchmark saves and goes on from.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from benchmarks.lib.workloads import BY_ADASUM, WORKLOADS, Workload, steps_to_goal

HOPELESS = 1.6
"""Runs are given up after so many times the steps of the best learning rate so far."""

Row = dict[str, Any]


class Command(NamedTuple):
    """What a benchmark that sweeps was asked for."""

    names: list[str]
    """Of the workloads."""
    deadline: float
    """On the monotonic clock."""
    report: bool
    smoke: bool

    @classmethod
    def read(cls, description: str, names: Sequence[str]) -> Command:
        """Read the command line of a benchmark that knows so many workloads."""
        parser = argparse.ArgumentParser(description=description)
        parser.add_argument("--budget", type=float, default=math.inf, help="minutes")
        parser.add_argument("--only", choices=names)
        parser.add_argument("--report", action="store_true", help="print what is saved, run none")
        parser.add_argument("--smoke", action="store_true", help="a few digits, unsaved")
        given = parser.parse_args()
        chosen = [given.only] if given.only else list(names)
        deadline = time.monotonic() + 60 * given.budget
        return cls(["digits"] if given.smoke else chosen, deadline, given.report, given.smoke)


class Sweep:
    """The learning rates tried so far, at all batch sizes of all workloads."""

    def __init__(
        self, rows: list[Row], pool: ProcessPoolExecutor, save: Callable[[], None]
    ) -> None:
        self.rows = rows
        self.pool = pool
        self.save = save

    def tried(self, workload: Workload, batch_size: int) -> dict[float, float]:
        """Median steps for each learning rate; infinite where half of the seeds failed."""
        return {
            row["lr"]: statistics.median(s or math.inf for s in row["steps"])
            for row in self.rows
            if row["kind"] == "sweep"
            and (row["workload"], row["batch_size"]) == (workload.name, batch_size)
        }

    def best(self, workload: Workload, batch_size: int) -> Row | None:
        """The best learning rate of a batch size; None while none reached the goal."""
        tried = self.tried(workload, batch_size)
        lr = min(tried, key=lambda x: tried[x], default=0.0)
        if not math.isfinite(tried.get(lr, math.inf)):
            return None
        return next(
            row
            for row in self.rows
            if row["kind"] == "sweep"
            and (row["workload"], row["batch_size"], row["lr"]) == (workload.name, batch_size, lr)
        )

    def tune(self, workload: Workload, batch_size: int, start: float, most_steps: int) -> None:
        """Try learning rates until the best one is bracketed, by factors of 2, then of √2."""
        for wanted in self._untried(workload, batch_size, start):
            best = min(self.tried(workload, batch_size).values(), default=math.inf)
            limit = int(min(most_steps, HOPELESS * best))
            seeds = range(workload.seeds)
            name, goal = workload.name, workload.goal
            tasks = [(name, goal, batch_size, lr, k, limit) for lr in wanted for k in seeds]
            started = time.perf_counter()
            steps = list(self.pool.map(_steps_to_goal, tasks))
            for k, lr in enumerate(wanted):
                of_it = steps[k * len(seeds) : (k + 1) * len(seeds)]
                self.rows.append(
                    {
                        "kind": "sweep",
                        "workload": workload.name,
                        "batch_size": batch_size,
                        "lr": lr,
                        "limit": limit,
                        "steps": [round(s, 2) if math.isfinite(s) else None for s in of_it],
                    }
                )
                print(
                    f"{workload.name}, batch size {batch_size}, lr {lr:.3g}:"
                    f" {statistics.median(of_it):.1f} steps",
                    flush=True,
                )
            print(f"  {time.perf_counter() - started:.0f} s", flush=True)
            self.save()

    def by_rule(self, workload: Workload, batch_size: int, times: int, most_steps: int) -> None:
        """Train at a larger batch size, its learning rate by rule from the best one of this."""
        best = self.best(workload, batch_size)
        about = {"kind": "by rule", "workload": workload.name, "batch_size": times * batch_size}
        about |= {"from": batch_size}
        if times * batch_size not in workload.batch_sizes:
            return
        if best is None or any(about.items() <= row.items() for row in self.rows):
            return
        if (tuned := self.best(workload, times * batch_size)) is not None:
            most_steps = math.ceil(3 * statistics.median(s or math.inf for s in tuned["steps"]))
        lr = best["lr"] * (times if workload.optimizer is torch.optim.SGD else math.sqrt(times))
        name, goal = workload.name, workload.goal
        tasks = [(name, goal, times * batch_size, lr, k, most_steps) for k in range(workload.seeds)]
        steps = list(self.pool.map(_steps_to_goal, tasks))
        found = [round(s, 2) if math.isfinite(s) else None for s in steps]
        self.rows.append({**about, "lr": lr, "limit": most_steps, "steps": found})
        self.save()

    def _untried(self, workload: Workload, batch_size: int, start: float) -> Iterator[list[float]]:
        def missing(*candidates: float) -> list[float]:
            known = list(self.tried(workload, batch_size))
            return [
                c for c in candidates if not any(math.isclose(c, k, rel_tol=1e-6) for k in known)
            ]

        if wanted := missing(start):
            yield wanted
        for factor in (2.0, math.sqrt(2)):
            while True:
                tried = self.tried(workload, batch_size)
                if factor == 2:  # what the second round finds does not send the first one on
                    octaves = {lr: math.log2(lr / start) for lr in tried}
                    tried = {lr: tried[lr] for lr, x in octaves.items() if abs(x - round(x)) < 1e-6}
                best = min(tried, key=lambda lr: tried[lr])
                if math.isfinite(tried[best]):
                    wanted = missing(best / factor, best * factor)
                elif max(tried) / min(tried) < 300:  # nothing reached the goal yet: look farther
                    wanted = missing(min(tried) / 2, max(tried) * 2)
                else:
                    return
                if not wanted:
                    break
                yield wanted


def _steps_to_goal(task: tuple[str, float, int, float, int, int]) -> float:
    torch.set_num_threads(1)
    name, goal, *others = task
    return steps_to_goal(replace((WORKLOADS | BY_ADASUM)[name], goal=goal), *others)
