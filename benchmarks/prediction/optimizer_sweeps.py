# SPDX-License-Identifier: Apache-2.0
"""Sweep the batch size under many optimizers, and measure noise scales along the best runs.

Models of ours and two of transformers' are trained to a goal at eight batch sizes, by SGD, with
momentum, by AdamW, Signum, Lion, Muon and without a schedule, each batch size at its own best
learning rate: factors of √2, until both neighbours of the best are worse. Seeds and learning rates
are trained side by side (lib/stacked.py). Then the best run of each batch size is trained again,
and at twelve steps of it the noise scales of all geometries are measured at frozen weights, from
thousands of single examples (lib/geometries.py): no estimator's error is in them.

With a schedule, the rate falls to zero on a line. The steps are then the fewest that a run may have
to end at the goal.

    python benchmarks/prediction/optimizer_sweeps.py [--device cuda] [--processes 2]
        [--only "digits, SGD"] [--seeds N]
        [--sweep-only] [--minutes M] [--into FILE] [--smoke]

Workloads that are saved are not trained again. `geometries.py` and `bands.py` report what came out.
"""

from __future__ import annotations

import argparse
import json
import math
import queue
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

sys.path.append(str(Path(__file__).resolve().parents[2]))
from benchmarks.lib.geometries import scales_at
from benchmarks.lib.problems import PROBLEMS
from benchmarks.lib.results import processor, saved_rows, write_results
from benchmarks.lib.stacked import (
    AdamW,
    Parameters,
    Problem,
    Stack,
    Training,
    steps_to_goal,
    upper_median,
    use_plain_attention,
)

NAME = "prediction/optimizer_sweeps"

Row = dict[str, Any]

POINTS = 12
"""Steps of a run at which it is measured."""

EACH_SIDE = 3
"""Learning rates tried on each side of where the search begins, at factors of √2."""

HORIZONS = tuple(0.3 * 1.35**k for k in range(7))
"""Steps of runs whose rate falls, over the steps at a constant rate."""

MOST_TRIED = 25
"""Learning rates at one batch size."""


@dataclass(frozen=True)
class Workload:
    problem: str
    optimizer: str
    goal: float
    first_lr: float
    """Where the search begins at the smallest batch size."""
    smallest: int = 8
    factor: int = 2
    sizes: int = 8
    seeds: int = 8
    most_steps: int = 20_000
    examples: int = 4096
    """That a noise scale is measured on."""
    at_once: int = 512
    measured: int = 2
    """Seeds whose best runs are measured; 0: none."""
    decays: bool = False

    @property
    def name(self) -> str:
        return f"{self.problem}, {self.optimizer}" + (", decay" if self.decays else "")

    @property
    def batch_sizes(self) -> list[int]:
        return [self.smallest * self.factor**k for k in range(self.sizes)]


def _of(
    problem: str, goal: float, rates: dict[str, float], decays: Sequence[str] = (), **more: Any
) -> Iterator[Workload]:
    for optimizer, lr in rates.items():
        yield Workload(problem, optimizer, goal, lr, **more)
    for optimizer in decays:
        few = {"sizes": 4, "factor": 4, "seeds": 2 if "seeds" in more else 4}
        yield Workload(problem, optimizer, goal, rates[optimizer], decays=True, **more | few)


_SLOW: dict[str, Any] = {"sizes": 7, "seeds": 3, "at_once": 1024, "measured": 1}

WORKLOADS = {
    workload.name: workload
    for workload in (
        *_of(
            "characters",
            2.1,
            {"AdamW": 0.005, "Muon": 0.01, "Signum": 0.0005, "schedule-free": 0.01},
            ["AdamW"],
            **_SLOW,
        ),
        *_of("llama", 2.1, {"AdamW": 0.003, "Muon": 0.01, "Lion": 0.0003}, **_SLOW),
        *_of("vit", 0.4, {"AdamW": 0.002, "Muon": 0.01}, **_SLOW),
        *_of(
            "digits",
            0.2,
            {
                "SGD": 0.5,
                "momentum": 0.05,
                "momentum 0.97": 0.02,
                "Nesterov": 0.05,
                "AdamW": 0.01,
                "Signum": 0.002,
                "Lion": 0.001,
                "Muon": 0.02,
                "schedule-free": 0.02,
            },
            ["SGD", "momentum", "AdamW", "Signum"],
            examples=1437,
        ),
        *_of(
            "mnist",
            0.2,
            {"SGD": 0.2, "momentum": 0.02, "AdamW": 0.004, "Signum": 0.001, "schedule-free": 0.01},
            ["SGD", "momentum"],
        ),
        *_of(
            "convolutions",
            0.1,
            {"SGD": 0.1, "momentum": 0.01, "AdamW": 0.004, "Lion": 0.0005},
            ["AdamW"],
        ),
        *_of(
            "autoencoder",
            0.13,
            {"momentum": 0.3, "AdamW": 0.004, "Muon": 0.01},
            ["AdamW"],
        ),
    )
}


def sweep(workload: Workload, device: str, known: Sequence[Row]) -> Iterator[Row]:
    """Rows of each batch size: the steps at all learning rates; then the scales along the best.

    Batch sizes that are known are left out.
    """
    problem = PROBLEMS[workload.problem]
    place = 0
    for batch_size in workload.batch_sizes:
        there = {row["kind"]: row for row in known if row["batch_size"] == batch_size}
        if (swept := there.get("sweep")) is None:
            swept = _swept(workload, problem, batch_size, place, device)
            yield swept
        place = round(2 * math.log2(swept["lr"] / workload.first_lr))
        if workload.measured and "measured" not in there and any(swept["steps"]):
            steps = [math.inf if x is None else x for x in swept["steps"]]
            yield _measured(workload, problem, batch_size, place, steps, device)
        place += 1


def _swept(workload: Workload, problem: Problem, batch_size: int, place: int, device: str) -> Row:
    """Search the learning rate of one batch size, from a place of the grid."""
    began = time.perf_counter()
    steps: dict[int, list[float]] = {}
    wanted = list(range(place - EACH_SIDE, place + EACH_SIDE + 1))
    while wanted and len(steps) < MOST_TRIED:
        most = workload.most_steps
        fewest = min(map(upper_median, steps.values()), default=math.inf)
        if fewest < math.inf and not workload.decays:  # there rates are tried at a constant first
            most = min(most, math.ceil(1.1 * fewest))
        steps |= _tried(workload, problem, batch_size, wanted, most, device)
        place = min(steps, key=lambda k: upper_median(steps[k]))
        low, high = min(steps), max(steps)
        wanted = []
        if upper_median(steps[place]) == math.inf:  # nothing reached the goal: look farther
            wanted = [low - 2, low - 1, high + 1, high + 2]
        elif place == low:
            wanted = [low - 2, low - 1]
        elif place == high:
            wanted = [high + 1, high + 2]
    return {
        "kind": "sweep",
        "workload": workload.name,
        "batch_size": batch_size,
        "lr": _lr(workload, place),
        "steps": [_told(x) for x in steps[place]],
        "tried": {f"{_lr(workload, k):.4g}": _told(upper_median(steps[k])) for k in sorted(steps)},
        "inside": min(steps) < place < max(steps),
        "seconds": round(time.perf_counter() - began, 1),
    }


def _tried(
    workload: Workload, problem: Problem, batch_size: int, places: list[int], most: int, device: str
) -> dict[int, list[float]]:
    """Steps to the goal of each seed, at each place of the grid of learning rates."""
    seeds = range(workload.seeds)
    trainings = [Training(_lr(workload, k), seed) for k in places for seed in seeds]

    def stack_of(some: list[Training]) -> Stack:
        return Stack(
            problem,
            workload.optimizer,
            batch_size,
            some,
            smallest=workload.smallest,
            device=device,
        )

    constant = steps_to_goal(stack_of(trainings), workload.goal, most)
    by_place = {k: constant[i * len(seeds) : (i + 1) * len(seeds)] for i, k in enumerate(places)}
    if not workload.decays:
        return by_place
    fewest = min(map(upper_median, by_place.values()))
    if fewest == math.inf:
        return by_place
    horizons = sorted({max(5, round(share * fewest)) for share in HORIZONS})
    falling = [Training(each.lr, each.seed, h) for h in horizons for each in trainings]
    stack = stack_of(falling)
    for _ in range(horizons[-1]):
        stack.step()
    losses = stack.losses()
    count = len(trainings)
    found = [
        _where(horizons, [losses[i * count + j] for i in range(len(horizons))], workload.goal)
        for j in range(count)
    ]
    return {k: found[i * len(seeds) : (i + 1) * len(seeds)] for i, k in enumerate(places)}


def _where(horizons: Sequence[int], losses: Sequence[float], goal: float) -> float:
    """The fewest steps that end at the goal, between two horizons; infinite if none does."""
    for k, (steps, loss) in enumerate(zip(horizons, losses, strict=True)):
        if loss < goal:
            if k == 0:
                return float(steps)
            before, above = horizons[k - 1], losses[k - 1]
            if not math.isfinite(above):
                return float(steps)
            share = math.log(above / goal) / math.log(above / loss)
            return before + share * (steps - before)
    return math.inf


def _measured(
    workload: Workload,
    problem: Problem,
    batch_size: int,
    place: int,
    steps: Sequence[float],
    device: str,
) -> Row:
    """Train the first seeds that reached the goal again; noise and signal along them."""
    began = time.perf_counter()
    seeds = [seed for seed, count in enumerate(steps) if math.isfinite(count)]
    seeds, runs = seeds[: workload.measured], []
    for seed in seeds:
        count = math.ceil(steps[seed])
        lr = _lr(workload, place)
        training = Training(lr, seed, count if workload.decays else None)
        stack = Stack(
            problem,
            workload.optimizer,
            batch_size,
            [training],
            smallest=workload.smallest,
            device=device,
        )
        chosen = torch.randperm(len(stack.train[0]), generator=torch.Generator().manual_seed(seed))[
            : workload.examples
        ].to(device)
        batch = tuple(x[chosen] for x in stack.train)
        points = sorted({round(count * (k + 0.5) / POINTS) for k in range(POINTS)} - {0})
        average = {name: p.clone() for name, p in stack.stepper.parameters.items()}
        rows = []
        for step in range(1, points[-1] + 1):
            stack.step()
            for name, p in stack.stepper.evaluated_at().items():
                average[name].lerp_(p, 9 / (step + 8))  # the last tenth or so
            if step in points:
                found = scales_at(
                    problem,
                    _first(stack.stepper.parameters),
                    _first(average),
                    _roots(stack),
                    batch,
                    workload.at_once,
                )
                rows.append({name: [_short(x) for x in pair] for name, pair in found.items()})
        runs.append({"seed": seed, "points": points, "scales": rows})
    return {
        "kind": "measured",
        "workload": workload.name,
        "batch_size": batch_size,
        "lr": lr,
        "steps": [_told(steps[seed]) for seed in seeds],
        "runs": runs,
        "seconds": round(time.perf_counter() - began, 1),
    }


def _first(stacked: Parameters) -> Parameters:
    return {name: p[0] for name, p in stacked.items()}


def _roots(stack: Stack) -> Parameters:
    """√v̂ of the first training, of Adam for all parameters; else nothing."""
    stepper = stack.stepper
    if type(stepper) is not AdamW:
        return {}
    return {name: stepper.root(name)[0] for name in stepper.parameters}


def _lr(workload: Workload, place: int) -> float:
    return workload.first_lr * 2 ** (place / 2)


def _told(count: float) -> float | None:
    return round(count, 2) if math.isfinite(count) else None


def _short(x: float) -> float | None:
    return float(f"{x:.5g}") if math.isfinite(x) else None


def _work(workload: Workload, device: str, known: list[Row], out: Any) -> None:
    torch.set_num_threads(1)
    use_plain_attention()
    try:
        for row in sweep(workload, device, known):
            out.put(row)
    except Exception:  # the other workloads go on
        print(f"{workload.name} failed:\n{traceback.format_exc()}", flush=True)
    out.put(None)


def _tell(row: Row) -> None:
    about = f"{row['workload']}, B = {row['batch_size']}"
    if row["kind"] == "sweep":
        found = f"{row['steps']} steps at {row['lr']:.3g} of {len(row['tried'])} rates"
        about += f": {found}{'' if row['inside'] else ', the outermost'}"
    print(f"{about}, {row['seconds']} s", flush=True)


def _name_of(device: str) -> str:
    return torch.cuda.get_device_name() if device.startswith("cuda") else processor()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--only", action="append", choices=WORKLOADS)
    parser.add_argument("--minutes", type=float, help="end after these, with what is saved")
    parser.add_argument("--seeds", type=int, help="fewer seeds, where there is no GPU")
    parser.add_argument("--sweep-only", action="store_true", help="measure along no run")
    parser.add_argument(
        "--into", type=Path, help="a JSON file for the rows, instead of the results"
    )
    parser.add_argument("--smoke", action="store_true", help="a few digits, unsaved")
    given = parser.parse_args()
    deadline = math.inf if given.minutes is None else time.monotonic() + 60 * given.minutes
    rows = [] if given.into or given.smoke else saved_rows(NAME)
    if given.into and given.into.exists():
        rows = json.loads(given.into.read_text())
    chosen = [WORKLOADS[name] for name in given.only or WORKLOADS]
    if given.sweep_only:
        chosen = [replace(each, measured=0) for each in chosen]
    if given.seeds:
        chosen = [replace(each, seeds=min(each.seeds, given.seeds)) for each in chosen]
    if given.smoke:
        chosen = [Workload("digits", "AdamW", 1.5, 0.02, sizes=2, seeds=1, examples=64)]
    context = get_context("spawn")
    device_name = f"{_name_of(given.device)}, torch {torch.__version__}"
    with context.Manager() as manager:
        out = manager.Queue()
        pool = ProcessPoolExecutor(given.processes, mp_context=context)
        for workload in chosen:
            known = [row for row in rows if row["workload"] == workload.name]
            pool.submit(_work, workload, given.device, known, out)
        left = len(chosen)
        while left and time.monotonic() < deadline:
            try:
                row = out.get(timeout=5)
            except queue.Empty:
                continue
            if row is None:
                left -= 1
                continue
            _tell(row)
            rows.append({**row, "on": device_name})
            if given.into:
                given.into.write_text(json.dumps(rows))
            elif not given.smoke:
                write_results(NAME, rows, quiet=True)
        for process in list(pool._processes.values()) if left else []:
            process.kill()
    print(f"{left} workloads are not done." if left else "All are done.", flush=True)


if __name__ == "__main__":
    main()
