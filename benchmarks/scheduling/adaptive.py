# SPDX-License-Identifier: Apache-2.0
"""Compare a batch size that follows the noise scale with every fixed one.

Three trainings (see lib/workloads.py) go on to harder goals than in prediction/single_runs.py, so
that the noise scale rises well over tenfold along a run. The learning rate of fixed batch sizes is
tuned, and the law of steps against examples is fitted to them: the front. The batch size nearest
to the critical one counts as the best. Then `BatchSizeController` starts from 1/16 and from 16
times the best, with the learning rate tuned *there*, under every policy. The default policy also
starts from 64 times the best, with the learning rate of 16 times.

The noise scale comes from halves of each batch; in the saved results of the other policies it came
from single examples, which earlier versions compared. The inner-product and orthogonality tests
need momentum: digits are trained with momentum once more, and the transformer has Adam's.

    python benchmarks/scheduling/adaptive.py [--budget MINUTES] [--only digits] [--report] [--smoke]

A run that needs S steps and E examples is off the front by the factor f for which (S/f, E/f) is
on it: 1.05 is 5 % more of both. Results are saved as they come, and a later call goes on from
there. Exits 1 if the default policy misses the front by more than 5 % from either end.
"""

from __future__ import annotations

import math
import statistics
import sys
import time
import warnings
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from scipy.optimize import brentq, least_squares
from scipy.stats import binom

sys.path.append(str(Path(__file__).resolve().parents[2]))
from benchmarks.lib.results import saved_rows, write_results
from benchmarks.lib.sweeping import Command, Row, Sweep
from benchmarks.lib.workloads import PLAIN, WORKLOADS, Goal, Workload
from noisescale import BatchSizeController, NoiseScaleMeter, Plan, TradeoffFit, fit_tradeoff
from noisescale.methods.inner_product import WIDEST, InnerProductTest, NoiseAlongGradient

FARTHER = {
    "digits": {"goal": 0.12, "batch_sizes": (2, 8, 32, 128, 512), "seeds": 8, "first_lr": 0.1},
    "digits, momentum": {
        "goal": 0.2,  # to 0.12 no learning rate gets from 512 on
        "batch_sizes": (2, 8, 32, 128, 512),
        "seeds": 8,
        "first_lr": 0.02,
    },
    "mnist": {"goal": 0.13, "batch_sizes": (4, 16, 64, 256, 1024), "seeds": 4, "first_lr": 0.1},
    "characters": {
        "goal": 1.95,
        "batch_sizes": (4, 16, 64, 256, 1024),
        "seeds": 4,
        "first_lr": 0.002,
    },
}

MOST_STEPS = 20_000

ENDS = {"1/16": 1 / 16, "16 x": 16, "64 x": 64}
"""Where scheduled runs start, over the best fixed batch size."""

FARTHEST, LARGE = "64 x", "16 x"
"""From the first only the default policy starts, with the learning rate tuned at the second."""

ALONG_MOMENTUM = {
    "inner_product_test": InnerProductTest(),
    "orthogonality_test": InnerProductTest(nu=WIDEST),
}
POLICIES = ("tradeoff", "ratio", "norm_test", "doubling", *ALONG_MOMENTUM)
DEFAULT = POLICIES[0]
NAMES = (*PLAIN, "digits, momentum")

KEPT, CALMER = "kept", "tradeoff, lr/1.41"
"""From the large end, too, over the scheduled seeds: the batch size of the start stays; the default
policy starts from the next smaller learning rate that is tried, as the best may be at the edge.
"""

SCALINGS = {
    "digits": "adascale",
    "digits, momentum": "adascale",
    "mnist": "adascale",
    "characters": "capped_sqrt",
}
"""What the default, `"auto"`, is for SGD and for Adam."""

TUNED = "tuned"
"""The learning rates of fixed batch sizes, by a law fitted to them: what nobody has beforehand."""

OTHER_SCALINGS = (TUNED, "adascale", "sqrt", "saturating", "linear")
"""Tried with the default policy."""

SCHEDULED_SEEDS = {"digits": 12, "digits, momentum": 12, "mnist": 12, "characters": 4}
"""Scheduled runs of each kind; single ones scatter by a factor of 1.3."""

DEFAULT_SEEDS = {"digits": 48, "digits, momentum": 12, "mnist": 48, "characters": 4}
"""Of the default policy and learning rate, which the aim is for."""

HOPELESS = 10.0
"""Scheduled runs are given up after so many times the fewest steps possible."""

AIM = 1.05


def farther(name: str) -> Workload:
    return replace(WORKLOADS[name], **FARTHER[name])


def tune_fixed(sweep: Sweep, workload: Workload, deadline: float) -> bool:
    """Tune all fixed batch sizes, then those that scheduled runs start from."""
    sizes = sorted(workload.batch_sizes)
    for starts in (False, True):
        if starts:
            ends = starts_of(sweep, workload).items()
            sizes = [size for end, size in ends if end != FARTHEST and size not in sizes]
        start, most_steps = workload.first_lr, MOST_STEPS
        for batch_size in sizes:
            if time.monotonic() > deadline:
                return False
            if starts:  # from the nearest one that is tuned
                near = min(workload.batch_sizes, key=lambda b: abs(math.log(b / batch_size)))
                if best := sweep.best(workload, near):
                    start, most_steps = best["lr"], MOST_STEPS
            sweep.tune(workload, batch_size, start, most_steps)
            if best := sweep.best(workload, batch_size):
                start = best["lr"] * math.sqrt(2)
                most_steps = math.ceil(1.5 * min(sweep.tried(workload, batch_size).values()))
    return True


def fixed_steps(sweep: Sweep, workload: Workload) -> dict[int, float]:
    """Median steps of every fixed batch size, at its best learning rate."""
    sizes = {
        row["batch_size"]
        for row in sweep.rows
        if (row["kind"], row["workload"]) == ("sweep", workload.name)
    }
    return {
        size: min(sweep.tried(workload, size).values())
        for size in sorted(sizes)
        if sweep.best(workload, size)
    }


def front_of(sweep: Sweep, workload: Workload) -> TradeoffFit:
    """The law fitted to the grid of fixed batch sizes."""
    steps = fixed_steps(sweep, workload)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return fit_tradeoff(
            list(workload.batch_sizes), [steps[size] for size in workload.batch_sizes]
        )


def starts_of(sweep: Sweep, workload: Workload) -> dict[str, int]:
    """`ENDS` times the power of two that is nearest to the critical batch size.

    At least two: in a batch of one example nothing can be compared with anything.
    """
    best = 2 ** round(math.log2(front_of(sweep, workload).critical_batch_size))
    return {name: max(int(best * end), 2) for name, end in ENDS.items()}


def off_the_front(front: TradeoffFit, steps: float, examples: float) -> float:
    """The factor f for which (steps/f, examples/f) is on the front."""
    if not math.isfinite(steps):
        return math.inf

    def above(f: float) -> float:
        left = steps / f - front.min_steps, examples / f - front.min_examples
        return left[0] * left[1] - front.min_steps * front.min_examples

    most = min(steps / front.min_steps, examples / front.min_examples)
    return float(brentq(above, 1e-6 * most, most))


Law = tuple[float, float, float]


def learning_rate_law(sweep: Sweep, workload: Workload) -> Law:
    """Fit lr_max/(1 + b/B)^α to the best learning rates, α = 1 for SGD and 1/2 for Adam."""
    sizes = np.array(workload.batch_sizes, dtype=float)
    best = [sweep.best(workload, int(size)) for size in sizes]
    rates = np.array([row["lr"] for row in best if row is not None])
    power = 1.0 if workload.optimizer is torch.optim.SGD else 0.5

    def residuals(logs: np.ndarray) -> np.ndarray:
        law = (math.exp(logs[0]), math.exp(logs[1]), power)
        return np.log([law_of(size, law) for size in sizes]) - np.log(rates)

    most, b = np.exp(least_squares(residuals, np.log([rates.max(), 50.0])).x)
    return float(most), float(b), power


def law_of(batch_size: float, law: Law) -> float:
    most, b, power = law
    return most / (1 + b / batch_size) ** power


Task = tuple[str, float, Any, Any, int, float, int, float, Law]


def scheduled_run(task: Task) -> Row:
    """Train with a scheduled batch size until the goal; every step draws the plan's batch."""
    name, target, policy, scaling, start, lr, seed, most_steps, law = task
    torch.set_num_threads(1)
    workload = replace(WORKLOADS[name], goal=target)
    model = workload.seeded_model(seed)
    optimizer = workload.optimizer_of(model, lr, start)
    extra = [NoiseAlongGradient] if policy in ALONG_MOMENTUM else []
    meter = NoiseScaleMeter(model, unit=workload.unit, optimizer=optimizer, extra=extra)
    meter.follow()

    def tuned(batch_size: float, base_batch_size: float, noise_scale: float) -> float:
        return law_of(batch_size, law) / law_of(base_batch_size, law)

    controller = BatchSizeController(
        Plan(start, 1),
        optimizer,
        ALONG_MOMENTUM.get(policy) or {KEPT: {0: start}, CALMER: DEFAULT}.get(policy, policy),
        lr_scaling=tuned if scaling == TUNED else scaling,
        max_device_batch_size=2**14,
        max_batch_size=2**14,
    )
    goal = Goal(workload, model)
    data = workload.data()[0]
    generator = torch.Generator().manual_seed(1000 + seed)
    size, before = start, 0.0
    try:
        while not goal.reached(controller.steps) and controller.steps < most_steps:
            before, size = controller.examples, int(controller.plan.batch_size)
            chosen = torch.randint(len(data[0]), (size,), generator=generator)
            optimizer.zero_grad()
            loss = workload.loss(model, (data[0][chosen], data[1][chosen]))
            meter.backward(loss, local_batch_size=size)
            meter.step()
            optimizer.step()
            controller.update(meter)
    except FloatingPointError:
        pass  # diverged: the goal was not reached
    reached = math.isfinite(goal.steps)
    examples = before - (controller.steps - 1 - goal.steps) * size
    return {
        "kind": "scheduled",
        "workload": name,
        "policy": policy,
        "lr_scaling": scaling,
        "start": start,
        "lr": lr,
        "seed": seed,
        "steps": round(goal.steps, 2) if reached else None,
        "examples": round(examples) if reached else None,
        "moves": [[m.step, m.after.batch_size] for m in controller.moves][:200],
    }


def schedule(sweep: Sweep, workload: Workload, deadline: float) -> bool:
    """Do the scheduled runs that are missing."""
    most = HOPELESS * front_of(sweep, workload).min_steps
    law = learning_rate_law(sweep, workload)
    named, usual = (workload.name, workload.goal), SCALINGS[workload.name]
    ways = [(p, usual) for p in POLICIES if p not in ALONG_MOMENTUM or has_momentum(workload)]
    ways += [] if workload.name == "digits, momentum" else other_ways(usual)
    for policy, scaling in ways:
        default = (policy, scaling) == (DEFAULT, usual)
        starts = starts_of(sweep, workload)
        for end, start in starts.items():
            if time.monotonic() > deadline:
                return False
            best = sweep.best(workload, starts[LARGE] if end == FARTHEST else start)
            if best is None or (end == FARTHEST and not default):
                continue
            if policy in (KEPT, CALMER) and end != LARGE:
                continue
            lr = best["lr"] / (math.sqrt(2) if policy == CALMER else 1)
            done = {r["seed"] for r in scheduled(sweep.rows, workload, policy, scaling, start)}
            seeds = (DEFAULT_SEEDS if default else SCHEDULED_SEEDS)[workload.name]
            sweep.rows += sweep.pool.map(
                scheduled_run,
                [
                    (*named, policy, scaling, start, lr, seed, most, law)
                    for seed in range(seeds)
                    if seed not in done
                ],
            )
            sweep.save()
            print(f"{workload.name}: {policy}, {scaling}, from {start}", flush=True)
    return True


def other_ways(usual: str) -> list[tuple[str, str]]:
    """Other scalings of the default policy, and what the default is compared with."""
    ways = [(DEFAULT, scaling) for scaling in OTHER_SCALINGS if scaling != usual]
    return [*ways, (KEPT, usual), (CALMER, usual)]


def has_momentum(workload: Workload) -> bool:
    return workload.optimizer is not torch.optim.SGD or bool(workload.optimizer_options)


def scheduled(
    rows: Iterable[Row], workload: Workload, policy: str, scaling: str, start: int
) -> list[Row]:
    wanted = (workload.name, policy, scaling, start)
    return [
        row
        for row in rows
        if row["kind"] == "scheduled"
        and (row["workload"], row["policy"], row["lr_scaling"], row["start"]) == wanted
    ]


def report(sweep: Sweep, names: Iterable[str], console: Console) -> bool:
    """Print how far all scheduled runs are off the front; return whether the aim is met."""
    met = True
    for name in names:
        workload = farther(name)
        steps = fixed_steps(sweep, workload)
        if any(size not in steps for size in workload.batch_sizes):
            console.print(f"\n[bold]{name}[/]: not enough runs yet.")
            continue
        front = front_of(sweep, workload)
        console.print(
            f"\n[bold]{name}[/], loss {workload.goal}: S_min {front.min_steps:.0f}, B_crit"
            f" {front.critical_batch_size:.0f} {workload.unit}, scatter"
            f" {front.rms_log_residual:.3f}"
        )
        most, b, power = learning_rate_law(sweep, workload)
        console.print(f"  best lr about {most:.3g}/(1 + {b:.3g}/B)^{power:g}")
        console.print(_fixed_table(sweep, workload, steps, front))
        titles = "policy", "lr scaling", "from", "steps", "examples", "reached", "median f (95 %)"
        table = Table(*titles)
        ways = dict.fromkeys(
            (row["policy"], row["lr_scaling"], row["start"])
            for row in sweep.rows
            if row["kind"] == "scheduled" and row["workload"] == name
        )
        for policy, scaling, start in ways:
            rows = scheduled(sweep.rows, workload, policy, scaling, start)
            off = [off_the_front(front, *_reached(row)) for row in rows]
            median = statistics.median(off)
            default = (policy, scaling) == (DEFAULT, SCALINGS[name])
            met &= not default or median <= AIM
            table.add_row(
                policy,
                scaling,
                str(start),
                f"{statistics.median(_reached(row)[0] for row in rows):.0f}",
                f"{statistics.median(_reached(row)[1] for row in rows):,.0f}",
                f"{sum(row['steps'] is not None for row in rows)} of {len(rows)}",
                "{:.2f} ({:.2f} to {:.2f})".format(median, *interval_of_median(off))
                + (" <- missed" if default and median > AIM else ""),
            )
        console.print(table)
    return met


def interval_of_median(values: list[float]) -> tuple[float, float]:
    """Order statistics that cover the median 95 times in 100; all there is of fewer than six."""
    below = max(int(binom.ppf(0.025, len(values), 0.5)) - 1, 0)
    ordered = sorted(values)
    return ordered[below], ordered[-1 - below]


def _reached(row: Row) -> tuple[float, float]:
    return row["steps"] or math.inf, row["examples"] or math.inf


def _fixed_table(
    sweep: Sweep, workload: Workload, steps: dict[int, float], front: TradeoffFit
) -> Table:
    table = Table("fixed batch size", "lr", "steps", "examples", "f")
    for size, count in steps.items():
        best = sweep.best(workload, size)
        assert best is not None
        table.add_row(
            str(size),
            f"{best['lr']:.3g}",
            f"{count:.0f}",
            f"{size * count:,.0f}",
            f"{off_the_front(front, count, size * count):.2f}",
        )
    return table


def main() -> int:
    command = Command.read(__doc__.splitlines()[0], NAMES)
    rows = [] if command.smoke else saved_rows("scheduling/adaptive")
    if command.smoke:
        few = {"goal": 1.0, "batch_sizes": (8, 32, 128), "seeds": 2, "first_lr": 0.2}
        FARTHER["digits"] = few
        SCHEDULED_SEEDS["digits"] = DEFAULT_SEEDS["digits"] = 2

    def save() -> None:
        if not command.smoke:
            write_results("scheduling/adaptive", rows, most_steps=MOST_STEPS, quiet=True)

    done = True
    start = "fork" if command.smoke else "spawn"  # a fork is there at once
    with ProcessPoolExecutor(2, mp_context=get_context(start)) as pool:
        sweep = Sweep(rows, pool, save)
        if not command.report:
            for name in command.names:
                workload = farther(name)
                done = done and tune_fixed(sweep, workload, command.deadline)
                done = done and schedule(sweep, workload, command.deadline)
    met = report(sweep, command.names, Console(highlight=False, width=120))
    if not done:
        print("\nThe budget is spent: call again to go on.")
    return 0 if met or command.smoke or not done else 1


if __name__ == "__main__":
    sys.exit(main())
