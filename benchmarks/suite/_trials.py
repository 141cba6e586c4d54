# SPDX-License-Identifier: Apache-2.0
"""One training of run.py, by the package's own optimizers, controller and step times.

The clock is modelled. A machine that others use cannot time a training, and on two cores no large
batch is ever faster. So each step costs what `noisescale.step_time` says of a plan on 1, 8 or 64
devices, from one assumed timing: a device takes 32 ms for 32 examples. What the package assumes
for all else (half of that is fixed; synchronising costs a quarter, more with more devices, and
more across nodes of 8) is the same for all submissions. Measuring the noise scale costs what the
meter takes it to cost. Adasum and DecentLaM pay what averaging pays. Measured seconds are saved
beside it, without evaluations.

Evaluations are due by the clock without what measuring costs. So two trainings whose batch sizes
are the same are evaluated at the same steps, whether one of them measures or not.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.lib.ranks import on_ranks
from benchmarks.lib.workloads import Batch
from benchmarks.suite._workloads import PROBLEMS, Problem
from noisescale import AdasumOptimizer, BatchSizeController, DecentLaM, NoiseScaleMeter, Plan
from noisescale.step_time import FittedStepTime, StepTiming, fit_step_time

Row = dict[str, Any]
DEVICES = (1, 8, 64)
CLOCK = 8
"""Devices of the clock that budgets and scores go by."""
A_NODE = 8
MOST = 2048
"""The largest global batch."""
ROUNDING = 1e-9


@dataclass(frozen=True)
class Method:
    """How the weights are changed."""

    optimizer: str
    """"sgd", "momentum" or "adamw"."""
    policy: str = ""
    """Of BatchSizeController; "": the batch size is fixed."""
    least: int = 0
    """The least batch size of a policy; 0: one example a device."""
    lr_scaling: str = "auto"
    """What a policy does with the learning rate."""
    combine: str = ""
    """"adasum" or "decentlam", over so many ranks."""
    ranks: int = 1


@dataclass(frozen=True)
class Task:
    """One training."""

    workload: str
    method: Method
    settings: Mapping[str, float]
    seed: int
    goal: float
    """Held-out loss to get to; -inf to train until the budget is spent."""
    budget: float
    """Modelled seconds."""
    about: Row = field(default_factory=dict)
    """What the row says of it."""


@cache
def _law() -> FittedStepTime:
    return fit_step_time([StepTiming(32, 1, 1, 1, seconds=0.032)])


@cache
def step_seconds(batch_size: float, devices: int) -> float:
    """Modelled seconds of a step. Devices that would have less than an example are left out."""
    used = max(int(min(devices, batch_size)), 1)
    return _law().seconds(batch_size / used, 1, used, max(1, used // A_NODE)).value


def measuring_seconds(plain_steps: float, batch_size: float, devices: int) -> float:
    """What measuring takes that costs so many plain steps: of computing, and not of waiting."""
    return plain_steps * step_seconds(batch_size / max(min(devices, batch_size), 1), 1)


def optimizer_of(method: Method, model: nn.Module, settings: Mapping[str, float]) -> Any:
    lr, momentum = settings["learning_rate"], settings.get("momentum", 0.9)
    if method.optimizer == "adamw":
        decay = settings.get("weight_decay", 0.01)
        return torch.optim.AdamW(
            model.parameters(), lr=lr, betas=(momentum, 0.999), weight_decay=decay
        )
    momentum = momentum if method.optimizer == "momentum" else 0.0
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum)


class Fixed:
    """Steps with a fixed batch size, in one process."""

    def __init__(self, problem: Problem, model: nn.Module, task: Task) -> None:
        self.problem, self.model = problem, model
        self.optimizer = optimizer_of(task.method, model, task.settings)
        self.size = int(task.settings["batch_size"])

    def step(self, batch: Batch) -> None:
        self.optimizer.zero_grad()
        self.problem.loss(self.model, batch).backward()
        self.optimizer.step()

    def held_out_loss(self) -> float:
        return self.problem.held_out_loss(self.model)

    @property
    def measuring_cost(self) -> float:
        return 0.0


class Scheduled(Fixed):
    """Steps whose batch size a policy decides on, as on the devices of the clock.

    A step that may be measured is as many micro-batches as there are devices.
    """

    def __init__(self, problem: Problem, model: nn.Module, task: Task) -> None:
        super().__init__(problem, model, task)
        self.controller = BatchSizeController(
            Plan(self.size // CLOCK, 1, devices=CLOCK),
            self.optimizer,
            task.method.policy,
            lr_scaling=task.method.lr_scaling,
            min_batch_size=task.method.least or None,
            max_device_batch_size=MOST // CLOCK,
            max_batch_size=MOST,
        )
        self.meter: NoiseScaleMeter | None = None
        if self.controller.settings.needs_noise_scale:
            self.meter = NoiseScaleMeter(model, small_batch="micro_batch", unit=problem.unit)
            self.meter.follow()

    @property
    def measuring_cost(self) -> float:
        """What measuring has cost so far, in plain steps."""
        return 0.0 if self.meter is None else self.meter.measuring_cost

    def step(self, batch: Batch) -> None:
        if self.meter is None:
            super().step(batch)
            self.controller.update()
        else:
            self.optimizer.zero_grad()
            for part in zip(*(each.chunk(CLOCK) for each in batch), strict=True):
                loss = self.problem.loss(self.model, part) / CLOCK
                self.meter.backward(loss, local_batch_size=len(part[0]))
            self.meter.step()
            self.optimizer.step()
            self._decide(self.meter)
        self.size = int(self.controller.plan.batch_size)

    def _decide(self, meter: NoiseScaleMeter) -> None:
        """As `controller.update` does, which would want micro-batches on each device."""
        self.controller.step()
        if self.controller.due_after(meter.last_measured_step):
            self.controller.decide(
                meter.noise_scale,
                meter.average_moments,
                measured_step=meter.last_measured_step,
            )


class AcrossRanks(Fixed):
    """Steps of one of several ranks on its share of the batch, by Adasum or DecentLaM."""

    def __init__(self, problem: Problem, model: nn.Module, task: Task) -> None:
        super().__init__(problem, model, task)
        adasum = task.method.combine == "adasum"
        inner = self.optimizer
        self.optimizer = AdasumOptimizer(inner) if adasum else DecentLaM(inner, "ring")

    def step(self, batch: Batch) -> None:
        x, y = (part.chunk(dist.get_world_size())[dist.get_rank()] for part in batch)
        super().step((x, y))

    def held_out_loss(self) -> float:
        with self._mean():
            loss = torch.tensor(0.0, dtype=torch.float64)
            if dist.get_rank() == 0:
                loss += super().held_out_loss()
            dist.broadcast(loss, 0)  # all go on, or none
        return float(loss)

    @contextmanager
    def _mean(self) -> Iterator[None]:
        if isinstance(self.optimizer, DecentLaM):
            with self.optimizer.use_mean():
                yield
        else:
            yield


def train(task: Task) -> Row:
    """Train until the goal, or until the next step would exceed the budget."""
    torch.set_num_threads(1)
    _law()  # once, and not in each rank
    found = on_ranks(task.method.ranks, partial(_train, task)) if task.method.combine else None
    return found[0] if found else _train(task)


def _train(task: Task) -> Row:
    problem, method = PROBLEMS[task.workload], task.method
    way = Scheduled if method.policy else AcrossRanks if method.combine else Fixed
    trained = way(problem, problem.seeded_model(task.seed), task)
    generator = torch.Generator().manual_seed(1000 + task.seed)
    modelled = dict.fromkeys(map(str, DEVICES), 0.0)
    course = Course(task.goal)
    step = examples = 0
    plain = due = cost = measured = 0.0
    began = time.perf_counter()
    while not course.ended:
        size = trained.size
        trained.step(problem.draw(size, generator))
        step, examples = step + 1, examples + size
        measuring, cost = trained.measuring_cost - cost, trained.measuring_cost
        for devices in DEVICES:
            seconds = step_seconds(size, devices) + measuring_seconds(measuring, size, devices)
            modelled[str(devices)] += seconds
        plain += step_seconds(size, CLOCK)
        next_step = step_seconds(trained.size, CLOCK)
        spent = modelled[str(CLOCK)] + next_step > task.budget
        if plain * (1 + ROUNDING) >= due or spent:
            due = max(1.05 * due, plain + next_step)
            measured += time.perf_counter() - began
            course.add(
                {
                    "step": step,
                    "examples": examples,
                    "seconds": {name: round(s, 4) for name, s in modelled.items()},
                    "measured": round(measured, 3),
                    "loss": round(trained.held_out_loss(), 5),
                },
                spent,
            )
            began = time.perf_counter()
    return {**task.about, "settings": dict(task.settings), "seed": task.seed, **course.row}


class Course:
    """The evaluations of a training: the best one, and the last two."""

    def __init__(self, goal: float) -> None:
        self.goal, self.ended = goal, ""
        self._count, self._best = 0, math.inf
        self._last: list[Row] = []

    def add(self, evaluation: Row, spent: bool) -> None:
        loss = evaluation["loss"]
        self._count += 1
        if not math.isfinite(loss):
            self.ended = "diverged"
            evaluation = evaluation | {"loss": None}
        elif loss <= self.goal:
            self.ended = "goal"
        elif spent:
            self.ended = "budget"
        self._best = min(self._best, loss if math.isfinite(loss) else math.inf)
        self._last = [*self._last[-1:], evaluation]

    @property
    def row(self) -> Row:
        best = self._best if math.isfinite(self._best) else None
        return {
            "ended": self.ended,
            "evaluations": self._count,
            "best": best,
            "last": self._last,
        }
