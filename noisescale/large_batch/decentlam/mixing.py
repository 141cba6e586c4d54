# SPDX-License-Identifier: Apache-2.0
"""Exchange buffers with neighbours, and add the weighted differences from theirs."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from noisescale.large_batch.across_ranks.peers import Peers
from noisescale.large_batch.decentlam.topology import Matrix

_AT_ONCE_ON_CPU = 2**18
"""Elements of a message: what is received is still in a cache of the CPU when it is added."""
_UNDER_WAY = 8
"""Messages that are under way to and from each neighbour at once."""


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


def add_differences_(into: Tensor, own: Tensor, neighbours: Neighbours, peers: Peers) -> None:
    """Add Σ w_ij·(own - rank j's) over the neighbours, of flat buffers of one length.

    As a row of W sums to 1, that is own - (W·own of all ranks). Differences of close numbers are
    exact, so that ranks which agree stay as they are.
    """
    heard, told = neighbours
    size = _AT_ONCE_ON_CPU if own.is_cpu else max(len(own), 1)
    starts = range(0, len(own), size)
    under_way: deque[tuple[slice, list[Tensor], list[dist.Work]]] = deque()
    rooms = [
        [own.new_empty(min(size, len(own))) for _ in heard]
        for _ in range(min(len(starts), _UNDER_WAY))
    ]

    def add_next() -> None:
        some, received, works = under_way.popleft()
        for work in works:
            work.wait()
        for theirs, (_, share) in zip(received, heard, strict=True):
            into[some].add_(torch.sub(own[some], theirs, out=theirs), alpha=share)

    for index, start in enumerate(starts):
        if len(under_way) == len(rooms):
            add_next()
        some = slice(start, min(start + size, len(own)))
        received = [room[: some.stop - start] for room in rooms[index % len(rooms)]]
        sent = [(own[some], peer) for peer in told]
        peers_heard = [peer for peer, _ in heard]
        works = peers.start(sent, list(zip(received, peers_heard, strict=True)))
        under_way.append((some, received, works))
    while under_way:
        add_next()
