# SPDX-License-Identifier: Apache-2.0
"""Training batches of any size and number, made from the user's data."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    Subset,
)

from noisescale.collectives import rank, world_size
from noisescale.refusal import Refusal

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
"""Arguments of a DataLoader that do not change which examples it takes."""


ITERATES = ("__iter__", "_get_iterator")
"""Methods of a DataLoader that go through its batches."""


SHUFFLED = 4
"""Batches of a stream among which examples are shuffled."""


class Drawn(Sampler[int]):
    """A given number of indices; they start again from the first when they end.

    Each rank has its own share of the indices.
    """

    def __init__(self, indices: Iterable[int], count: int) -> None:
        self._indices, self._count = indices, count

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[int]:
        ranks = world_size()
        yield from itertools.islice(self._endless(), rank(), ranks * self._count, ranks)

    def _endless(self) -> Iterator[int]:
        some = True
        while some:
            some = False
            for index in self._indices:
                some = True
                yield index


class Shuffled(IterableDataset[Any]):
    """A stream that is shuffled a little: examples change places with near ones.

    Examples:
        >>> sorted(Shuffled(range(10), 4))
        [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]
    """

    def __init__(self, stream: Iterable[Any], among: int) -> None:
        self._stream, self._among = stream, among

    def __iter__(self) -> Iterator[Any]:
        examples = iter(self._stream)
        kept = list(itertools.islice(examples, self._among))
        for example in examples:
            place = int(torch.randint(len(kept), ()))
            yield kept[place]
            kept[place] = example
        yield from (kept[place] for place in torch.randperm(len(kept)).tolist())


def indices_of(loader: DataLoader[Any]) -> Iterable[int] | None:
    """Return the indices a loader takes, in its order; None if its sampler is a standard one."""
    if type(loader.batch_sampler) is not BatchSampler:
        return _Flat(loader.batch_sampler)  # type: ignore[arg-type]  # callers refuse None
    if type(loader.sampler) in (RandomSampler, SequentialSampler):
        return None
    return loader.sampler


class _Flat:
    """Batches of indices, one index after the other, each time that it is gone through."""

    def __init__(self, batches: Iterable[list[int]]) -> None:
        self._batches = batches

    def __iter__(self) -> Iterator[int]:
        return itertools.chain.from_iterable(self._batches)


def with_batches(
    loader: DataLoader[Any], size: int, count: int, shuffled: bool = False
) -> DataLoader[Any]:
    """Return a loader like `loader` of `count` batches of `size` examples.

    Examples are drawn at random with replacement, so that no data set is too small. If the loader
    has a sampler of the user's own, its order is repeated. A stream (IterableDataset) is read to
    its end, `shuffled` or as it is.

    Raises:
        ValueError: If the data set makes the batches, not the loader.

    Examples:
        >>> loader = with_batches(DataLoader(range(5), batch_size=2), size=8, count=3)
        >>> [len(batch) for batch in loader]
        [8, 8, 8]
    """
    _refuse_made_batches(loader)
    kept = {name: getattr(loader, name) for name in KEPT}
    dataset: Any = loader.dataset
    if isinstance(dataset, IterableDataset):
        stream = Shuffled(dataset, SHUFFLED * size) if shuffled else dataset
        return DataLoader(stream, batch_size=size, drop_last=True, **kept)
    indices = indices_of(loader)
    if indices is None:
        indices = RandomSampler(dataset, replacement=True, num_samples=size * count)
    return DataLoader(dataset, batch_size=size, sampler=Drawn(indices, size * count), **kept)


def examples_in(data: Any) -> float:
    """Return the number of examples to train on; infinite if a stream or data module hides it."""
    data = data.dataset if isinstance(data, DataLoader) else data
    return len(data) if hasattr(data, "__len__") else math.inf


def examples_of_epoch(loader: Any) -> float:
    """Return the number of examples that a loader takes in an epoch; infinite if it is not known.

    A sampler of the user's own may take fewer than there are, or more.

    Examples:
        >>> from torch.utils.data import SubsetRandomSampler
        >>> sampler = SubsetRandomSampler(range(4))
        >>> examples_of_epoch(DataLoader(range(10), batch_size=3, sampler=sampler))
        4
    """
    dataset = getattr(loader, "dataset", None)
    batches = getattr(loader, "batch_sampler", None)
    if not isinstance(dataset, IterableDataset) and batches is not None:
        if type(batches) is not BatchSampler and hasattr(batches, "__len__"):
            return sum(len(batch) for batch in itertools.islice(batches, len(batches)))
        if type(batches) is BatchSampler and hasattr(loader.sampler, "__len__"):
            return len(loader.sampler)
    return len(dataset) if hasattr(dataset, "__len__") else math.inf  # type: ignore[arg-type]  # it has a length


@contextmanager
def remade_loaders(
    data: Any, remake: Callable[[DataLoader[Any]], DataLoader[Any]]
) -> Iterator[None]:
    """Have a data module make other loaders to train on for a while.

    Raises:
        ValueError: In the fit, if it makes no DataLoader.
    """
    trainer, made = data.trainer, data.train_dataloader

    def train_dataloader() -> Any:
        loaders = made()
        found: list[DataLoader[Any]] = []
        apply_to_collection(loaders, DataLoader, found.append)
        if not found:
            raise Refusal(
                "train_dataloader",
                "return a DataLoader, or a list or dict of DataLoaders",
                type(loaders).__name__,
                "Give the Dataset instead of the data module.",
            )
        return apply_to_collection(loaders, DataLoader, remake)

    data.train_dataloader = train_dataloader
    try:
        yield
    finally:
        data.trainer = trainer
        del data.train_dataloader


@contextmanager
def batches_of(
    data: Any,
    size: int,
    count: int,
    shuffled: bool = False,
    change: Callable[[DataLoader[Any]], DataLoader[Any]] = lambda loader: loader,
) -> Iterator[dict[str, Any]]:
    """Yield the arguments with which `Trainer.fit` trains on `count` batches of `size` examples.

    Args:
        data: A map-style or iterable Dataset, a DataLoader or a LightningDataModule. A data module
            keeps its hooks, and is restored afterwards.
        size: Examples in a batch, on one rank.
        count: Batches.
        shuffled: Whether a stream is shuffled a little. Other data always are shuffled, unless they
            have a sampler.
        change: What to train on instead of each loader.

    Raises:
        ValueError: If `data` is something else, or the data module makes no DataLoader.
    """

    def remake(loader: DataLoader[Any]) -> DataLoader[Any]:
        return change(with_batches(loader, size, count, shuffled))

    if hasattr(data, "train_dataloader"):
        with remade_loaders(data, remake):
            yield {"datamodule": data}
        return
    if not isinstance(data, DataLoader):
        if not (isinstance(data, Dataset) or hasattr(data, "__getitem__")):
            raise Refusal(
                "data",
                "be a Dataset, a DataLoader or a LightningDataModule",
                type(data).__name__,
                "Give what the module trains on.",
            )
        data = DataLoader(data)
    yield {"train_dataloaders": remake(data)}


def whole_epochs(loader: DataLoader[Any], size: int, ranks: int = 1) -> DataLoader[Any]:
    """Return a loader like `loader` with batches of `size` examples, in its order, by epochs.

    The last batch of an epoch is left out if it is smaller.

    Args:
        loader: The user's loader.
        size: Examples in a batch, on one rank.
        ranks: Number of ranks, which share an epoch.

    Raises:
        ValueError: If the data set or a loader of another kind makes the batches, or the data set
            is smaller than one batch.

    Examples:
        >>> [len(batch) for batch in whole_epochs(DataLoader(range(10), batch_size=2), 4)]
        [4, 4]
    """
    refuse_own_batches(loader)
    kept: dict[str, Any] = {name: getattr(loader, name) for name in KEPT}
    dataset: Any = loader.dataset
    if not isinstance(dataset, IterableDataset):
        if len(dataset) < size * ranks:
            raise Refusal(
                "batch_sizes",
                f"be at most the number of examples, {len(dataset)}",
                f"{size * ranks} at once",
                "Leave larger batch sizes out.",
            )
        standard = type(loader.batch_sampler) is BatchSampler
        kept["sampler"] = loader.sampler if standard else _Flat(loader.batch_sampler)  # type: ignore[arg-type]  # not None
    return DataLoader(dataset, batch_size=size, drop_last=True, **kept)


def _refuse_made_batches(loader: DataLoader[Any]) -> None:
    if loader.batch_sampler is None:
        raise Refusal(
            "batch_size",
            "be a number in the DataLoader",
            "None: its data set makes the batches",
            "Give a data set of single examples.",
        )


def refuse_own_batches(loader: DataLoader[Any]) -> None:
    """Refuse a loader whose batches cannot be made again at another size.

    A subclass of DataLoader may change each batch while it is gone through. A DataLoader made from
    its parts would not.

    Raises:
        ValueError: If the data set makes the batches, or the class of the loader.
    """
    _refuse_made_batches(loader)
    kind = type(loader)
    if any(getattr(kind, name) is not getattr(DataLoader, name) for name in ITERATES):
        raise Refusal(
            "train_dataloader",
            "be a DataLoader, or a subclass that goes through its batches in the same way",
            f"{kind.__name__}, which may change them",
            "Do that in the data set, in `collate_fn` or in the module.",
        )


def is_stream(loader: DataLoader[Any]) -> bool:
    """Return whether a loader of `held_examples` holds the first examples of a stream."""
    return isinstance(loader.dataset, list)


def held_examples(data: Any, count: int, size: int) -> DataLoader[Any]:
    """Return a loader of `count` fixed examples of `data`, in batches of `size`.

    The examples are spread evenly over the data. If the data are a stream or the loader has a
    sampler of the user's own, they are the first ones. Random augmentation is drawn anew each time.

    Raises:
        ValueError: If `data` is not what `batches_of` takes, makes several loaders, or the data set
            makes the batches, not the loader.

    Examples:
        >>> [batch.tolist() for batch in held_examples(list(range(100)), 4, 2)]
        [[0, 33], [66, 99]]
    """
    if hasattr(data, "train_dataloader"):
        data.prepare_data()
        data.setup("fit")
        data = data.train_dataloader()
        if not isinstance(data, DataLoader):
            raise Refusal(
                "train_dataloader",
                "return one DataLoader for branches",
                type(data).__name__,
                "Give the Dataset instead of the data module.",
            )
    loader = data if isinstance(data, DataLoader) else DataLoader(data)
    _refuse_made_batches(loader)
    kept = {name: getattr(loader, name) for name in ("collate_fn", "pin_memory")}
    dataset: Any = loader.dataset
    if isinstance(dataset, IterableDataset):
        first = list(itertools.islice(iter(dataset), count))
        return DataLoader(first, batch_size=size, **kept)  # type: ignore[arg-type]  # a list will do
    if (indices := indices_of(loader)) is not None:
        chosen = list(itertools.islice(indices, count))
    else:
        most = min(count, len(dataset))
        chosen = [round(k * (len(dataset) - 1) / max(most - 1, 1)) for k in range(most)]
    return DataLoader(Subset(dataset, chosen), batch_size=size, **kept)
