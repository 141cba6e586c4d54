# SPDX-License-Identifier: Apache-2.0
"""Problems on which the search was developed; those of `_carbs_problems.py` judge it."""

from __future__ import annotations

import math
from functools import cache

import torch
from sklearn.datasets import make_classification
from torch import nn

from benchmarks.methods._carbs_problems import GUESS, Params, Problem, noisy, two_terms


def depth_problem() -> Problem:
    """Depth, width and steps: depth and width of equal use at one shape of a network."""

    def loss(p: Params) -> float:
        size, shape = p["depth"] * p["width"] ** 2, p["width"] / p["depth"]
        best = -2 - 0.25 * math.log10(size / 1000)
        misfit = 0.4 * (math.log10(p["lr"]) - best) ** 2 + 0.3 * math.log10(shape / 12) ** 2
        return min(0.2 + 4 * size**-0.25 + 6 * p["steps"] ** -0.4 + misfit, GUESS)

    return Problem(
        "depth",
        {
            "depth": ("int", 1, 8),
            "width": ("int", 12, 96),
            "steps": ("int", 50, 3000),
            "lr": ("log", 1e-6, 1e-1),
        },
        {"depth": 3, "width": 40, "steps": 500, "lr": 3e-4},
        lambda p: p["depth"] * p["width"] ** 2 * p["steps"],
        loss,
        noisy(loss),
        lambda cost: 0.2 + two_terms(cost, 4, 0.25, 6, 0.4, (144, 8 * 96**2), (50, 3000)),
    )


def edge_problem() -> Problem:
    """A rate that diverges just above its best value, and settings that do nothing."""

    def loss(p: Params) -> float:
        above = math.log10(p["lr"]) - math.log10(
            0.02 * (1 + p["warmup"]) * (p["batch"] / 64) ** 0.5
        )
        misfit = 0.4 * (above + 0.4) ** 2 + 0.6 * (p["warmup"] - 0.3) ** 2
        if above > 0:
            return GUESS
        per_step = 1 / (1 + 48 / p["batch"])
        return min(0.1 + 5 * (p["steps"] * per_step) ** -0.45 + misfit, GUESS)

    return Problem(
        "edge",
        {
            "batch": ("int", 4, 512),
            "steps": ("int", 20, 2000),
            "lr": ("log", 1e-5, 1.0),
            "warmup": ("linear", 0.0, 1.0),
            "smoothing": ("linear", 0.0, 0.5),
            "epsilon": ("log", 1e-10, 1e-4),
        },
        {"batch": 64, "steps": 200, "lr": 1e-3, "warmup": 0.1, "smoothing": 0.1, "epsilon": 1e-8},
        lambda p: p["steps"] * (p["batch"] + 8),
        loss,
        noisy(loss),
        None,
    )


def valley_problem() -> Problem:
    """Eight settings, some in valleys that turn with the cost, from a poor beginning."""

    def loss(p: Params) -> float:
        log = {name: math.log10(p[name]) for name in ("lr", "decay", "clip", "data", "layers")}
        misfit = 0.6 * (log["lr"] + 0.5 * log["data"] + 1 - 0.3 * log["layers"]) ** 2
        misfit += 0.15 * (log["lr"] + log["decay"] + 6) ** 2 + 0.02 * log["clip"] ** 2
        misfit += 1.5 * (p["dropout"] - 0.5 / (1 + log["data"])) ** 2
        misfit += 0.5 * (p["beta"] - 0.9 - 0.05 * log["layers"]) ** 2
        misfit += 0.2 * (p["mix"] - 0.5) ** 2
        return min(0.15 + 8 * p["data"] ** -0.5 + p["layers"] ** -0.5 + misfit, GUESS)

    return Problem(
        "valley",
        {
            "layers": ("int", 1, 32),
            "data": ("int", 20, 2000),
            "lr": ("log", 1e-5, 1.0),
            "decay": ("log", 1e-6, 1e-1),
            "clip": ("log", 1e-2, 1e2),
            "dropout": ("linear", 0.0, 0.7),
            "beta": ("linear", 0.5, 0.999),
            "mix": ("linear", 0.0, 1.0),
        },
        {
            "layers": 4,
            "data": 200,
            "lr": 1e-2,
            "decay": 1e-3,
            "clip": 10.0,
            "dropout": 0.4,
            "beta": 0.7,
            "mix": 0.2,
        },
        lambda p: p["layers"] * p["data"],
        loss,
        noisy(loss),
        lambda cost: 0.15 + two_terms(cost, 8, 0.5, 1, 0.5, (20, 2000), (1, 32)),
    )


@cache
def clusters() -> tuple[torch.Tensor, torch.Tensor]:
    """Ten classes of a cluster each, drawn once."""
    x, y = make_classification(
        3000, 16, n_informative=10, n_classes=10, n_clusters_per_class=1, random_state=0
    )
    return torch.tensor(x).float(), torch.tensor(y)


def clusters_problem() -> Problem:
    """A perceptron on the clusters, by SGD with momentum; its cost is examples times parameters."""

    @cache
    def once(
        lr: float, momentum: float, width: int, examples: int, decay: float, seed: int
    ) -> float:
        x, y = clusters()
        torch.manual_seed(seed)
        net = nn.Sequential(nn.Linear(16, width), nn.ReLU(), nn.Linear(width, 10))
        optimizer = torch.optim.SGD(net.parameters(), lr, momentum, weight_decay=decay)
        for rows in torch.randint(2000, (examples // 64, 64)):
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(x[rows]), y[rows]).backward()
            optimizer.step()
        with torch.no_grad():
            loss = float(nn.functional.cross_entropy(net(x[2000:]), y[2000:]))
        return min(loss, GUESS) if math.isfinite(loss) else GUESS

    def of(p: Params, seed: int) -> float:
        sizes = int(p["width"]), int(p["examples"])
        return once(p["lr"], p["momentum"], *sizes, p["decay"], seed)

    return Problem(
        "clusters",
        {
            "lr": ("log", 1e-4, 1.0),
            "momentum": ("linear", 0.0, 0.95),
            "width": ("int", 4, 64),
            "examples": ("int", 300, 10000),
            "decay": ("log", 1e-6, 1e-1),
        },
        {"lr": 3e-2, "momentum": 0.5, "width": 16, "examples": 2000, "decay": 1e-4},
        lambda p: p["examples"] * (27 * p["width"] + 10),
        lambda p: math.fsum(of(p, seed) for seed in (1, 2, 3)) / 3,
        lambda p, rng: of(p, int(rng.integers(10, 2**31))),
        None,
    )


DEVELOPMENT = (depth_problem, edge_problem, valley_problem, clusters_problem)
