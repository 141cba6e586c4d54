# SPDX-License-Identifier: Apache-2.0
"""Compare the steps that one run predicts for other batch sizes with the steps they take.

For each of three trainings (see lib/workloads.py) and eight batch sizes the learning rate is tuned:
doubled and halved until both neighbours of the best are worse, then tried between, by the median
over seeds of the steps to the goal. Then the noise scale is measured along runs at
some of the batch sizes, with `NoiseScaleMonitor` under Lightning, from two micro-batches a step (in
the saved results from single examples, which earlier versions compared), and each of these runs
predicts all batch sizes.

    python benchmarks/prediction/single_runs.py [--budget MINUTES] [--only digits] [--report]

Results are saved after every learning rate, and a later call goes on from there. Exits 1 if the
median error of the predicted steps exceeds 25 %, or the critical batch size is off by more than
a factor of 2, for any training.
"""

from __future__ import annotations

import math
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

sys.path.append(str(Path(__file__).resolve().parents[2]))
from benchmarks.lib.results import saved_rows, write_results
from benchmarks.lib.sweeping import Command, Row, Sweep
from benchmarks.lib.workloads import WORKLOADS, Goal, Workload, decay
from benchmarks.prediction._opinions import TIMES, Opinion, dominated, kind_of, opinions, tell
from noisescale import History, NoiseScaleMonitor, Prediction, Tradeoff, fit_tradeoff, predict
from noisescale.bounded import Bounded
from noisescale.history.increments import INCREMENTS

MOST_STEPS = 500

MEASURED = (1, 3, 5)
"""Positions, among a training's batch sizes, of those that the noise scale is measured at."""

COLUMNS = ("step", "examples", "batch_size", "noise_scale", "low", "high")
COLUMNS += INCREMENTS
"""Of the measured runs' histories, that are saved."""

LOGGED_EVERY = (1, 10, 50)
"""Steps between two rows of a history; the rarer ones from one batch size alone."""

BRANCHES = ("1x", "4x", "16x")
MOST_BRANCHED = 5
"""Runs of a workload that branches are taken from."""

LARGEST_ERROR, LARGEST_FACTOR = 0.25, 2.0


class Task(NamedTuple):
    """A training with the monitor in it."""

    workload: str
    batch_size: int
    lr: float
    seed: int
    most_steps: int
    decay_steps: int = 0
    """Over which the learning rate falls to zero, which is then the run's end."""
    log_every: int = 1


def measured_run(task: Task) -> Row:
    """Train once more, by Lightning with the monitor in it, and return its history."""
    from lightning.pytorch import Callback, LightningModule, Trainer
    from torch.utils.data import DataLoader, IterableDataset

    name, batch_size, lr, seed, most_steps, decay_steps, log_every = task
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    workload = WORKLOADS[name]

    class Drawn(IterableDataset):  # type: ignore[type-arg]
        def __iter__(self) -> Iterator[Any]:
            return workload.batches(batch_size // 2, seed)

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = workload.seeded_model(seed)

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return workload.loss(self.net, batch)

        def configure_optimizers(self) -> Any:
            optimizer = workload.optimizer_of(self, lr, batch_size)
            if not decay_steps:
                return optimizer
            schedule = {"scheduler": decay(optimizer, decay_steps), "interval": "step"}
            return {"optimizer": optimizer, "lr_scheduler": schedule}

    class UntilGoal(Callback):
        def on_train_batch_end(
            self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int
        ) -> None:
            if batch_idx % 2 and not decay_steps:
                trainer.should_stop = goal.reached(trainer.global_step)

    module = Module()
    goal = Goal(workload, module.net)
    monitor = NoiseScaleMonitor(unit=workload.unit)
    Trainer(
        accelerator="cpu",
        accumulate_grad_batches=2,
        max_steps=decay_steps or most_steps,
        max_epochs=-1,
        log_every_n_steps=log_every,
        callbacks=[monitor, UntilGoal()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    ).fit(module, DataLoader(Drawn(), batch_size=None))
    history = monitor.history
    return {
        "kind": "measured",
        "workload": name,
        "batch_size": batch_size,
        "lr": lr,
        "seed": seed,
        "log_every": log_every,
        "steps": decay_steps or (round(goal.steps, 2) if math.isfinite(goal.steps) else None),
        "history": {c: _rounded(history[c].tolist()) for c in COLUMNS},
    }


def branched_run(task: Task) -> Row:
    """Train once more, then branch from the middle of the run to its end, as the command does."""
    from lightning.pytorch import Callback, LightningModule, Trainer
    from torch.utils.data import DataLoader, RandomSampler, TensorDataset

    from noisescale.lab.branch.planning import BranchOptions, plan_branches
    from noisescale.lab.branch.train_branches import train_branches

    name, batch_size, lr, seed, steps, *_ = task
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    workload = WORKLOADS[name]

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = workload.seeded_model(seed)

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return workload.loss(self.net, batch)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return workload.optimizer_of(self, lr, batch_size)

    class Save(Callback):
        def on_train_batch_end(
            self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int
        ) -> None:
            if not batch_idx % 2:
                return
            step = trainer.global_step
            reached = goal.reached(step)
            if reached or step % max(steps // 8, 1) == 0:
                trainer.save_checkpoint(folder / f"step={step}.ckpt")
            trainer.should_stop = reached

    module, monitor = Module(), NoiseScaleMonitor(unit=workload.unit)
    goal = Goal(workload, module.net)
    data = TensorDataset(*workload.data()[0])
    torch.manual_seed(1000 + seed)
    drawn = RandomSampler(data, replacement=True, num_samples=2 * steps * batch_size)
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        Trainer(
            accelerator="cpu",
            max_epochs=1,
            accumulate_grad_batches=2,
            log_every_n_steps=1,
            callbacks=[monitor, Save()],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        ).fit(module, DataLoader(data, batch_size=batch_size // 2, sampler=drawn))
        started = time.perf_counter()
        most = TIMES * batch_size
        asked = BranchOptions(monitor.history, folder, BRANCHES, max_device_batch_size=most)
        branching = plan_branches(asked)
        branched = train_branches(
            branching, Module(), data, folder / "branches.json", accelerator="cpu"
        )
        told = asdict(branched)
    history = monitor.history
    return {
        "kind": "branched",
        "workload": name,
        "batch_size": batch_size,
        "lr": lr,
        "seed": seed,
        "steps": round(goal.steps, 2) if math.isfinite(goal.steps) else None,
        "seconds": round(time.perf_counter() - started, 1),
        "branched": {**told, "branches": [_short(branch) for branch in told["branches"]]},
        "history": {c: _rounded(history[c].tolist()) for c in COLUMNS},
    }


def _short(branch: dict[str, Any]) -> dict[str, Any]:
    return {**branch, "losses": _rounded(branch["losses"])}


def _rounded(values: list[float]) -> list[float | None]:
    """Eight digits; None is "not known", or infinite."""
    return [float(f"{v:.8g}") if math.isfinite(v) else None for v in values]


def history_of(row: Row) -> History:
    columns = {
        name: np.array([math.nan if v is None else v for v in values], dtype=float)
        for name, values in row["history"].items()
    }
    columns["high"] = np.where(np.isnan(columns["high"]), math.inf, columns["high"])
    # Not timed: a second a step, and for other device batches what is assumed.
    columns["seconds_per_step"] = np.ones_like(columns["step"])
    workload = WORKLOADS[row["workload"]]
    if workload.decays and row["steps"]:
        columns["learning_rate"] = row["lr"] * (1 - columns["step"] / row["steps"])
    return History.from_columns(columns, unit=workload.unit, optimizer=kind_of(workload))


def work(sweep: Sweep, names: Iterable[str], deadline: float, most_steps: int) -> bool:
    """Do what is missing, until the deadline; return whether all of it is done."""
    for name in names:
        workload = WORKLOADS[name]
        start = workload.first_lr
        for batch_size in workload.batch_sizes:
            if time.monotonic() > deadline:
                return False
            sweep.tune(workload, batch_size, start, most_steps)
            best = sweep.best(workload, batch_size)
            start = best["lr"] * math.sqrt(2) if best else start
        for position in MEASURED:
            if position >= len(workload.batch_sizes):
                continue
            batch_size = workload.batch_sizes[position]
            best = sweep.best(workload, batch_size)
            if best is None:
                continue
            for log_every in LOGGED_EVERY if position == MEASURED[0] else LOGGED_EVERY[:1]:
                rows = [r for r in measured(sweep.rows, name) if r["batch_size"] == batch_size]
                done = {r["seed"] for r in rows if r.get("log_every", 1) == log_every}
                tasks = [
                    Task(
                        *(name, batch_size, best["lr"], seed, most_steps),
                        round(steps) if workload.decays else 0,
                        log_every,
                    )
                    for seed, steps in enumerate(best["steps"])
                    if seed not in done and (steps or not workload.decays)
                ]
                if not tasks:
                    continue
                if time.monotonic() > deadline:
                    return False
                sweep.rows += sweep.pool.map(measured_run, tasks)
                sweep.save()
                print(f"{name} measured at batch {batch_size}", flush=True)
            sweep.by_rule(workload, batch_size, TIMES, most_steps)
        if not branch(sweep, workload, deadline):
            return False
    return True


def branch(sweep: Sweep, workload: Workload, deadline: float) -> bool:
    """Branch runs at the first of the measured batch sizes; return whether all of it is done."""
    batch_size = workload.batch_sizes[MEASURED[0]]
    best = sweep.best(workload, batch_size)
    if best is None or workload.decays:
        return True
    done = {
        row["seed"]
        for row in sweep.rows
        if row["kind"] == "branched" and row["workload"] == workload.name
    }
    tasks = [
        Task(workload.name, batch_size, best["lr"], seed, round(steps))
        for seed, steps in enumerate(best["steps"][:MOST_BRANCHED])
        if seed not in done and steps
    ]
    if tasks and time.monotonic() > deadline:
        return False
    sweep.rows += sweep.pool.map(branched_run, tasks)
    if tasks:
        sweep.save()
        print(f"{workload.name} branched at batch {batch_size}", flush=True)
    return True


def measured(rows: list[Row], name: str) -> list[Row]:
    return [row for row in rows if row["kind"] == "measured" and row["workload"] == name]


def windowed(row: Row) -> float:
    """B_crit from the estimates as they were logged, which average over what has been."""
    history = {name: x for name, x in history_of(row).items() if name not in INCREMENTS}
    return predict(history, [row["batch_size"]], [1]).critical_batch_size.value


def report(sweep: Sweep, names: Iterable[str], console: Console) -> bool:
    """Print predicted over measured steps; return whether the aims are met."""
    met = True
    everyones: list[tuple[Opinion, Prediction]] = []
    for name in names:
        workload = WORKLOADS[name]
        tuned = {b: sweep.best(workload, b) for b in workload.batch_sizes}
        best = {b: row for b, row in tuned.items() if row is not None}
        steps = {b: min(sweep.tried(workload, b).values()) for b in best}
        by_size: dict[int, list[Row]] = {}
        for row in measured(sweep.rows, name):
            if row["steps"] and row.get("log_every", 1) == 1:
                by_size.setdefault(row["batch_size"], []).append(row)
        if len(steps) < 4 or not by_size:
            console.print(f"\n[bold]{name}[/]: not enough runs yet.")
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # told below
            fit = fit_tradeoff(list(steps), list(steps.values()))
        swept = fit.critical_batch_size_band()
        console.print(
            f"\n[bold]{name}[/], loss {workload.goal}: swept B_crit {swept.value:.1f}"
            f" {workload.unit} (95 % {swept.low:.1f} to {swept.high:.1f}), S_min"
            f" {fit.min_steps:.1f}, scatter {fit.rms_log_residual:.3f}"
        )
        for warning in fit.warnings:
            console.print(f"  {warning}")
        predictions = {
            size: [predict(history_of(row), list(steps), [1]) for row in rows]
            for size, rows in by_size.items()
        }
        ratios = {
            size: [
                statistics.median(p.rows[k].steps.value / count for p in predicted)
                for k, count in enumerate(steps.values())
            ]
            for size, predicted in predictions.items()
        }
        console.print(_table(best, steps, fit, ratios))
        for size, predicted in predictions.items():
            lagging = statistics.median(windowed(row) for row in by_size[size])
            met &= _told(console, size, predicted, ratios[size], swept, lagging)
        rows = [row for row in sweep.rows if row.get("history") and row["workload"] == name]
        found = opinions(sweep, workload, ((row, history_of(row)) for row in rows), swept.value)
        tell(console, [opinion for opinion, _ in found])
        everyones += found
    if everyones:
        _tell_all(console, everyones)
    return met


def _tell_all(console: Console, everyones: list[tuple[Opinion, Prediction]]) -> None:
    """Print what holds over all trainings: how often bounds hold, what is recommended."""
    for kind in ("bounds", "second run tuned", "second run by rule", "branches"):
        alike = [o for o, _ in everyones if o.kind.startswith(kind) and "too near" not in o.kind]
        if alike:
            held = sum(opinion.holds for opinion in alike)
            off = [max(o.ratio, 1 / o.ratio) for o in alike]
            near, nearly = (sum(x <= most for x in off) for most in (1.6, 2.0))
            console.print(
                f"{kind}: hold the sweep in {held} of {len(alike)} ({held / len(alike):.0%}),"
                f" within 1.6 x in {near}, within 2 x in {nearly}"
            )
    count = sum(dominated(p) for _, p in everyones)
    console.print(f"recommendations that another row dominates: {count} of {len(everyones)}")


def _table(
    best: dict[int, Row], steps: dict[int, float], fit: Tradeoff, ratios: dict[int, list[float]]
) -> Table:
    """Of each batch size what was measured, and predicted over measured from each run."""
    table = Table("batch size", "lr", "all seeds", "median steps", "fit")
    for size in ratios:
        table.add_column(f"from B = {size}")
    for k, (size, row) in enumerate(best.items()):
        reached = sorted(s or math.inf for s in row["steps"])
        table.add_row(
            str(size),
            f"{row['lr']:.3g}",
            f"{reached[0]:.0f} to {reached[-1]:.0f}",
            f"{steps[size]:.1f}",
            f"{fit.steps(size):.1f}",
            *(f"{of_size[k]:.2f} x" for of_size in ratios.values()),
        )
    return table


def _told(
    console: Console,
    size: int,
    predicted: list[Prediction],
    ratios: list[float],
    swept: Bounded,
    lagging: float,
) -> bool:
    """Print how well the runs at one batch size did; return whether they meet the aims."""
    bands = [p.critical_batch_size_by_noise_scale for p in predicted]
    critical = statistics.median(band.value for band in bands)
    meet = sum(band.low <= swept.high and swept.low <= band.high for band in bands)
    error = statistics.median(abs(ratio - 1) for ratio in ratios)
    factor = max(critical / swept.value, swept.value / critical)
    good = error <= LARGEST_ERROR and factor <= LARGEST_FACTOR
    console.print(
        f"  from B = {size}: noise scale {critical:.1f}, {critical / swept.value:.2f} x the"
        f" swept (as logged, lagging: {lagging:.1f}); intervals meet the swept one in"
        f" {meet} of {len(bands)}; median error of the steps {100 * error:.0f} %"
        f"{'' if good else '  <- missed'}"
    )
    return good


def main() -> int:
    command = Command.read(__doc__.splitlines()[0], list(WORKLOADS))
    name: str | None = "prediction/single_runs"
    rows = [] if command.smoke else saved_rows("prediction/single_runs")
    if command.smoke:
        name = None
        few = {"goal": 1.2, "batch_sizes": (8, 32, 128, 512), "seeds": 2}
        WORKLOADS["digits"] = replace(WORKLOADS["digits"], **few)

    def save() -> None:
        if name:
            write_results(name, rows, most_steps=MOST_STEPS, quiet=True)

    start = "fork" if command.smoke else "spawn"  # a fork is there at once
    with ProcessPoolExecutor(2, mp_context=get_context(start)) as pool:
        sweep = Sweep(rows, pool, save)
        done = command.report or work(sweep, command.names, command.deadline, MOST_STEPS)
    met = report(sweep, command.names, Console(highlight=False, width=120))
    if not done:
        print("\nThe budget is spent: call again to go on.")
    return 0 if met or command.smoke or not done else 1


if __name__ == "__main__":
    sys.exit(main())
