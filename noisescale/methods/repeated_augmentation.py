# SPDX-License-Identifier: Apache-2.0
"""Batches that hold each example several times, for several augmentations of it."""

from __future__ import annotations

from collections.abc import Iterator, Sized
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import BatchSampler, DistributedSampler

from noisescale.batches.batch_size import examples_in
from noisescale.checks import is_whole, refuse, require_count
from noisescale.refusal import TypeRefusal


class RepeatedAugmentationSampler(DistributedSampler[Any]):
    """Draw each example `repeats` times in a row, in one batch of one rank.

    A data set that augments at random then gives each batch several augmentations of one example
    (batch augmentation). The gradients of such copies are correlated, so the noise of a batch of
    rows is not that of independent rows. With n distinct examples in a batch, G the true gradient
    and h an example's gradient averaged over its copies,

        E|g|² = |G|² + tr(Cov h)/n

    so the *distinct example* is the unit of batch sizes and of the noise scale. That holds as long
    as all copies of an example are in one part of the step, one rank's or one micro-batch's. Where
    copies are spread over ranks, the parts share examples, and the noise scale reads too low.

    Pass it as `sampler=` to a DataLoader whose `batch_size` is a multiple of `repeats`, or its
    `batches(...)` as `batch_sampler=`, which checks that. It works in one process and in several:
    ranks have different examples, like those of a `DistributedSampler`, which it is one of. So
    Lightning leaves it as it is, and sets its epoch. `NoiseScaleMonitor` then counts distinct
    examples by itself. For `NoiseScaleMeter` and other loaders there is `distinct_in`.

    Where halves of a batch are compared, they have whole examples, and the noise between examples
    and between copies of one are told apart: see `Levels`. In a loop of one's own pass `groups_in`.

    An epoch has all examples, and `repeats` times as many rows.

    Args:
        dataset: The data set, with a length.
        repeats: Copies of an example, 1 or more.
        shuffle: Draw examples in a new random order in each epoch.
        seed: Of the order, equal on all ranks.
        drop_last: Leave out examples so that ranks have equally many. Otherwise the first of the
            order are used again to fill up.
        num_replicas: Ranks. Default: those of torch.distributed, asked for when an epoch begins.
        rank: This rank. Default: the same.

    Raises:
        ValueError: If `repeats` is not a positive whole number, `rank` is not one of the ranks, or
            only one of both is given.
        TypeError: If `dataset` has no length.

    Examples:
        >>> sampler = RepeatedAugmentationSampler(range(4), repeats=2, shuffle=False)
        >>> list(sampler), len(sampler)
        ([0, 0, 1, 1, 2, 2, 3, 3], 8)
        >>> list(sampler.batches(4))
        [[0, 0, 1, 1], [2, 2, 3, 3]]

    References:
        Hoffer et al. 2019, arXiv:1901.09335.
    """

    def __init__(
        self,
        dataset: Sized,
        repeats: int,
        *,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        num_replicas: int | None = None,
        rank: int | None = None,
    ) -> None:
        self.repeats = require_count("repeats", repeats, "Pass 1 for no copies.")
        if not hasattr(dataset, "__len__"):
            got, remedy = type(dataset).__name__, "Repeat the examples of a stream in the stream."
            refuse("dataset", "have a length", got, remedy, error=TypeRefusal)
        if (num_replicas is None) != (rank is None):
            got = f"num_replicas={num_replicas!r}, rank={rank!r}"
            refuse(
                "rank", "be given with `num_replicas`", got, "Leave both out for those of torch."
            )
        if num_replicas is not None:
            require_count("num_replicas", num_replicas, "Leave it out for the ranks of torch.")
            if rank is None or not (is_whole(rank) and 0 <= rank < num_replicas):
                needed = f"lie between 0 and {num_replicas - 1}"
                refuse("rank", needed, repr(rank), "Leave it out for torch's.")
        self._given = None if num_replicas is None or rank is None else (num_replicas, rank)
        super().__init__(
            dataset,  # type: ignore[arg-type]  # only its length is asked for
            num_replicas=1 if num_replicas is None else num_replicas,
            rank=0 if rank is None else rank,
            shuffle=shuffle,
            seed=seed,
            drop_last=drop_last,
        )

    def __iter__(self) -> Iterator[int]:
        """Yield the rows of this rank in this epoch: each index `repeats` times in a row."""
        count = self._take_place()
        order = list(range(self._length))
        if self.shuffle:
            generator = torch.Generator().manual_seed(self.seed + self.epoch)
            order = torch.randperm(self._length, generator=generator).tolist()
        for i in range(self.rank, count * self.num_replicas, self.num_replicas):
            for _ in range(self.repeats):
                yield order[i % self._length]

    def __len__(self) -> int:
        """Return the number of this rank's rows in an epoch, copies included."""
        return self._take_place() * self.repeats

    def batches(self, batch_size: int, drop_last: bool = False) -> BatchSampler:
        """Return a batch sampler, for the `batch_sampler` of a DataLoader.

        Args:
            batch_size: This rank's rows in a batch, copies included.
            drop_last: Leave out an epoch's last batch if it is smaller.

        Raises:
            ValueError: If copies of an example would be in two batches.
        """
        return _Batches(self, batch_size, drop_last)

    def distinct_in(self, batch: Any) -> int:
        """Return the number of distinct examples in a batch: its rows over `repeats`.

        Pass this method as the `batch_size_fn` of a `NoiseScaleMonitor`, or call it for the
        `local_batch_size` of a `NoiseScaleMeter`.

        Raises:
            ValueError: If the rows are no multiple of `repeats`, or cannot be counted.
        """
        rows = examples_in(batch).examples
        if rows is None or rows % self.repeats:
            refuse(
                "batch_size",
                f"be a multiple of `repeats`, {self.repeats}",
                f"a batch of {'unknown size' if rows is None else f'{rows} rows'}",
                "Give the DataLoader another `batch_size`, or a `batch_size_fn` to the monitor.",
            )
        return rows // self.repeats

    def groups_in(self, batch: Any) -> torch.Tensor:
        """Return the example of each row of a batch: the `row_groups` of a `NoiseScaleMeter`.

        `NoiseScaleMonitor` calls it by itself, so that halves of a batch have whole examples.

        Raises:
            ValueError: As of `distinct_in`.
        """
        rows = self.distinct_in(batch) * self.repeats
        return torch.arange(rows, device="cpu") // self.repeats

    @property
    def _length(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]  # checked when it was made

    def _take_place(self) -> int:
        """Set this rank's place among the ranks; return its distinct examples in an epoch."""
        if self._given is None and dist.is_available() and dist.is_initialized():
            self.num_replicas, self.rank = dist.get_world_size(), dist.get_rank()
        each, left = divmod(self._length, self.num_replicas)
        self.num_samples = each if self.drop_last else each + bool(left)
        self.total_size = self.num_samples * self.num_replicas
        return self.num_samples


class _Batches(BatchSampler):
    """Batches of whole examples. Lightning builds it anew under several ranks: that is refused."""

    def __init__(self, sampler: Any, batch_size: int, drop_last: bool = False) -> None:
        if not isinstance(sampler, RepeatedAugmentationSampler):
            remedy = (
                "Under Lightning, pass `sampler=` to the DataLoader instead of `batch_sampler=`, or"
                " `Trainer(use_distributed_sampler=False)`: else Lightning replaces the sampler of"
                " this batch sampler on several ranks."
            )
            needed = "be a `RepeatedAugmentationSampler`"
            refuse("sampler", needed, type(sampler).__name__, remedy)
        repeats = sampler.repeats
        require_count("batch_size", batch_size, "Pass the rows of a batch.")
        if batch_size % repeats:
            more = batch_size + repeats - batch_size % repeats
            why = "Otherwise copies of an example are in two batches."
            needed = f"be a multiple of `repeats`, {repeats}"
            refuse("batch_size", needed, repr(batch_size), f"Pass {more}. {why}")
        super().__init__(sampler, batch_size, drop_last)
