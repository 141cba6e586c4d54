# SPDX-License-Identifier: Apache-2.0
"""Whether ranks train on the same examples. If they do, the noise scale reads too low.

The noise scale compares the gradients of ranks, and assumes that the ranks' batches are
independent. They are not if a sampler is not distributed, if all ranks seed a stream with the same
number, or if batches overlap. Then the gradients of ranks differ only by dropout, or by a part of
their noise. So in the first batches each example gets a checksum, and the ranks compare their
checksums, once.

In a small data set several ranks draw the same example by chance. So the number of a rank's
examples that another rank has in *the same* batch is compared with the larger of two numbers. Both
measure chance: the number that the other rank has in its *other* batches, and the number of
examples that occur twice in one batch of the rank. Ranks that read the same data, each in its own
order, are independent and not reported.

Two cases are not detected: the same examples after random augmentation, and data sets with so few
distinct examples that each batch holds most of them. (Constant inputs look the same as such a data
set, if the data that varies is drawn elsewhere.)
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from functools import lru_cache

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from noisescale.batches.to_device import to_device
from noisescale.guard import Guard

BATCHES = 16
"""The number of first batches of each rank that are compared."""

# Checksums of a batch that are sent, the smallest: ranks with the same examples pick the same.
_SENT = 64

# Numbers of an example that its checksum is made of, evenly spaced, in each of its tensors.
_NUMBERS = 1024

# Windows of accumulation are compared as a whole, too, if there are so many of them.
_FEWEST_WINDOWS = 4

# Batches that are compared with each one by way of control.
_SHIFTS = (1, 2, -1, -2)

_NOT_LOOKED_AT = "It was not checked whether ranks train on the same examples"

_LEAST_SHARE = 0.02
_STANDARD_ERRORS = 6

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

Checksums = np.ndarray[tuple[int], np.dtype[np.int64]]
"""The checksums of the examples of one batch, in ascending order."""


class SharedExamples:
    """Compare the first batches of all ranks, and warn if ranks share examples.

    The checksums stay on the device of the batch until they are compared. The host waits for the
    device twice in a fit: for the checksums of all ranks, and for what all ranks found.

    Args:
        device: The device of this rank's process group.
        accumulation: Batches of a rank in one optimizer step.
        warn: A function that receives the warning, if there is one. The warning is the same on all
            ranks.
    """

    def __init__(
        self, device: torch.device, accumulation: int, warn: Callable[[str], None]
    ) -> None:
        self.over = False
        """Whether the comparison is over: `look` need not be called any more."""
        self._warn = warn
        self._device = device
        self._accumulation = accumulation
        self._guard = Guard()
        self._seen: list[Tensor | None] = []

    def look(self, tensors: Sequence[Tensor]) -> None:
        """Add the next batch of this rank. Every rank calls this for every batch.

        At the last of the first `BATCHES` batches every rank runs two small collectives, whatever
        its batches were.

        Args:
            tensors: All tensors of the batch. The most frequent first dimension is taken as the
                number of examples, and the tensors that have it as the examples.
        """
        if self.over:
            return
        try:
            checksums = row_checksums(tensors)
        except Exception:  # of an odd kind of tensor: no reason for training to end
            checksums = None
        self._seen.append(checksums)
        if len(self._seen) < BATCHES:
            return
        self.over = True
        with self._guard(_NOT_LOOKED_AT):
            if share := self._largest_share():
                self._warn(warning(share))
        self._seen = []

    def _largest_share(self) -> float:
        """Return the largest share of a rank's examples that another rank has; 0 if by chance."""
        units = [slice(i, i + 1) for i in range(BATCHES)]
        a = self._accumulation
        if a > 1 and a * _FEWEST_WINDOWS <= BATCHES:
            units += [slice(i, i + a) for i in range(0, BATCHES, a)]
        sent = torch.zeros(len(units), 1 + _SENT, dtype=torch.int64, device=self._device)
        with self._guard(_NOT_LOOKED_AT):
            for row, unit in zip(sent, units, strict=True):
                some = _smallest(self._seen[unit])
                row[:1].fill_(len(some))
                row[1 : 1 + len(some)] = some
        gathered = [torch.empty_like(sent) for _ in range(dist.get_world_size())]
        dist.all_gather(gathered, sent)
        share = 0.0
        with self._guard(_NOT_LOOKED_AT):
            of_ranks = [
                [some[1 : 1 + some[0]] for some in one]
                for one in torch.stack(gathered).cpu().numpy()
            ]
            mine = of_ranks.pop(dist.get_rank())
            for theirs in of_ranks:
                for of_kind in (slice(BATCHES), slice(BATCHES, None)):
                    share = max(share, share_in_common(mine[of_kind], theirs[of_kind]))
        largest = torch.full((), share, device=self._device)
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        return float(largest)


def row_checksums(tensors: Sequence[Tensor]) -> Tensor | None:
    """Return a checksum of each example, on the device; None if there are no examples.

    The checksum of x is Σ_i w_i·x_i modulo 2⁶⁴. x_i are the bits of the numbers in x; w_i are odd
    and random. The sum is over all tensors of an example, so examples with equal labels or masks
    still have different checksums.

    Args:
        tensors: The tensors of one batch, with examples in the first dimension.
    """
    tensors = [t.detach() for t in tensors if t.dim() and t.layout == torch.strided]
    counts = Counter(len(t) for t in tensors if len(t))
    if not counts:
        return None
    examples = max(counts, key=lambda count: counts[count])  # of equally many the first
    tensors = [t for t in tensors if len(t) == examples and t.numel()]
    if not tensors:
        return None
    of_tensors = [_bits(t) for t in tensors]
    device = next((bits.device for bits in of_tensors if not bits.is_cpu), tensors[0].device)
    checksums = torch.zeros(examples, dtype=torch.int64, device=device)
    columns = tuple(bits.shape[1] for bits in of_tensors)
    for bits, weights in zip(of_tensors, _weights(columns, device), strict=True):
        checksums += (to_device(bits, device) * weights).sum(1)
    return checksums


def _bits(t: Tensor) -> Tensor:
    """Return the bits of some numbers of each example."""
    numbers = (torch.view_as_real(t) if t.is_complex() else t).reshape(len(t), -1)
    numbers = numbers[:, :: math.ceil(numbers.shape[1] / _NUMBERS)].contiguous()
    bits = numbers.view(_INTEGERS[numbers.element_size()]).to(torch.int64)
    return bits ^ (bits >> 32)  # a product keeps no more than the low bits of round numbers


@lru_cache(maxsize=1)  # most batches have the shapes of the one before
def _weights(columns: tuple[int, ...], device: torch.device) -> tuple[Tensor, ...]:
    """Return the odd weights of the numbers in each tensor, in one copy to the device."""
    generator = torch.Generator().manual_seed(0)
    drawn = [torch.randint(2**62, (count,), generator=generator, device="cpu") for count in columns]
    odd = to_device(torch.cat(drawn) * 2 + 1, device)
    weights: tuple[Tensor, ...] = odd.split(columns)
    return weights


def share_in_common(mine: Sequence[Checksums], theirs: Sequence[Checksums]) -> float:
    """Return the share of one rank's examples that another rank has in the same batch.

    It is 0 if chance can explain the common examples.

    Args:
        mine: Checksums of one rank's batches; empty for a batch that is not known.
        theirs: Checksums of another rank's batches, at the same steps.

    Examples:
        >>> batches = [np.arange(i, i + 8) for i in range(0, 128, 8)]
        >>> others = [np.concatenate([some[:4], some[4:] + 1000]) for some in batches]
        >>> share_in_common(batches, others)
        0.5
        >>> share_in_common(batches, batches[8:] + batches[:8])
        0.0
    """
    pairs = [(a, b) for a, b in zip(mine, theirs, strict=True) if len(a) and len(b)]
    if len(pairs) < 2:
        return 0.0
    mine, theirs = zip(*pairs, strict=True)
    count = len(pairs)
    together = sum(_in_common(a, b) for a, b in pairs)
    elsewhere = [
        _in_common(mine[i], theirs[(i + shift) % count])
        for i in range(count)
        for shift in _SHIFTS
        if shift % count
    ]
    twice = [len(a) - sum(np.unique(a, return_counts=True)[1] == 1) for a in mine]
    by_chance = count * max(float(np.mean(elsewhere)), float(np.mean(twice)))
    spread = math.sqrt(count) * max(float(np.std(elsewhere)), float(np.std(twice)))
    examples = sum(len(a) for a in mine)
    enough = max(_LEAST_SHARE * examples, _STANDARD_ERRORS * max(spread, 1.0))
    return together / examples if together - by_chance > enough else 0.0


def warning(share: float) -> str:
    """Return the warning: what is wrong, what it does to the noise scale, and what to do."""
    return (
        f"Ranks train on the same examples: in the first {BATCHES} batches, {share:.0%} of a"
        " rank's examples were also in another rank's batch of the same step. The noise scale"
        " reads too low, because its formula assumes that the batches of ranks are independent."
        " Give each rank its own examples. Use a `DistributedSampler` (Lightning adds one with"
        " `Trainer(use_distributed_sampler=True)`), or seed each rank's stream with the rank."
    )


def _in_common(mine: Checksums, theirs: Checksums) -> int:
    return int(np.isin(mine, theirs).sum())


def _smallest(batches: Sequence[Tensor | None]) -> Tensor:
    """Return the smallest checksums of several batches; none if one batch is not known."""
    known = [one for one in batches if one is not None]
    if len(known) < len(batches):
        return torch.empty(0, dtype=torch.int64)
    return torch.cat(known).sort().values[:_SENT]
