# SPDX-License-Identifier: Apache-2.0
"""Whether the batches of a loader are independent draws."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from noisescale.estimation.independent_batches import BatchProducts
from noisescale.lightning.resized_loaders import KEPT, indices_of
from noisescale.refusal import Refusal


def draws_at_random(loader: Any) -> bool:
    """Return whether a loader draws each example at random, by a sampler of torch.

    Examples:
        >>> draws_at_random(DataLoader(range(8), batch_size=2, shuffle=True))
        True
        >>> draws_at_random(DataLoader(range(8), batch_size=2))
        False
    """
    if not isinstance(loader, DataLoader) or type(loader.batch_sampler) is not BatchSampler:
        return False
    sampler = loader.sampler
    if isinstance(sampler, DistributedSampler):
        return bool(sampler.shuffle)
    return type(sampler) in (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)


def goes_in_order(loader: Any) -> bool:
    """Return whether a loader has the same batches each time, by a sampler of torch."""
    if not isinstance(loader, DataLoader) or type(loader.batch_sampler) is not BatchSampler:
        return False
    sampler = loader.sampler
    if isinstance(sampler, DistributedSampler):
        return not sampler.shuffle
    return type(sampler) is SequentialSampler


def can_be_shuffled(loader: Any) -> bool:
    """Return whether batches can be drawn at random from the data set of a loader."""
    return isinstance(loader, DataLoader) and not (
        isinstance(loader.dataset, IterableDataset) or loader.batch_sampler is None
    )


@contextmanager
def shuffled_batches(loader: DataLoader[Any], size: int) -> Iterator[dict[str, Any]]:
    """Give the arguments of `Trainer.fit` for random batches of `size` examples on a device.

    They are of the examples that the loader takes in an epoch.
    """
    kept: dict[str, Any] = {name: getattr(loader, name) for name in KEPT}
    indices = indices_of(loader)
    dataset = loader.dataset if indices is None else Subset(loader.dataset, [*indices])
    yield {
        "train_dataloaders": DataLoader(
            dataset, batch_size=size, shuffle=True, drop_last=True, **kept
        )
    }


def with_replacement(
    products: list[BatchProducts], loader: Any, batch_size: float, ranks: int
) -> list[BatchProducts]:
    """Return products as if each example had been drawn from the whole data set.

    In an epoch no example comes twice. Let N be its examples and B those of a batch, N = m·B. Then
    the mean gradient of a batch varies (N - B)/(N - 1) times as much, and those of two batches of
    one epoch are correlated by -1/(m - 1). Whole epochs cancel much of the noise, and an epoch that
    is not over none.

    Raises:
        ValueError: If a batch has more than half of the examples.
    """
    sampler = getattr(loader, "sampler", None)
    if not draws_at_random(loader) or getattr(sampler, "replacement", False):
        return products
    examples = len(sampler) * (ranks if isinstance(sampler, DistributedSampler) else 1)  # type: ignore[arg-type]  # a sampler of torch
    m = examples / batch_size
    if m < 2:
        raise Refusal(
            "batch_size",
            "be at most half of the examples",
            f"{batch_size:g} of {examples:g}",
            "Larger batches are all alike.",
        )
    n = len(products) + 1
    epochs, rest = divmod(n, max(int(m), 1))
    pairs = epochs * int(m) * (int(m) - 1) + rest * (rest - 1)
    together = pairs / (n * (n - 1))
    smaller = (examples - batch_size) / (examples - 1)
    scale = 1 / (smaller * (1 + together / (m - 1)))
    mean = scale * sum(one.deviation / one.weight for one in products) / len(products)
    lost = together * smaller * mean / (m - 1)
    return [
        one._replace(deviation=scale * one.deviation, along=one.along + lost) for one in products
    ]
