# SPDX-License-Identifier: Apache-2.0
"""Adasum against the mean: what its all-reduce costs, and the steps that it saves or does not.

    python benchmarks/methods/adasum.py [--only cost|polynomials|mnist|characters] [--report]

Cost: `adasum_all_reduce_` and `all_reduce` of the same buffers on gloo ranks over loopback, in
turn, with a second plain copy; medians of ratios within one round, also of the CPU time of all
ranks, and the bytes that the loopback interface carried. Polynomials: Horovod's demonstration in
its spirit, y = x² and y = x³ from rows of 1, x, x², ... by SGD, at the same learning rate and at
the best one of each. Steps to the goal: 8 ranks share each batch, at batch sizes from 0.6 to 36 or
72 times the critical one, and the learning rate is tuned at each of them for both (see
lib/sweeping.py).

Results are saved after every learning rate, and a later call goes on from there.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

sys.path.append(str(Path(__file__).resolve().parents[2]))
from benchmarks.lib.ranks import on_ranks
from benchmarks.lib.results import saved_rows, write_results
from benchmarks.lib.sweeping import Row, Sweep
from benchmarks.lib.workloads import BY_ADASUM, Workload
from benchmarks.methods._interleaved import Timed, compared, in_turn
from noisescale import adasum, adasum_all_reduce_

PARTS = ("cost", "polynomials", "mnist", "characters")
MOST_STEPS = 500
ROUNDS = 9
ELEMENTS = (4 * 2**20, 64 * 2**20)
MOST_POLYNOMIAL_STEPS = 4000
SAME_LR = 0.1


def cost(ranks: int, elements: int, tensors: int, rounds: int) -> Row:
    """Medians over rounds, of the slowest rank in each."""

    def one_rank() -> dict[str, Timed]:
        generator = torch.Generator().manual_seed(dist.get_rank())
        buffers = [torch.empty(elements // tensors) for _ in range(tensors)]

        def averaged() -> None:
            for each in buffers:
                dist.all_reduce(each)

        def drawn() -> None:
            for each in buffers:
                each.normal_(generator=generator)

        return in_turn(averaged, lambda: adasum_all_reduce_(buffers), rounds, drawn)

    about = {"kind": "cost", "ranks": ranks, "elements": elements, "tensors": tensors}
    return about | compared(on_ranks(ranks, one_rank), "all_reduce", "adasum")


def polynomials(power: int, ranks: int, lr: float, *, by_adasum: bool) -> float:
    """Steps until the coefficients are within 0.05, in the mean over 5 streams of data."""
    return statistics.fmean(fitted(power, ranks, lr, k, by_adasum=by_adasum) for k in range(5))


def fitted(power: int, ranks: int, lr: float, stream: int, *, by_adasum: bool) -> int:
    """Fit y = x^power by SGD. The ranks take turns in one process: their number changes no step."""
    generators = [torch.Generator().manual_seed(100 * stream + rank) for rank in range(ranks)]
    weights, wanted = torch.zeros(power + 1), torch.zeros(power + 1)
    wanted[power] = 1
    for step in range(1, MOST_POLYNOMIAL_STEPS):
        gradients = []
        for generator in generators:
            x = torch.rand(8, 1, generator=generator) * 2 - 1
            rows = x ** torch.arange(power + 1)
            gradients.append(rows.T @ (rows @ (weights - wanted)) / 4)
        combined = adasum(gradients) if by_adasum else torch.stack(gradients).mean(0)
        weights -= lr * combined
        if not weights.isfinite().all():
            break
        if (weights - wanted).norm() < 0.05:
            return step
    return MOST_POLYNOMIAL_STEPS


def fit_polynomials(rows: list[Row], *, smoke: bool) -> None:
    for power in (2, 3):
        for ranks in (2,) if smoke else (2, 4):
            for lr in (SAME_LR,) if smoke else (0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2):
                for by_adasum in (False, True):
                    about = {"kind": "polynomial", "power": power, "ranks": ranks, "lr": lr}
                    about |= {"rule": "adasum" if by_adasum else "mean"}
                    if not any(about.items() <= row.items() for row in rows):
                        steps = polynomials(power, ranks, lr, by_adasum=by_adasum)
                        rows.append(about | {"steps": steps})
                        print(rows[-1], flush=True)


def tune(sweep: Sweep, workload: Workload) -> None:
    lr = 2 * workload.first_lr
    for batch_size in workload.batch_sizes:
        sweep.tune(workload, batch_size, lr, MOST_STEPS)
        if (best := sweep.best(workload, batch_size)) is not None:
            lr = best["lr"]


def report(rows: list[Row], console: Console) -> None:
    if some := [row for row in rows if row["kind"] == "cost"]:
        table = Table(
            "ranks",
            "elements",
            "tensors",
            "all_reduce",
            "Adasum",
            "times",
            "2nd copy",
            "CPU time",
            "bytes",
            title="Cost",
        )
        for row in some:
            table.add_row(
                f"{row['ranks']}",
                f"{row['elements'] / 2**20:g} M",
                f"{row['tensors']}",
                f"{1000 * row['seconds_all_reduce']:.0f} ms",
                f"{1000 * row['seconds_adasum']:.0f} ms",
                f"{row['ratio']:.2f}",
                f"{row['ratio_of_second_copy']:.2f}",
                f"{row['cpu_ratio']:.2f}",
                f"{row['bytes_ratio']:.2f}",
            )
        console.print(table)
    if some := [row for row in rows if row["kind"] == "polynomial"]:
        table = Table(
            "power",
            "ranks",
            "mean",
            "Adasum",
            "ratio",
            f"at lr {SAME_LR}",
            title="Steps, each at its best learning rate, and both at a small one",
        )
        for power, ranks in dict.fromkeys((row["power"], row["ranks"]) for row in some):
            best = {
                rule: min(
                    (row["steps"], row["lr"])
                    for row in some
                    if (row["power"], row["ranks"], row["rule"]) == (power, ranks, rule)
                )
                for rule in ("mean", "adasum")
            }
            cells = [f"{steps:.0f} (lr {lr:g})" for steps, lr in best.values()]
            ratio = best["adasum"][0] / best["mean"][0]
            same = {
                row["rule"]: row["steps"]
                for row in some
                if (row["power"], row["ranks"], row["lr"]) == (power, ranks, SAME_LR)
            }
            cells += [f"{ratio:.2f}", f"{same['adasum'] / same['mean']:.2f}"]
            table.add_row(f"{power}", f"{ranks}", *cells)
        console.print(table)
    for name in ("digits", "mnist", "characters"):
        pairs = BY_ADASUM.get(f"{name}, averaged"), BY_ADASUM.get(f"{name}, Adasum")
        if all(pairs) and any(row.get("workload") == f"{name}, Adasum" for row in rows):
            console.print(steps_table(name, rows, *pairs))


def steps_table(name: str, rows: list[Row], mean: Workload, by_adasum: Workload) -> Table:
    table = Table(
        "batch size",
        "mean",
        "Adasum of 8 ranks",
        "ratio",
        title=f"{name}: median steps to the goal",
    )
    sweep = Sweep(rows, None, lambda: None)  # type: ignore[arg-type]  # nothing is trained
    for batch_size in mean.batch_sizes:
        found, cells = [], []
        for workload in (mean, by_adasum):
            best = sweep.best(workload, batch_size)
            steps = (
                math.nan
                if best is None
                else statistics.median(s or math.inf for s in best["steps"])
            )
            found.append(steps)
            cells.append("" if best is None else f"{steps:.1f} (lr {best['lr']:.3g})")
        table.add_row(
            f"{batch_size:,}",
            *cells,
            "" if math.isnan(sum(found)) else f"{found[1] / found[0]:.2f}",
        )
    return table


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=PARTS)
    parser.add_argument("--report", action="store_true", help="print what is saved, run none")
    parser.add_argument("--smoke", action="store_true", help="a little of each, unsaved")
    given = parser.parse_args()
    rows: list[Row] = [] if given.smoke else saved_rows("methods/adasum")
    parts = [] if given.report else [given.only] if given.only else list(PARTS)

    def save() -> None:
        if not given.smoke:
            write_results("methods/adasum", rows, most_steps=MOST_STEPS, rounds=ROUNDS, quiet=True)

    if "cost" in parts:
        rows[:] = [row for row in rows if row["kind"] != "cost"]
        for elements in (2**16,) if given.smoke else ELEMENTS:
            for ranks in (2,) if given.smoke else (2, 4):
                for tensors in (1, 128):
                    rows.append(cost(ranks, elements, tensors, 1 if given.smoke else ROUNDS))
                    print(rows[-1], flush=True)
                    save()
    if "polynomials" in parts:
        fit_polynomials(rows, smoke=given.smoke)
        save()
    names = [part for part in parts if part in ("mnist", "characters")]
    workloads = [BY_ADASUM[f"{name}, {rule}"] for name in names for rule in ("averaged", "Adasum")]
    if given.smoke:
        few: dict[str, Any] = {"goal": 0.5, "batch_sizes": (32, 128), "seeds": 1}
        workloads = [replace(BY_ADASUM["digits, Adasum"], **few)]
    with ProcessPoolExecutor(2, mp_context=get_context("fork")) as pool:
        for workload in workloads:
            tune(Sweep(rows, pool, save), workload)
    report(rows, Console(highlight=False, width=120))
    return 0


if __name__ == "__main__":
    sys.exit(main())
