# SPDX-License-Identifier: Apache-2.0
"""As many training batches of any size as are asked for, from whatever the user's data are."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lightning_utilities.core.apply_func import apply_to_collection
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler, Subset

KEPT = (
    "num_workers",
    "collate_fn",
    "pin_memory",
    "timeout",
    "worker_init_fn",
    "multiprocessing_context",
    "prefetch_factor",
    "persistent_workers",
)
"""What a DataLoader was made with that has nothing to do with which examples it takes."""


def with_batches(loader: DataLoader[Any], size: int, count: int) -> DataLoader[Any]:
    """Return a loader like `loader` of `count` batches of `size` examples.

    Examples are drawn at random with replacement, so that no data set is too small. A stream
    (IterableDataset) goes on as long as it does.

    Raises:
        ValueError: If the data set makes the batches, not the loader.

    Example:
        >>> loader = with_batches(DataLoader(range(5), batch_size=2), size=8, count=3)
        >>> [len(batch) for batch in loader]
        [8, 8, 8]
    """
    if loader.batch_sampler is None:
        raise ValueError(
            "`batch_size` of the DataLoader must be a number, got None: its data set makes the"
            " batches. Give a data set of examples."
        )
    kept = {name: getattr(loader, name) for name in KEPT}
    dataset: Any = loader.dataset
    if isinstance(dataset, IterableDataset):
        return DataLoader(dataset, batch_size=size, drop_last=True, **kept)
    drawn = RandomSampler(dataset, replacement=True, num_samples=size * count)
    return DataLoader(dataset, batch_size=size, sampler=drawn, **kept)


def examples_in(data: Any) -> float:
    """How many there are to train on; infinite for streams and data modules, which do not say."""
    data = data.dataset if isinstance(data, DataLoader) else data
    return len(data) if hasattr(data, "__len__") else math.inf


@contextmanager
def batches_of(data: Any, size: int, count: int) -> Iterator[dict[str, Any]]:
    """Yield what `Trainer.fit` takes to train on `count` batches of `size` examples of `data`.

    Args:
        data: A map-style or iterable Dataset, a DataLoader or a LightningDataModule, which keeps
            its hooks and is as it was afterwards.
        size: Examples in a batch, on one rank.
        count: Batches.

    Raises:
        ValueError: If `data` is something else, or the data module makes no DataLoader.
    """
    if hasattr(data, "train_dataloader"):
        trainer, made = data.trainer, data.train_dataloader

        def train_dataloader() -> Any:
            loaders = made()
            found: list[DataLoader[Any]] = []
            apply_to_collection(loaders, DataLoader, found.append)
            if not found:
                raise ValueError(
                    "`train_dataloader` of the data module must return a DataLoader, or some in"
                    f" a list or dict, got {type(loaders).__name__}. Give the Dataset instead."
                )
            return apply_to_collection(loaders, DataLoader, with_batches, size, count)

        data.train_dataloader = train_dataloader
        try:
            yield {"datamodule": data}
        finally:
            data.trainer = trainer
            del data.train_dataloader
        return
    if not isinstance(data, DataLoader):
        if not (isinstance(data, Dataset) or hasattr(data, "__getitem__")):
            raise ValueError(
                "`data` must be a Dataset, a DataLoader or a LightningDataModule, got"
                f" {type(data).__name__}. Give what the module trains on."
            )
        data = DataLoader(data)
    yield {"train_dataloaders": with_batches(data, size, count)}


def held_examples(data: Any, count: int, size: int) -> DataLoader[Any]:
    """Return a loader of the same `count` examples of `data` each time, in batches of `size`.

    They are spread evenly over the data; of a stream they are the first. Augmentation that is
    random is random again each time.

    Raises:
        ValueError: If `data` is not what `batches_of` takes, or makes several loaders.

    Example:
        >>> [batch.tolist() for batch in held_examples(list(range(100)), 4, 2)]
        [[0, 33], [66, 99]]
    """
    if hasattr(data, "train_dataloader"):
        data.prepare_data()
        data.setup("fit")
        data = data.train_dataloader()
        if not isinstance(data, DataLoader):
            raise ValueError(
                "`train_dataloader` of the data module must return one DataLoader for branches, got"
                f" {type(data).__name__}. Give the Dataset instead."
            )
    loader = data if isinstance(data, DataLoader) else DataLoader(data)
    kept = {name: getattr(loader, name) for name in ("collate_fn", "pin_memory")}
    dataset: Any = loader.dataset
    if isinstance(dataset, IterableDataset):
        first = list(itertools.islice(iter(dataset), count))
        return DataLoader(first, batch_size=size, **kept)  # type: ignore[arg-type]
    most = min(count, len(dataset))
    chosen = [round(k * (len(dataset) - 1) / max(most - 1, 1)) for k in range(most)]
    return DataLoader(Subset(dataset, chosen), batch_size=size, **kept)
