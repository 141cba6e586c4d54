# SPDX-License-Identifier: Apache-2.0
"""Train a small policy with P prompts and n generations each; compare with what was predicted.

A policy of 20 actions, of which each prompt likes some, trains from one point to a target of its
expected reward, which is known exactly on held-out prompts. At each of
3 x 3 sizes the learning rate is searched by factors of 2 and √2; the steps are the median over
seeds at the best. The middle of the grid is measured, and the steps at the eight others, relative
to it, are predicted from that run.

    python benchmarks/prediction/prompts_or_generations.py [--seeds 5] [--only "SGD, mean"]

Results are saved as they come, and a later call goes on from there.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

sys.path.append(str(Path(__file__).resolve().parents[2]))
from benchmarks.accuracy.two_levels import Batch, Setting, advantages_of, loss_of
from benchmarks.lib.results import saved_rows, write_results
from noisescale import NoiseScaleMeter, predict
from noisescale.prediction.two_levels import steps_at

NAME = "prediction/prompts_or_generations"
PROMPTS, GENERATIONS = (4, 8, 16), (4, 8, 16)
MIDDLE = 8, 8
FEATURES, ACTIONS = 8, 20
MOST_STEPS = 3000
TARGET = 0.85
"""Of the way from the first expected reward to the best one."""


class Training(NamedTuple):
    optimizer: Callable[[nn.Module, float], torch.optim.Optimizer]
    advantage: str
    first_lr: float


TRAININGS = {
    "SGD, leave-one-out": Training(
        lambda m, lr: torch.optim.SGD(m.parameters(), lr=lr), "leave-one-out", 1.0
    ),
    "SGD, GRPO": Training(lambda m, lr: torch.optim.SGD(m.parameters(), lr=lr), "GRPO", 0.5),
    "Adam, leave-one-out": Training(
        lambda m, lr: torch.optim.Adam(m.parameters(), lr=lr, betas=(0.9, 0.95)),
        "leave-one-out",
        0.01,
    ),
}


def policy() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(FEATURES, 32), nn.Tanh(), nn.Linear(32, ACTIONS))


def chances(inputs: Tensor) -> Tensor:
    """How likely each action is rewarded, shape (rows, actions)."""
    likes = torch.randn(FEATURES, ACTIONS, generator=torch.Generator().manual_seed(5))
    return torch.sigmoid(3 * inputs @ likes / math.sqrt(FEATURES) - 2)


def draw(setting: Setting, model: nn.Module, generator: torch.Generator) -> Batch:
    (n,) = setting.sizes
    inputs = torch.randn(setting.prompts, FEATURES, generator=generator).repeat_interleave(n, 0)
    with torch.no_grad():
        actions = torch.multinomial(model(inputs).softmax(1), 1, generator=generator)[:, 0]
    chance = chances(inputs).gather(1, actions[:, None])[:, 0]
    rewards = (torch.rand(len(chance), generator=generator) < chance).float()
    advantages = advantages_of(setting, rewards.view(-1, n)).flatten()
    groups = torch.arange(setting.prompts).repeat_interleave(n)
    return Batch(inputs, actions, advantages, groups)


def rewards() -> tuple[Callable[[nn.Module], float], float]:
    """Return the expected reward of a policy on held-out prompts, and that to be reached."""
    inputs = torch.randn(1024, FEATURES, generator=torch.Generator().manual_seed(9))
    likely = chances(inputs)

    def of(model: nn.Module) -> float:
        with torch.no_grad():
            return float((model(inputs).softmax(1) * likely).sum(1).mean())

    first, best = of(policy()), float(likely.max(1).values.mean())
    return of, first + TARGET * (best - first)


def train(
    task: tuple[str, int, int, float, int], folder: str | None = None
) -> tuple[int | None, dict[str, Any]]:
    """Train to the target; return the steps, and the levels if the run is measured."""
    name, number, n, lr, seed = task
    torch.set_num_threads(1)
    training = TRAININGS[name]
    model = policy()
    optimizer = training.optimizer(model, lr)
    setting = Setting("", training.advantage, (n,), prompts=number)
    generator = torch.Generator().manual_seed(100 + seed)
    reward, target = rewards()
    meter = None
    if folder is not None:
        meter = NoiseScaleMeter(model, every_n_steps=1, log_to=folder, optimizer=optimizer)
    reached = None
    for step in range(1, MOST_STEPS + 1):
        optimizer.zero_grad()
        batch = draw(setting, model, generator)
        loss = loss_of(model, batch)
        if meter is None:
            loss.backward()
        else:
            rows = number * n
            meter.backward(loss, rows, row_groups=batch.groups, weight=torch.ones(rows))
            meter.step()
        optimizer.step()
        found = reward(model)
        if found >= target:
            reached = step
        if found >= target or not math.isfinite(found):
            break
    if meter is None:
        return reached, {}
    meter.close()
    p = predict(folder or "")
    p.history.loop = "trl"  # as there, advantages are centred
    assert p.levels is not None
    ratios = {
        f"{a} x {b}": dict(
            zip(
                ("value", "low", "high"),
                vars(steps_at(p, p.levels, a / number, b / n)).values(),
                strict=True,
            )
        )
        for a in PROMPTS
        for b in GENERATIONS
    }
    return reached, {"levels": p.levels.columns(), "ratios": ratios}


class Grid:
    """The trainings so far."""

    def __init__(self, rows: list[dict[str, Any]], pool: ProcessPoolExecutor, seeds: int) -> None:
        self.rows, self.pool, self.seeds = rows, pool, seeds

    def steps(self, name: str, number: int, n: int, lr: float) -> float:
        """Return the median over seeds; infinite where half of them failed."""
        for row in self.rows:
            if (row["training"], row["prompts"], row["n"]) == (name, number, n) and math.isclose(
                row["lr"], lr
            ):
                return statistics.median(s or math.inf for s in row["steps"])
        tasks = [(name, number, n, lr, seed) for seed in range(self.seeds)]
        found = [steps for steps, _ in self.pool.map(train, tasks)]
        row = {"training": name, "prompts": number, "n": n, "lr": lr, "steps": found}
        self.rows.append(row)
        write_results(NAME, self.rows, quiet=True)
        return statistics.median(s or math.inf for s in found)

    def best(self, name: str, number: int, n: int, first_lr: float) -> tuple[float, float]:
        """Return the best learning rate and its steps: by factors of 2, then of √2."""
        tried = {first_lr: self.steps(name, number, n, first_lr)}
        while not any(map(math.isfinite, tried.values())):
            lr = min(tried) / 2
            tried[lr] = self.steps(name, number, n, lr)
        for factor in (2.0, math.sqrt(2)):
            while True:
                best = min(tried, key=lambda lr: tried[lr])
                wanted = [
                    lr
                    for lr in (best / factor, best * factor)
                    if not any(math.isclose(lr, other) for other in tried)
                ]
                if not wanted:
                    break
                for lr in wanted:
                    tried[lr] = self.steps(name, number, n, lr)
        best = min(tried, key=lambda lr: tried[lr])
        return best, tried[best]


def report(rows: list[dict[str, Any]], console: Console) -> None:
    for name in TRAININGS:
        table = Table("prompts x n", "steps", "over the middle", "predicted (likely)", "off by")
        own = [row for row in rows if row["training"] == name]
        found = {
            (number, n): min(
                (
                    statistics.median(s or math.inf for s in r["steps"])
                    for r in own
                    if (r["prompts"], r["n"]) == (number, n) and "steps" in r
                ),
                default=math.nan,
            )
            for number in PROMPTS
            for n in GENERATIONS
        }
        predicted = [row["ratios"] for row in own if "ratios" in row]
        if not predicted:
            continue
        for (number, n), steps in found.items():
            key = f"{number} x {n}"
            of_seeds = [ratios[key] for ratios in predicted]
            value, low, high = (
                statistics.median(x[end] for x in of_seeds) for end in ("value", "low", "high")
            )
            ratio = steps / found[MIDDLE]
            table.add_row(
                key,
                f"{steps:g}",
                f"{ratio:.2f}",
                f"{value:.2f} ({low:.2f} to {high:.2f})",
                f"{value / ratio:.2f} x",
            )
        console.print(name)
        console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--only", choices=TRAININGS)
    parser.add_argument("--report", action="store_true", help="print what is saved, run none")
    parser.add_argument("--smoke", action="store_true", help="one training of a few steps, unsaved")
    options = parser.parse_args()
    if options.smoke:
        with tempfile.TemporaryDirectory() as folder:
            print(train(("SGD, leave-one-out", 4, 4, 8.0, 0), folder)[1]["levels"])
        return
    rows = saved_rows(NAME)
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        grid = Grid(rows, pool, options.seeds)
        for name, training in TRAININGS.items():
            if options.report or options.only not in (None, name):
                continue
            lr = training.first_lr
            for number in PROMPTS:
                for n in GENERATIONS:
                    lr, steps = grid.best(name, number, n, lr)
                    print(f"{name}: {number} x {n}: {steps:g} steps at {lr:.3g}", flush=True)
            if not any(row["training"] == name and "ratios" in row for row in rows):
                lr, _ = grid.best(name, *MIDDLE, training.first_lr)
                for seed in range(options.seeds):
                    with tempfile.TemporaryDirectory() as folder:
                        steps, found = train((name, *MIDDLE, lr, seed), folder)
                    kept = {"training": name, "prompts": MIDDLE[0], "n": MIDDLE[1], "lr": lr}
                    rows.append({**kept, "measured": steps, **found})
                    write_results(NAME, rows, quiet=True)
        report(rows, Console(width=110))


if __name__ == "__main__":
    main()
