# SPDX-License-Identifier: Apache-2.0
"""The examples of the batches that came, over all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from noisescale.scheduling.agreement import Reduction


class Counted(NamedTuple):
    """What has come, on all ranks."""

    examples: float = 0.0
    """Examples."""
    usual: float = 0.0
    """Examples in batches that do not end an epoch."""
    batches: float = 0.0
    """The number of these batches."""

    def size(self) -> float | None:
        """Return the mean examples of a usual batch on one device; None before the first."""
        return self.usual / self.batches if self.batches and self.usual else None


class CountedBatches:
    """Count the examples that come, and add them up over ranks now and then, in the background.

    The last batch of an epoch may be a short one. It counts as examples, and not for the size of a
    usual batch.

    Args:
        ranks: The number of ranks.
        device: A device to add up on, if the process group's backend reduces there.
        saved: A `state` to go on from.
    """

    def __init__(self, ranks: int, device: torch.device, saved: Sequence[float] = ()) -> None:
        self._ranks, self._device = ranks, device
        self._own = Counted(*(number / ranks for number in saved))
        self._counted = Counted(*saved)
        self._on_its_way: tuple[Reduction, float] | None = None

    @property
    def state(self) -> list[float]:
        """What goes on in a resumed run: what was last added up, the same on all ranks."""
        return [*(self._own if self._ranks == 1 else self._counted)]

    def add(self, examples: float, *, ends_epoch: bool) -> None:
        """Count a batch of this rank."""
        own, usual = self._own, not ends_epoch
        self._own = Counted(
            own.examples + examples, own.usual + usual * examples, own.batches + usual
        )

    def begin_again(self) -> None:
        """Forget the size of a usual batch, as the loader makes batches of another size."""
        self._own = self._own._replace(usual=0.0, batches=0.0)
        self._counted = self._counted._replace(usual=0.0, batches=0.0)
        self._on_its_way = None

    def add_up(self, at: float) -> None:
        """Begin to add up over ranks. All ranks must call it, at the same step.

        Args:
            at: The examples of all ranks by another count, to go on from.
        """
        if self._ranks > 1 and self._on_its_way is None:
            reduction = Reduction(self._own, self._device, dist.ReduceOp.SUM)
            self._on_its_way = reduction, at

    def read(self, now: float) -> Counted | None:
        """Return what has come up to now; None if nothing was added up since the last call.

        Args:
            now: The examples of all ranks by the count of `add_up`.
        """
        if self._ranks == 1:
            return self._own
        if self._on_its_way is None:
            return None
        (reduction, at), self._on_its_way = self._on_its_way, None
        self._counted = Counted(*reduction.read())
        return self._counted._replace(examples=self._counted.examples + now - at)
