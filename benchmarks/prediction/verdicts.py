# SPDX-License-Identifier: Apache-2.0
"""Ask how often the verdict of one default run is right, and calibrate its likely range.

`optimizer_sweeps.py` found the best learning rate and the steps to the goal at many batch sizes,
and so the critical batch size c of a training. Here runs at these learning rates are trained again
by Lightning, with a default `NoiseScaleMonitor` and seeds that the sweep had not. By c a batch size
B is to be `larger` (c > 3 B), `smaller` (c < B/3) or kept.

    python benchmarks/prediction/verdicts.py [--only "digits, SGD"] [--minutes M] [--report]

Runs that are saved are not trained again. Their records are saved, so that `--report` judges the
verdicts anew.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
import time
import warnings
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

sys.path.append(str(Path(__file__).resolve().parents[2]))
from benchmarks.lib.problems import PROBLEMS
from benchmarks.lib.results import saved_rows, write_results
from benchmarks.lib.stacked import Stepper, stepper_of, upper_median, use_plain_attention
from benchmarks.prediction.optimizer_sweeps import WORKLOADS, Workload, sweep
from noisescale import NoiseScaleMonitor, fit_tradeoff
from noisescale.bounded import Bounded
from noisescale.history.record import RECORD

NAME = "prediction/verdicts"
SWEEPS = "prediction/optimizer_sweeps"

Row = dict[str, Any]

FEWEST_STEPS = 100
SMALLEST = 8
"""The smallest batch size of all sweeps, at which Adam's β₂ is 0.999."""

FACTOR = 3.0
"""A batch size is to be kept within this factor of c."""

SOUGHT = {"larger": 8.0, "keep": 1.0, "smaller": 1 / 8}
"""c/B of the runs of a class that are trained first."""

LONG = 1000
"""All runs of so many steps are trained."""

RUNS = {"larger": 2, "keep": 2, "smaller": 4}
"""The most batch sizes of a workload in a class: few workloads have any that are too large."""

SEEDS = {"larger": (100,), "keep": (100,), "smaller": (100, 101)}
"""None of them is a sweep's."""


def _longer(name: str, goal: float, **more: Any) -> Workload:
    return replace(WORKLOADS[name], goal=goal, **{"measured": 0, "sizes": 4, "factor": 4, **more})


_THOROUGH: dict[str, Any] = {"seeds": 6, "sizes": 7, "factor": 2}
LONGER = (
    _longer("digits, SGD", 0.12, **_THOROUGH),
    _longer("digits, AdamW", 0.12, **_THOROUGH),
    _longer("digits, momentum", 0.12, **_THOROUGH),
    _longer("mnist, SGD", 0.1, seeds=3),
    _longer("mnist, momentum", 0.1, seeds=3),
    _longer("mnist, AdamW", 0.1, seeds=3),
    _longer("convolutions, SGD", 0.06, seeds=2),
    _longer("autoencoder, momentum", 0.13, seeds=3),
    _longer("convolutions, AdamW", 0.06, seeds=2),
    _longer("autoencoder, momentum", 0.15, seeds=2, optimizer="SGD", first_lr=3.0),
)
"""Workloads that are swept here to lower losses: there runs are longer, and more batch sizes are
too large."""


class Cell(NamedTuple):
    """A training that a sweep knows."""

    workload: str
    batch_size: int
    lr: float
    steps: int
    swept: Bounded
    """c, in the problem's unit."""

    @property
    def ratio(self) -> float:
        return self.swept.value / self.batch_size

    @property
    def truth(self) -> str:
        if self.ratio > FACTOR:
            return "larger"
        return "smaller" if self.ratio < 1 / FACTOR else "keep"

    @property
    def cost(self) -> float:
        weight = {"digits": 1, "mnist": 4, "autoencoder": 8, "convolutions": 10}
        return self.steps * (30 + self.batch_size * weight.get(self.workload.split(",")[0], 100))


def cells(rows: list[Row]) -> Iterator[Cell]:
    """Yield all trainings of enough steps whose c is known."""
    of_workload: dict[str, list[Row]] = defaultdict(list)
    for row in (*saved_rows(SWEEPS), *rows):
        if row["kind"] == "sweep":
            of_workload[row["workload"]].append(row)
    for workload, swept_rows in of_workload.items():
        counts = {row["batch_size"]: _median_steps(row) for row in swept_rows}
        reached = {size: count for size, count in counts.items() if count < math.inf}
        if len(reached) < 3:
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            swept = fit_tradeoff(list(reached), list(reached.values())).critical_batch_size_band()
        if not swept.high < math.inf:
            continue
        for row in swept_rows:
            size, steps = row["batch_size"], counts[row["batch_size"]]
            if FEWEST_STEPS <= steps < math.inf:
                yield Cell(workload, size, row["lr"], round(steps), swept)


def _median_steps(row: Row) -> float:
    return upper_median([math.inf if x is None else x for x in row["steps"]])


def planned(rows: list[Row]) -> list[Cell]:
    """Return the cells to train, the cheapest first."""
    of_class: dict[tuple[str, str], list[Cell]] = defaultdict(list)
    for cell in cells(rows):
        of_class[cell.workload, cell.truth].append(cell)
    found = []
    for (_, truth), alike in of_class.items():
        alike.sort(key=lambda cell: abs(math.log(cell.ratio / SOUGHT[truth])))
        found += [c for k, c in enumerate(alike) if k < RUNS[truth] or c.steps >= LONG]
    return sorted(found, key=lambda cell: cell.cost)


def sweep_longer(workload: Workload, rows: list[Row], deadline: float) -> None:
    """Sweep what is missing of a longer workload, until the deadline."""
    name = name_of(workload)
    known = [row for row in rows if row["kind"] == "sweep" and row["workload"] == name]
    for row in sweep(workload, "cpu", known):
        rows.append({**row, "workload": name})
        write_results(NAME, rows, quiet=True)
        about = f"{name}, B = {row['batch_size']}: {row['steps']} steps at {row['lr']:.3g}"
        print(f"{about}, {row['seconds']} s", flush=True)
        if time.monotonic() > deadline:
            return


def name_of(workload: Workload) -> str:
    """Return the name of a longer workload."""
    return f"{workload.name}, to {workload.goal:g}"


class Stepped(torch.optim.Optimizer):
    """An optimizer of the sweeps that torch has not, on one model."""

    def __init__(self, model: torch.nn.Module, cell: Cell) -> None:
        problem, optimizer = cell.workload.split(", ")[:2]
        parameters = {name: p.detach().unsqueeze(0) for name, p in model.named_parameters()}
        inner = PROBLEMS[problem].inner(parameters) if optimizer == "Muon" else set()
        groups = defaultdict(list)
        for name, p in model.named_parameters():
            kind = optimizer if optimizer != "Muon" or name in inner else "AdamW"
            groups[kind.replace("-", "").lower()].append(p)
        super().__init__(
            [{"params": ps, "algorithm": kind} for kind, ps in groups.items()], {"lr": cell.lr}
        )
        self.named = dict(model.named_parameters())
        self.stepper: Stepper = stepper_of(
            optimizer, PROBLEMS[problem], parameters, cell.batch_size, SMALLEST
        )

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else torch.enable_grad()(closure)()
        gradients = {name: p.grad.unsqueeze(0) for name, p in self.named.items()}
        self.stepper.step(gradients, torch.tensor([self.param_groups[0]["lr"]]))
        return loss


def optimizer_of(model: torch.nn.Module, cell: Cell) -> torch.optim.Optimizer:
    """Return torch's own optimizer, if it has one, as the sweep had it."""
    parameters, lr = model.parameters(), cell.lr
    match cell.workload.split(", ")[1]:
        case "SGD":
            return torch.optim.SGD(parameters, lr)
        case "momentum":
            return torch.optim.SGD(parameters, lr, momentum=0.9)
        case "momentum 0.97":
            return torch.optim.SGD(parameters, lr, momentum=0.97)
        case "Nesterov":
            return torch.optim.SGD(parameters, lr, momentum=0.9, nesterov=True)
        case "AdamW":
            betas = 0.9, 0.999 ** (cell.batch_size / SMALLEST)
            return torch.optim.AdamW(parameters, lr, betas=betas, weight_decay=0.01)
    return Stepped(model, cell)


def trained(cell: Cell, seed: int) -> Row:
    """Train by Lightning with the default monitor; return its record."""
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.loggers import CSVLogger
    from torch.utils.data import DataLoader, RandomSampler, TensorDataset

    problem = PROBLEMS[cell.workload.split(", ")[0]]

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = problem.model()

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return problem.loss(self.net(batch[0]), batch)

        def configure_optimizers(self) -> Any:
            optimizer = optimizer_of(self.net, cell)
            if not cell.workload.endswith("decay"):
                return optimizer
            falling = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, cell.steps)
            return [optimizer], [{"scheduler": falling, "interval": "step"}]

    torch.manual_seed(seed)
    data = TensorDataset(*problem.data()[0])
    drawn = RandomSampler(data, replacement=True, num_samples=cell.steps * cell.batch_size)
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logger = CSVLogger(folder)
        Trainer(
            accelerator="cpu",
            max_epochs=1,
            logger=logger,
            callbacks=[NoiseScaleMonitor(unit=problem.unit)],
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        ).fit(Module(), DataLoader(data, batch_size=cell.batch_size, sampler=drawn))
        text = (Path(logger.log_dir) / RECORD).read_text()
    return {
        "kind": "run",
        "workload": cell.workload,
        "batch_size": cell.batch_size,
        "lr": cell.lr,
        "steps": cell.steps,
        "seed": seed,
        "seconds": round(time.perf_counter() - began, 1),
        "record": [_short(json.loads(line)) for line in text.splitlines()],
    }


def _short(line: Row) -> Row:
    """Six digits, and whole numbers as they are."""
    if "row" not in line:
        return line
    row = [float(f"{x:.6g}") if isinstance(x, float) else x for x in line["row"]]
    return {**line, "row": row}


def train(rows: list[Row], only: str | None, deadline: float) -> None:
    """Train what is missing, the cheapest first, until the deadline."""
    done = {(row["workload"], row["batch_size"], row["seed"]) for row in rows}
    for cell in planned(rows):
        for seed in SEEDS[cell.truth]:
            key = cell.workload, cell.batch_size, seed
            if key in done or only not in (None, cell.workload):
                continue
            if time.monotonic() > deadline:
                return
            row = trained(cell, seed)
            rows.append(row)
            write_results(NAME, rows, quiet=True)
            about = f"{cell.workload}, B = {cell.batch_size}, {cell.truth}"
            print(f"{about}: {cell.steps} steps, {row['seconds']} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", help="a workload")
    parser.add_argument("--minutes", type=float, default=math.inf, help="of training")
    parser.add_argument("--report", action="store_true", help="train nothing")
    given = parser.parse_args()
    torch.set_num_threads(1)
    rows = saved_rows(NAME)
    if not given.report:
        deadline = time.monotonic() + 60 * given.minutes
        use_plain_attention()
        for workload in LONGER:
            if given.only in (None, name_of(workload)):
                sweep_longer(workload, rows, deadline)
                train(rows, given.only, deadline)


if __name__ == "__main__":
    main()
