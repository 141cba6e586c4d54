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
)

from noisescale.lightning.resized_loaders import KEPT


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
    return type(sampler) is RandomSampler


def can_be_shuffled(loader: Any) -> bool:
    """Return whether batches can be drawn at random from the data set of a loader."""
    return isinstance(loader, DataLoader) and not (
        isinstance(loader.dataset, IterableDataset) or loader.batch_sampler is None
    )


@contextmanager
def shuffled_batches(loader: DataLoader[Any], size: int) -> Iterator[dict[str, Any]]:
    """Give the arguments of `Trainer.fit` for random batches of `size` examples on a device."""
    kept: dict[str, Any] = {name: getattr(loader, name) for name in KEPT}
    yield {
        "train_dataloaders": DataLoader(
            loader.dataset, batch_size=size, shuffle=True, drop_last=True, **kept
        )
    }
