# SPDX-License-Identifier: Apache-2.0
"""Exchange buffers with neighbours, and add the weighted differences from theirs."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from noisescale.methods.across_ranks.peers import Peers
from noisescale.methods.decentlam.topology import Matrix

_AT_ONCE_ON_CPU = 2**20
_UNDER_WAY = 4
"""Elements of a message, and messages under way between two ranks: the fastest that were tried.

On a ring of four ranks messages of 2^18 elements took 1.15 times as long and those of 2^16 1.3
times. Two under way at once took 1.1 times as long as four.
"""


class Neighbours(NamedTuple):
    """Who a rank hears and who hears it."""

    heard: list[tuple[int, float]]
    """Ranks, with their shares w_ij."""
    told: list[int]


def neighbours_of(matrix: Matrix, rank: int) -> Neighbours:
    """Return the neighbours of a rank."""
    others = [other for other in range(len(matrix)) if other != rank]
    return Neighbours(
        [(other, float(matrix[rank, other])) for other in others if matrix[rank, other] > 0],
        [other for other in others if matrix[other, rank] > 0],
    )


class Rooms:
    """Room for what is received, kept from step to step."""

    def __init__(self) -> None:
        self._rooms: list[Tensor] = []

    def buffers(self, own: Tensor, size: int, ranks: int) -> list[list[Tensor]]:
        """Return sets of buffers of `size` for `ranks` ranks, one for each message under way."""
        sets = min(-(-len(own) // size), _UNDER_WAY)
        while len(self._rooms) < sets * ranks:
            self._rooms.append(own.new_empty(min(size, len(own))))
        return [self._rooms[i * ranks : (i + 1) * ranks] for i in range(sets)]


def add_differences_(
    into: Tensor, own: Tensor, neighbours: Neighbours, peers: Peers, rooms: Rooms
) -> None:
    """Add Σ w_ij·(own - rank j's) over the neighbours, of flat buffers of one length.

    As a row of W sums to 1, that is own - (W·own of all ranks). Differences of close numbers are
    exact, so that ranks which agree stay as they are.
    """
    heard, told = neighbours
    size = _AT_ONCE_ON_CPU if own.is_cpu else max(len(own), 1)
    sets = rooms.buffers(own, size, len(heard))
    under_way: deque[tuple[slice, list[Tensor], list[dist.Work]]] = deque()

    def add_next() -> None:
        some, received, works = under_way.popleft()
        for work in works:
            work.wait()
        _add(into[some], own[some], received, [share for _, share in heard])

    for index, start in enumerate(range(0, len(own), size)):
        if len(under_way) == len(sets):
            add_next()
        some = slice(start, min(start + size, len(own)))
        received = [room[: some.stop - start] for room in sets[index % len(sets)]]
        sent = [(own[some], peer) for peer in told]
        from_peers = zip(received, (peer for peer, _ in heard), strict=True)
        under_way.append((some, received, peers.start(sent, list(from_peers))))
    while under_way:
        add_next()


def _add(into: Tensor, own: Tensor, theirs: list[Tensor], shares: list[float]) -> None:
    if len(shares) == 2 and shares[0] == shares[1] and own.element_size() > 2:
        # A pass less. Twice a number is exact, and 16 bits would round the sum too much.
        both = theirs[0].add_(theirs[1]).sub_(own, alpha=2)
        into.sub_(both, alpha=shares[0])
        return
    for each, share in zip(theirs, shares, strict=True):
        into.add_(torch.sub(own, each, out=each), alpha=share)
