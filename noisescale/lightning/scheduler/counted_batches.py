# SPDX-License-Identifier: Apache-2.0
"""The examples of the batches that came, over all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from noisescale.scheduling.agreement import Reduction


class CountedExamples(NamedTuple):
    """What came, on all ranks."""

    size: float
    """Mean examples of a usual batch on one device."""
    more: float
    """How many more examples there were than the plan's steps have."""


class CountedBatches:
    """Count the examples that come, and add them up over ranks now and then, in the background.

    The last batch of an epoch may be a short one. It counts as examples, and not for the size of a
    usual batch.

    Args:
        ranks: The number of ranks.
        device: A device to add up on, if the process group's backend reduces there.
        planned: Examples of all ranks so far, by the plans.
        saved: A `state` to go on from, the same on all ranks.
    """

    def __init__(
        self, ranks: int, device: torch.device, planned: float, saved: Sequence[float] = ()
    ) -> None:
        self._ranks, self._device = ranks, device
        self._usual, self._batches = [*saved] or [0.0, 0.0]
        """The examples of this rank in usual batches, and the number of these batches."""
        self._since, self._planned = 0.0, planned
        self._on_its_way: tuple[Reduction, float] | None = None

    @property
    def state(self) -> list[float]:
        """What goes on in a resumed run, on all ranks as on this one."""
        return [self._usual, self._batches]

    def add(self, examples: float, *, ends_epoch: bool) -> None:
        """Count a batch of this rank."""
        self._since += examples
        if not ends_epoch:
            self._usual += examples
            self._batches += 1

    def begin_again(self) -> None:
        """Forget the size of a usual batch, as the loader makes batches of another size."""
        self._usual = self._batches = 0.0
        self._on_its_way = None

    def add_up(self, planned: float) -> None:
        """Begin to add up over ranks. All ranks must call it, at the end of the same step.

        Args:
            planned: Examples of all ranks so far, by the plans.
        """
        if self._ranks > 1 and self._on_its_way is None:
            numbers = (self._since, self._usual, self._batches)
            reduction = Reduction(numbers, self._device, dist.ReduceOp.SUM)
            self._on_its_way = reduction, planned - self._planned
            self._since, self._planned = 0.0, planned

    def read(self) -> CountedExamples | None:
        """Return what has come; None if nothing was added up since the last call.

        It may wait for the ranks and the device. One process knows its batches at once.
        """
        usual, batches, more = self._usual, self._batches, 0.0
        if self._ranks > 1:
            if self._on_its_way is None:
                return None
            (reduction, planned), self._on_its_way = self._on_its_way, None
            since, usual, batches = reduction.read()
            more = since - planned
            self._planned += more  # what follows is planned from there
        return CountedExamples(usual / batches, more) if usual else None
