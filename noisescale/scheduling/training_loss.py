# SPDX-License-Identifier: Apache-2.0
"""The slope of a run's training loss: how fast it falls with the examples seen."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import Tensor

from noisescale.collectives import device_for, world_size
from noisescale.collectors.squared_norms import wide_dtype
from noisescale.meter.cross_entropy import is_cross_entropy
from noisescale.state import State
from noisescale.tradeoff.budget import Slice, slice_of, slope_of


class _Sums:
    """Sums of a slice on this rank; the loss stays on its device."""

    def __init__(self, device: torch.device) -> None:
        self.loss = torch.zeros((), dtype=wide_dtype(device), device=device)
        self.examples = self.share = 0.0


class TrainingLoss(State):
    """Sum up the training loss in slices of a run, on the device, and tell its slope.

    Each slice has a fifth in the logarithm of the share of the run that is over. The host waits
    only where finished slices are read, which is where the policy is asked, and at checkpoints.
    Of several processes what the slice under way has is not saved: its mean is then over the
    steps after the checkpoint.

    Examples:
        >>> losses = TrainingLoss()
        >>> for step in range(200):
        ...     losses.add(torch.tensor((step + 1) ** -0.1), 32, share=(step + 0.5) / 400)
        >>> losses.read(share=0.5)
        >>> round(losses.slope, 2)
        0.1
    """

    _saved = ("_slices", "_under_way", "has_a_floor")

    def __init__(self) -> None:
        self.has_a_floor = False
        """Whether some loss was no cross-entropy alone, so that there is no slope."""
        self._slices: tuple[tuple[float, ...], ...] = ()
        self._sums: dict[int, _Sums] = {}

    @torch.no_grad()
    def add(self, loss: Tensor, examples: float, share: float) -> None:
        """Add a micro-batch.

        Args:
            loss: Its mean loss, a scalar, with its graph if it has one.
            examples: How much it weighs.
            share: The share of the run that is over.
        """
        number = slice_of(share)
        if number < 0:
            return
        assert isinstance(number, int)
        sums = self._sums.get(number)
        if sums is None:
            sums = self._sums[number] = _Sums(loss.device)
            self.has_a_floor |= not is_cross_entropy(loss)
        sums.loss = sums.loss.to(loss.device, wide_dtype(loss.device))  # a checkpoint's: CPU
        sums.loss.add_(loss.detach(), alpha=examples)
        sums.examples += examples
        sums.share += share * examples

    def read(self, share: float) -> None:
        """Read the slices that are finished at a share of the run. All ranks have to call it."""
        begun = int(self._slices[-1][0]) + 1 if self._slices else 0
        finished = range(begun, int(max(slice_of(share), 0)))  # the same on all ranks
        if not finished:
            return
        device = next((one.loss.device for one in self._sums.values()), torch.device("cpu"))
        sums = [self._sums.pop(number, _Sums(device)) for number in finished]
        numbers = [[one.examples, one.share, float(self.has_a_floor)] for one in sums]
        beside = torch.tensor(numbers, dtype=sums[0].loss.dtype, device=device)
        packed = torch.cat([torch.stack([one.loss.to(device) for one in sums])[:, None], beside], 1)
        if world_size() > 1:
            packed = packed.to(device_for(None, device))
            dist.all_reduce(packed)
        for number, (loss, examples, over, floors) in zip(finished, packed.tolist(), strict=True):
            self.has_a_floor |= floors > 0
            if examples:
                self._slices = (*self._slices, (number, over / examples, loss / examples))

    @property
    def _under_way(self) -> tuple[tuple[float, ...], ...]:
        """What is not read yet, of one process; a state is equal on all ranks."""
        sums = {} if world_size() > 1 else self._sums
        return tuple((k, float(one.loss), one.examples, one.share) for k, one in sums.items())

    @_under_way.setter
    def _under_way(self, saved: tuple[tuple[float, ...], ...]) -> None:
        self._sums = {}
        for number, loss, examples, share in saved if world_size() == 1 else ():
            sums = self._sums[int(number)] = _Sums(torch.device("cpu"))
            sums.loss += loss
            sums.examples, sums.share = examples, share

    @property
    def slices(self) -> list[Slice]:
        """What was read so far."""
        return [Slice(int(number), share, loss) for number, share, loss in self._slices]

    @property
    def slope(self) -> float:
        """-d ln L/d ln E; NaN while it is not known, or if a loss is no cross-entropy alone."""
        return math.nan if self.has_a_floor else slope_of(self.slices)
