# SPDX-License-Identifier: Apache-2.0
"""Orders in which a loader takes data without shuffling them: neighbours may be alike."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    IterableDataset,
    SequentialSampler,
    Subset,
)

_BY_LENGTH = ("LengthGroupedSampler", "DistributedLengthGroupedSampler")
"""Samplers of transformers, which is not imported for their names."""

_SHARDS = ("BatchSamplerShard", "SkipBatchSampler")
"""Batch samplers of accelerate that take some of another's batches, in its order."""


def warning_of_order(loader: Any, remedy: str) -> str | None:
    """Return what to say of the order in which a loader takes its data, if anything.

    Every way of measuring takes the rows that it compares for independent draws. Rows of one length
    or of one class are not: sorted data read 2.3 where the noise scale was 36. Data whose order is
    random already are no worse for it, so this is a caution.

    Args:
        loader: The loader that training goes through. It may be no DataLoader.
        remedy: How to shuffle with the trainer that has the loader.

    Returns:
        One warning; None if the data are shuffled, or their order is not known, as that of streams
        and of samplers and batch samplers of the user's.

    Examples:
        >>> from torch.utils.data import DataLoader
        >>> print(warning_of_order(DataLoader(range(9), batch_size=3), "Pass `shuffle=True`."))
        The train loader takes the data in their order (SequentialSampler). If neighbours in the
        data are alike, the noise scale is wrong, and mostly too low: it compares rows, or batches,
        as independent draws. Pass `shuffle=True`.
        >>> warning_of_order(DataLoader(range(9), batch_size=3, shuffle=True), "") is None
        True
    """
    sampler = _sampler_of(loader)
    name, dataset = type(sampler).__name__, getattr(loader, "dataset", None)
    if name in _BY_LENGTH:
        how = f"takes rows of like length together (`group_by_length`, {name}). If these"
        alike = "rows are alike in more than their length"
    elif _is_in_order(sampler) and not _was_shuffled(dataset):
        how = f"takes the data in their order ({name}). If neighbours"
        alike = "in the data are alike"
    else:
        return None
    return (
        f"The train loader {how} {alike}, the noise scale is wrong, and mostly too low: it compares"
        f" rows, or batches, as independent draws. {remedy}"
    )


def _sampler_of(loader: Any) -> Any:
    """Return what chooses the rows of a loader's batches, one by one; None if it is not known."""
    if isinstance(getattr(loader, "dataset", None), IterableDataset):
        return None
    # With a batch sampler of the user's a DataLoader has a SequentialSampler that nobody asks.
    batches = getattr(loader, "batch_sampler", None)
    while type(batches).__name__ in _SHARDS:
        batches = getattr(batches, "batch_sampler", None)
    return batches.sampler if type(batches) is BatchSampler else None


def _is_in_order(sampler: Any) -> bool:
    if type(sampler) is DistributedSampler:
        return not sampler.shuffle
    return type(sampler) is SequentialSampler


def _was_shuffled(dataset: Any) -> bool:
    """Return whether a data set is a selection of another's rows in an order of its own.

    As `random_split` makes it, and `shuffle` of a data set of Hugging Face.
    """
    if isinstance(dataset, Subset):
        return any(later < one for one, later in pairwise(dataset.indices))
    return getattr(dataset, "_indices", None) is not None
