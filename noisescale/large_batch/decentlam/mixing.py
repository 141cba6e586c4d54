# SPDX-License-Identifier: Apache-2.0
"""Exchange buffers with neighbours, and add the weighted differences from theirs."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from noisescale.large_batch.across_ranks.peers import Peers
from noisescale.large_batch.decentlam.topology import Matrix

_AT_ONCE_ON_CPU = 2**18
"""Elements of a message: what is received is still in a cache of the CPU when it is added."""


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
    parts = range(0, len(own), size)
    rooms = [[own.new_empty(min(size, len(own))) for _ in heard] for _ in range(min(len(parts), 2))]
    under_way = None
    for index, start in enumerate([*parts, None]):
        before, under_way = under_way, None
        if start is not None:
            part = own[start : start + size]
            received = [room[: len(part)] for room in rooms[index % 2]]
            pairs = zip(received, (peer for peer, _ in heard), strict=True)
            works = peers.start([(part, peer) for peer in told], list(pairs))
            under_way = part, into[start : start + size], received, works
        if before is not None:
            part, sums, received, works = before
            for work in works:
                work.wait()
            for theirs, (_, share) in zip(received, heard, strict=True):
                sums.add_(torch.sub(part, theirs, out=theirs), alpha=share)
