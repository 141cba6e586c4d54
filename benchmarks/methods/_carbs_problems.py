# SPDX-License-Identifier: Apache-2.0
"""Problems of carbs.py: settings of a training to tune, each with a cost and a noisy loss.

The laws are those of the literature, not of any search. Each front is known: a misfit of learning
rate, weight decay, dropout, ... can be zero at any cost, and what is left has one best way to
spend a cost. No loss is above that of a guess.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn

from benchmarks.lib.workloads import mnist

GUESS = 2.3
"""Loss of a guess among ten classes."""

NOISE = 0.02
"""Standard deviation of a measured loss."""

Params = dict[str, float]
Range = tuple[str, float, float]
"""Kind ("log", "int" in logs, or "linear"), and the ends."""


@dataclass(frozen=True)
class Problem:
    """What is tuned, from where, and what comes out."""

    name: str
    space: Mapping[str, Range]
    center: Params
    cost: Callable[[Params], float]
    loss: Callable[[Params], float]
    """Without noise."""
    measured: Callable[[Params, np.random.Generator], float]
    front: Callable[[float], float] | None
    """Smallest loss at a cost; None where it is not known."""

    @property
    def costs(self) -> tuple[float, float]:
        """The smallest and the largest cost in the space."""
        low, high = (
            self.cost({name: each[end] for name, each in self.space.items()}) for end in (1, 2)
        )
        return low, high

    def area(self, costs: list[float], losses: list[float], *, from_center: bool = False) -> float:
        """The hypervolume that points dominate, in log cost and loss, as a share of the whole.

        From the smallest cost up, or from that of the first settings.
        """
        low, high = map(math.log, self.costs)
        low = math.log(self.cost(self.center)) if from_center else low
        total, best, at = 0.0, GUESS, low
        for cost, loss in sorted(zip(map(math.log, costs), losses, strict=True)):
            total += (GUESS - best) * (max(cost, low) - at)
            at, best = max(cost, low), min(best, loss)
        return (total + (GUESS - best) * (high - at)) / (GUESS * (high - low))

    def largest_area(self, *, from_center: bool = False) -> float:
        """The area of the front."""
        if self.front is None:
            return 1.0
        costs = np.geomspace(*self.costs, 2001)
        losses = [min(self.front(float(cost)), GUESS) for cost in costs]
        return self.area(costs.tolist(), losses, from_center=from_center)


Ends = tuple[float, float]


def two_terms(cost: float, a: float, p: float, b: float, q: float, x: Ends, y: Ends) -> float:
    """The minimum of a/x^p + b/y^q where x·y = cost, x and y within their ends.

    It is convex in log x. Without ends, p·a/x^p = q·b/y^q.
    """
    best = (p * a / (q * b)) ** (1 / (p + q)) * cost ** (q / (p + q))
    best = min(max(best, x[0], cost / y[1]), x[1], cost / y[0])
    return a / best**p + b * (best / cost) ** q


def noisy(loss: Callable[[Params], float]) -> Callable[[Params, np.random.Generator], float]:
    return lambda params, rng: loss(params) + NOISE * float(rng.normal())


def steps_problem() -> Problem:
    """Batch size and steps: S/(1 + B_noise/B) steps of progress (McCandlish et al. 2018)."""
    noise_scale, overhead = 128.0, 32.0  # examples; a step costs B + overhead

    def loss(p: Params) -> float:
        progress = p["steps"] / (1 + noise_scale / p["batch_size"])
        best = math.log10(0.3 / (1 + noise_scale / p["batch_size"]))
        misfit = 0.5 * (math.log10(p["lr"]) - best) ** 2
        misfit += 0.05 * (math.log10(p["weight_decay"]) + 3) ** 2
        return min(0.2 + 4 / math.sqrt(progress) + misfit, GUESS)

    def front(cost: float) -> float:
        batch = math.sqrt(noise_scale * overhead)
        batch = min(max(batch, 8, cost / 1000 - overhead), 256, cost / 30 - overhead)
        return 0.2 + 4 / math.sqrt(cost / (batch + overhead) / (1 + noise_scale / batch))

    return Problem(
        "batch size",
        {
            "batch_size": ("int", 8, 256),
            "steps": ("int", 30, 1000),
            "lr": ("log", 1e-4, 1.0),
            "weight_decay": ("log", 1e-6, 1e-1),
        },
        {"batch_size": 32, "steps": 150, "lr": 1e-2, "weight_decay": 1e-4},
        lambda p: p["steps"] * (p["batch_size"] + overhead),
        loss,
        noisy(loss),
        front,
    )


def width_problem() -> Problem:
    """Width and steps: a loss of two power laws (Hoffmann et al. 2022)."""

    def loss(p: Params) -> float:
        misfit = 0.5 * (math.log10(p["lr"]) - math.log10(0.03 * (24 / p["width"]) ** 0.5)) ** 2
        misfit += 0.05 * (math.log10(p["weight_decay"]) + 3) ** 2 + 0.5 * (p["dropout"] - 0.1) ** 2
        return min(0.1 + 2 * p["width"] ** -0.5 + 10 * p["steps"] ** -0.5 + misfit, GUESS)

    return Problem(
        "width",
        {
            "width": ("int", 8, 256),
            "steps": ("int", 100, 2000),
            "lr": ("log", 1e-4, 1.0),
            "weight_decay": ("log", 1e-6, 1.0),
            "dropout": ("linear", 0.0, 0.8),
        },
        {"width": 24, "steps": 600, "lr": 3e-3, "weight_decay": 1e-4, "dropout": 0.3},
        lambda p: p["width"] * p["steps"],
        loss,
        noisy(loss),
        lambda cost: 0.1 + two_terms(cost, 2, 0.5, 10, 0.5, (8, 256), (100, 2000)),
    )


def six_problem() -> Problem:
    """Six settings whose best values move with one another."""

    def loss(p: Params) -> float:
        lr = math.log10(p["lr"] / (1 - p["momentum"]))
        best = 0.1 * math.sqrt(p["batch_size"] / 32) * (24 / p["width"]) ** 0.5
        misfit = 0.4 * (lr - math.log10(best)) ** 2 + 0.2 * (p["momentum"] - 0.9) ** 2
        misfit += 0.3 * (math.log10(p["batch_size"]) - math.log10(16 * p["epochs"] ** 0.5)) ** 2
        misfit += 0.4 * (p["dropout"] - 0.1 * math.log2(p["width"] / 8)) ** 2
        return min(0.1 + 3 * p["width"] ** -0.6 + p["epochs"] ** -0.7 + misfit, GUESS)

    return Problem(
        "six settings",
        {
            "width": ("int", 8, 128),
            "epochs": ("int", 1, 20),
            "batch_size": ("int", 8, 512),
            "lr": ("log", 1e-4, 1.0),
            "momentum": ("linear", 0.0, 0.98),
            "dropout": ("linear", 0.0, 0.8),
        },
        {"width": 24, "epochs": 6, "batch_size": 64, "lr": 1e-2, "momentum": 0.5, "dropout": 0.3},
        lambda p: p["width"] ** 1.5 * p["epochs"],
        loss,
        noisy(loss),
        lambda cost: 0.1 + two_terms(cost, 3, 0.4, 1, 0.7, (8**1.5, 128**1.5), (1, 20)),
    )


@cache
def digits() -> tuple[torch.Tensor, torch.Tensor]:
    """The handwritten digits of scikit-learn, in a fixed order."""
    x, y = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(y))
    return torch.tensor(x[order] / 16).float(), torch.tensor(y[order])


@cache
def trained(batch_size: int, lr: float, width: int, examples: int, seed: int) -> float:
    """Validation loss of a perceptron after so many examples, by SGD with momentum."""
    torch.manual_seed(seed)
    x, y = digits()
    net = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10))
    optimizer = torch.optim.SGD(net.parameters(), lr, momentum=0.9)
    for rows in torch.randint(1400, (max(examples // batch_size, 1), batch_size)):
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(x[rows]), y[rows]).backward()
        optimizer.step()
    with torch.no_grad():
        loss = float(nn.functional.cross_entropy(net(x[1400:]), y[1400:]))
    return min(loss, GUESS) if math.isfinite(loss) else GUESS


def digits_problem() -> Problem:
    """A perceptron on the digits; its cost is examples times parameters."""

    def once(p: Params, seed: int) -> float:
        return trained(int(p["batch_size"]), p["lr"], int(p["width"]), int(p["examples"]), seed)

    return Problem(
        "digits",
        {
            "batch_size": ("int", 16, 256),
            "lr": ("log", 1e-4, 1.0),
            "width": ("int", 8, 128),
            "examples": ("int", 350, 14000),
        },
        {"batch_size": 32, "lr": 3e-3, "width": 16, "examples": 2800},
        lambda p: p["examples"] * (75 * p["width"] + 10),
        lambda p: math.fsum(once(p, seed) for seed in (1, 2, 3)) / 3,
        lambda p, rng: once(p, int(rng.integers(10, 2**31))),
        None,
    )


def mnist_problem() -> Problem:
    """A perceptron with dropout on MNIST, by Adam; its cost is examples times parameters."""

    @cache
    def once(batch_size: int, lr: float, width: int, examples: int, off: float, seed: int) -> float:
        (x, y), (test_x, test_y) = mnist()
        torch.manual_seed(seed)
        net = nn.Sequential(nn.Linear(784, width), nn.ReLU(), nn.Dropout(off), nn.Linear(width, 10))
        optimizer = torch.optim.Adam(net.parameters(), lr)
        for rows in torch.randint(len(x), (max(examples // batch_size, 1), batch_size)):
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(x[rows]), y[rows]).backward()
            optimizer.step()
        net.eval()
        with torch.no_grad():
            loss = float(nn.functional.cross_entropy(net(test_x), test_y))
        return min(loss, GUESS) if math.isfinite(loss) else GUESS

    def of(p: Params, seed: int) -> float:
        sizes = int(p["batch_size"]), p["lr"], int(p["width"]), int(p["examples"])
        return once(*sizes, p["dropout"], seed)

    return Problem(
        "MNIST",
        {
            "batch_size": ("int", 16, 512),
            "lr": ("log", 1e-5, 1e-1),
            "width": ("int", 4, 64),
            "examples": ("int", 512, 32768),
            "dropout": ("linear", 0.0, 0.8),
        },
        {"batch_size": 64, "lr": 3e-4, "width": 12, "examples": 4096, "dropout": 0.3},
        lambda p: p["examples"] * (795 * p["width"] + 10),
        lambda p: math.fsum(of(p, seed) for seed in (1, 2, 3)) / 3,
        lambda p, rng: of(p, int(rng.integers(10, 2**31))),
        None,
    )


PROBLEMS = (steps_problem, width_problem, six_problem, digits_problem, mnist_problem)
"""The search was not developed on these."""
