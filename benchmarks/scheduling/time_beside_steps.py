# SPDX-License-Identifier: Apache-2.0
"""Say what the runs of `fixed_budget.py` take in time on one thread of a CPU, beside their steps.

A step of each workload is timed at batch sizes of powers of two, in seconds of the processor: the
least of several passes each, as other work on a machine makes them longer.
The time of a run is the sum over its steps, between the timed sizes on a line; it leaves out what
measuring costs. It is divided by the time of B*, as steps are by the steps of B*.

    python benchmarks/scheduling/time_beside_steps.py [--budget MINUTES] [--only NAME] [--report]
"""

from __future__ import annotations

import statistics
import sys
import time
from itertools import pairwise
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

sys.path.append(str(Path(__file__).resolve().parents[2]))
from benchmarks.lib.results import saved_rows, write_results
from benchmarks.lib.sweeping import Command, Row
from benchmarks.scheduling import fixed_budget as fixed

NAME = "scheduling/time_beside_steps"
SIZES = [2**k for k in range(11)]
PASSES, STEPS = 7, 6


def seconds_of_step(budget: fixed.Budgeted, size: int) -> float:
    """The least seconds of a step at a batch size, over passes of several steps."""
    workload = budget.workload
    model = workload.seeded_model(0)
    optimizers = budget.optimizers(model, 1e-4)
    data = workload.data()[0]
    generator = torch.Generator().manual_seed(0)
    found = []
    for _ in range(PASSES):
        begun = time.thread_time()
        for _ in range(STEPS):
            chosen = torch.randint(len(data[0]), (size,), generator=generator)
            x, y = (part[chosen] for part in data)
            workload.loss(model, (x, y)).backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        found.append((time.thread_time() - begun) / STEPS)
    return min(found)


def seconds_at(size: float, seconds: dict[int, float]) -> float:
    """The seconds of a step, between those timed on a line."""
    return float(np.interp(size, sorted(seconds), [seconds[x] for x in sorted(seconds)]))


def seconds_of_run(row: Row, seconds: dict[int, float]) -> float:
    """The seconds of a run's steps, by its moves."""
    moves = [(0, row["start"]), *row["moves"], (row["steps"], 0)]
    parts = pairwise(moves)
    return sum((last - first) * seconds_at(size, seconds) for (first, size), (last, _) in parts)


def report(rows: list[Row], console: Console) -> None:
    """Print, for each workload and policy, steps and time over those of B*."""
    runs = fixed.Runs(saved_rows(fixed.NAME), Mock(), lambda: None)
    table = Table("workload", "B*", "a step at 4 B*, of one at B*", "policy", "steps", "time")
    ratios: dict[str, list[tuple[float, float]]] = {}
    for name in dict.fromkeys(row["workload"] for row in rows):
        budget = fixed.BUDGETS[name]
        if not fixed.starts_of(runs, budget):
            continue
        seconds = {r["batch_size"]: r["seconds"] for r in rows if r["workload"] == name}
        best = fixed.largest_good(runs.front(budget))
        at = [
            float(np.interp(x, sorted(seconds), [seconds[s] for s in sorted(seconds)]))
            for x in (best, 4 * best)
        ]
        whole = budget.examples / best
        for policy in ("auto", "by the examples", fixed.KEPT):
            trained = [
                row
                for start in fixed.starts_of(runs, budget).values()
                for row in runs.of(name, policy, start, runs.best_rate(name, start) or 0.0)
            ]
            if not trained:
                continue
            taken = [seconds_of_run(row, seconds) for row in trained]
            steps = [row["steps"] / whole for row in trained]
            times = [x / (whole * at[0]) for x in taken]
            ratios.setdefault(policy, []).extend(zip(steps, times, strict=True))
            medians = (f"{statistics.median(x):.2f}" for x in (steps, times))
            table.add_row(name, f"{best:.3g}", f"{at[1] / at[0]:.2f}", policy, *medians)
    console.print(table)
    for policy, found in ratios.items():
        fewer = [pair for pair in found if pair[0] < 1]
        longer = sum(of_time > 1 for _, of_time in fewer)
        console.print(
            f"{policy}: of {len(fewer)} runs with fewer steps than B*, {longer} take longer"
        )


def main() -> None:
    command = Command.read(__doc__.splitlines()[0], list(fixed.BUDGETS))
    torch.set_num_threads(1)
    console = Console(width=110)
    if command.smoke:
        console.print(f"{seconds_of_step(fixed.SMOKE, 4):.2g} s")
        return
    rows = saved_rows(NAME)
    runs = fixed.Runs(saved_rows(fixed.NAME), Mock(), lambda: None)
    for name in command.names:
        budget = fixed.BUDGETS[name]
        if budget.device != "cpu" or not fixed.starts_of(runs, budget):
            continue
        for size in SIZES:
            done = any((r["workload"], r["batch_size"]) == (name, size) for r in rows)
            if not (command.report or done) and time.monotonic() < command.deadline:
                seconds = seconds_of_step(budget, size)
                rows.append({"workload": name, "batch_size": size, "seconds": seconds})
        if not command.report:
            write_results(NAME, rows, quiet=True)
    report(rows, console)


if __name__ == "__main__":
    main()
