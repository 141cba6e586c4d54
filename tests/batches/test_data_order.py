# SPDX-License-Identifier: Apache-2.0
"""Orders that are known are told by name, of others nothing is said."""

from collections.abc import Iterator
from typing import Any

import pytest
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
)

from noisescale.batches.data_order import warning_of_order

DATA: Any = list(range(12))
SPLIT: Any = Subset(DATA, [3, 1, 2, 0])
SHARE = {"num_replicas": 2, "rank": 0}


class LengthGroupedSampler(RandomSampler):
    """Has the name of that of transformers."""


class BatchSamplerShard(BatchSampler):
    """Is made as that of accelerate is."""

    def __init__(self, batch_sampler: Any) -> None:
        self.batch_sampler = batch_sampler


class OfMyOwn(SequentialSampler):
    """Shuffles, for all that is known."""


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(DATA)


def in_order(**options: Any) -> DataLoader[Any]:
    return DataLoader(DATA, **options)


@pytest.mark.parametrize(
    ("loader", "name"),
    [
        (in_order(batch_size=3), "SequentialSampler"),
        (in_order(sampler=DistributedSampler(DATA, shuffle=False, **SHARE)), "DistributedSampler"),
        (in_order(batch_sampler=BatchSamplerShard(in_order().batch_sampler)), "SequentialSampler"),
        (in_order(sampler=LengthGroupedSampler(DATA)), "`group_by_length`, LengthGroupedSampler"),
        (DataLoader(Subset(DATA, range(3, 9))), "SequentialSampler"),
    ],
)
def test_an_order_that_is_known_is_told_by_name(loader: Any, name: str) -> None:
    found = warning_of_order(loader, "Shuffle.")

    assert found is not None
    assert f"({name})" in found
    assert found.endswith(" Shuffle.")


@pytest.mark.parametrize(
    "loader",
    [
        in_order(shuffle=True),
        in_order(sampler=DistributedSampler(DATA, **SHARE)),
        in_order(batch_sampler=[[0, 1], [2, 3]]),
        in_order(sampler=OfMyOwn(DATA)),
        in_order(batch_size=None),
        DataLoader(Stream(), batch_size=2),
        DataLoader(SPLIT, batch_size=2),
        [[0, 1], [2, 3]],
        None,
    ],
)
def test_of_other_orders_nothing_is_said(loader: Any) -> None:
    assert warning_of_order(loader, "Shuffle.") is None
