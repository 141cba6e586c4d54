# SPDX-License-Identifier: Apache-2.0
"""Lightning fits of the small classifier by reductions, and what is looked at when they end."""

import csv
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import torch
from fits import classifier, data
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler


def adam(module: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(module.parameters(), lr=0.01)


def momentum(module: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.8)


def module_by(
    configure: Callable[[Any], Any], net: nn.Module | None = None, package: Any = L, **members: Any
) -> Any:
    """The classifier with these optimizers, and with members of its own."""
    made = type(classifier(package, net=net))
    return type("Module", (made,), {"configure_optimizers": configure, **members})()


def weights(fitting: Any, module: Any) -> list[Tensor]:
    return [p.detach().clone() for p in module.parameters()]


class OwnWeights(L.Callback):
    """Keeps this rank's weights when training ends, before a mean takes their place."""

    def on_train_end(self, fitting: Any, module: Any) -> None:
        self.weights = weights(fitting, module)


def mean_of(of_ranks: list[list[Tensor]]) -> list[Tensor]:
    return [torch.stack(same).mean(0) for same in zip(*of_ranks, strict=True)]


def batches_of(ranks: int) -> list[Iterator[Any]]:
    """The batches that Lightning gives each rank."""
    samplers = [DistributedSampler(data(), ranks, rank) for rank in range(ranks)]
    return [iter(DataLoader(data(), batch_size=8, sampler=sampler)) for sampler in samplers]


def rows(folder: Path, key: str) -> dict[int, float]:
    """What was logged, by the step."""
    with (folder / "metrics.csv").open() as file:
        return {int(row["step"]): float(row[key]) for row in csv.DictReader(file) if row[key]}
