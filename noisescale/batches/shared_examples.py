# SPDX-License-Identifier: Apache-2.0
"""Whether ranks train on the same examples, which makes the noise scale read too low.

Ranks are compared because their batches are independent. Where they are not (a sampler that is not
distributed, a stream seeded alike everywhere, batches that overlap), gradients of ranks differ by
dropout alone, or by a part of their noise. So in the first batches every example gets a checksum,
and ranks compare theirs, once.

An example of a small data set is drawn by several ranks by chance. What counts is therefore how
many examples of a rank another rank has in *the same* batch, against the larger of two numbers
that chance makes alike: how many it has in its *other* batches, and how many occur twice in a
rank's own batch. Ranks that go through the same data in orders of their own are independent, and
are not reported.

Not seen: the same examples after random augmentation, and those of a data set of so few distinct
examples that every batch has most of them. (Constant inputs beside data that is drawn elsewhere
look like that, too.)
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from noisescale.guard import Guard

BATCHES = 16
"""How many of a rank's first batches are looked at."""

# Checksums of a batch that are sent, the smallest: ranks with the same examples pick the same.
_SENT = 64

# Numbers of an example that its checksum is made of, evenly spaced, in each of its tensors.
_NUMBERS = 1024

# Windows of accumulation are compared as a whole, too, if there are so many of them.
_FEWEST_WINDOWS = 4

# Batches that are compared with each one by way of control.
_SHIFTS = (1, 2, -1, -2)

_NOT_LOOKED_AT = "Whether ranks share examples was not looked at"

_LEAST_SHARE = 0.02
_STANDARD_ERRORS = 6

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

Checksums = np.ndarray[tuple[int], np.dtype[np.int64]]
"""Of the examples of one batch, in ascending order."""


class SharedExamples:
    """Look at the first batches of all ranks, then say whether ranks share examples.

    Checksums stay on the device of the batch until they are compared: one wait in a fit.

    Args:
        device: Of this rank's process group.
        accumulation: Batches of a rank in one optimizer step.
        warn: Given a warning, the same on all ranks, if there is reason for one.
    """

    def __init__(
        self, device: torch.device, accumulation: int, warn: Callable[[str], None]
    ) -> None:
        self.over = False
        """Whether all is said: `look` need not be called any more."""
        self._warn = warn
        self._device = device
        self._accumulation = accumulation
        self._guard = Guard()
        self._seen: list[Tensor | None] = []

    def look(self, tensors: Sequence[Tensor]) -> None:
        """Take in the next batch of this rank. Every rank calls it for every batch.

        Runs two small collectives at the last of the first `BATCHES` batches, on every rank
        whatever it saw there.

        Args:
            tensors: All of the batch. Those that have as many rows as most make up its examples.
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
        """The largest share of a rank's examples that another rank has, too; 0 if by chance."""
        units = [slice(i, i + 1) for i in range(BATCHES)]
        a = self._accumulation
        if a > 1 and a * _FEWEST_WINDOWS <= BATCHES:
            units += [slice(i, i + a) for i in range(0, BATCHES, a)]
        mine = [np.empty(0, dtype=np.int64)] * len(units)
        with self._guard(_NOT_LOOKED_AT):
            mine = [_smallest(self._seen[unit]) for unit in units]
        sent = torch.zeros(len(mine), 1 + _SENT, dtype=torch.int64)
        for i, some in enumerate(mine):
            sent[i, 0] = len(some)
            sent[i, 1 : 1 + len(some)] = torch.from_numpy(some)
        sent = sent.to(self._device)
        gathered = [torch.empty_like(sent) for _ in range(dist.get_world_size())]
        dist.all_gather(gathered, sent)
        share = 0.0
        with self._guard(_NOT_LOOKED_AT):
            for rank, other in enumerate(gathered):
                if rank != dist.get_rank():
                    theirs = [some[1 : 1 + some[0]] for some in other.cpu().numpy()]
                    for of_kind in (slice(BATCHES), slice(BATCHES, None)):
                        share = max(share, share_in_common(mine[of_kind], theirs[of_kind]))
        largest = torch.tensor(share, device=self._device)
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        return float(largest)


def row_checksums(tensors: Sequence[Tensor]) -> Tensor | None:
    """Return a checksum of every example, on the device; None where there are no examples.

    The checksum of x is Σ_i w_i·x_i modulo 2⁶⁴, x_i the bits of its numbers, w_i odd and random.
    All tensors of an example are summed up: equal labels or masks alone do not make it equal.

    Args:
        tensors: Of one batch, examples in the first dimension.
    """
    tensors = [t.detach() for t in tensors if t.dim() and t.layout == torch.strided]
    counts = Counter(len(t) for t in tensors if len(t))
    if not counts:
        return None
    examples = max(counts, key=lambda count: counts[count])  # of equally many the first
    checksums = torch.zeros(examples, dtype=torch.int64, device=tensors[0].device)
    generator = torch.Generator().manual_seed(0)
    for t in tensors:
        if len(t) != examples or not t.numel():
            continue
        numbers = (torch.view_as_real(t) if t.is_complex() else t).reshape(examples, -1)
        numbers = numbers[:, :: math.ceil(numbers.shape[1] / _NUMBERS)].contiguous()
        bits = numbers.view(_INTEGERS[numbers.element_size()]).to(torch.int64)
        bits = bits ^ (bits >> 32)  # a product keeps no more than the low bits of round numbers
        weights = torch.randint(2**62, (bits.shape[1],), generator=generator) * 2 + 1
        checksums += (bits * weights.to(bits.device)).sum(1).to(checksums.device)
    return checksums


def share_in_common(mine: Sequence[Checksums], theirs: Sequence[Checksums]) -> float:
    """Return the share of my examples that they have in the same batch; 0 if chance can explain it.

    Args:
        mine: Checksums of one rank's batches; none where they are not known.
        theirs: Of another rank's batches, at the same steps.

    Example:
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
    """Say what is wrong, what it does to the noise scale, and what to do."""
    return (
        f"Ranks train on the same examples: {share:.0%} of a rank's examples in the first"
        f" {BATCHES} batches were in another rank's batch of the same step, too. The noise scale"
        " reads too low, because it takes the batches of ranks to be independent. Give each rank"
        " its own examples: by a `DistributedSampler`, which Lightning puts in with"
        " `Trainer(use_distributed_sampler=True)`, or by seeding a stream with the rank."
    )


def _in_common(mine: Checksums, theirs: Checksums) -> int:
    return int(np.isin(mine, theirs).sum())


def _smallest(batches: Sequence[Tensor | None]) -> Checksums:
    """Of the examples of several batches; none where one of the batches is not known."""
    known = [one.cpu().numpy() for one in batches if one is not None]
    if len(known) < len(batches):
        return np.empty(0, dtype=np.int64)
    smallest: Checksums = np.sort(np.concatenate(known))[:_SENT]
    return smallest
