# SPDX-License-Identifier: Apache-2.0
"""Exchange buffers with neighbours, and add the weighted differences from theirs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import cycle
from typing import NamedTuple

import torch
from torch import Tensor

from noisescale.methods.across_ranks.peers import Message, Peers
from noisescale.methods.decentlam.topology import Matrix

_MESSAGE_ON_CPU = 2**22
_UNDER_WAY = 2
"""Elements of a message, and messages under way between two ranks.

On a ring of four ranks, messages of 2^20 elements with four under way took 1.2 times the CPU time.
"""

_BLOCK_ON_CPU = 2**18
"""Elements that are added at once, so that a cache has them."""


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
        sets = max(min(-(-len(own) // size), _UNDER_WAY), 1)
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
    shares = [share for _, share in neighbours.heard]
    parts = into.split(_elements_of_a_message(own))
    arrived = exchange(own, neighbours, peers, rooms)
    for part, (of_own, theirs) in zip(parts, arrived, strict=True):
        block = _BLOCK_ON_CPU if own.is_cpu else max(len(part), 1)
        for changed, *others in zip(
            *(each.split(block) for each in (part, of_own, *theirs)), strict=True
        ):
            _add(changed, others[0], others[1:], shares)


def exchange(
    own: Tensor, neighbours: Neighbours, peers: Peers, rooms: Rooms
) -> Iterator[tuple[Tensor, list[Tensor]]]:
    """Send a flat buffer to the ranks that hear it, and yield its parts with theirs as they come.

    What came is overwritten later: be done with a part before the next one.
    """
    heard, told = neighbours
    size = _elements_of_a_message(own)
    rooms_of = rooms.buffers(own, size, len(heard))
    parts = own.split(size)
    messages = [
        Message(
            [(part, peer) for peer in told],
            [(room[: len(part)], peer) for room, (peer, _) in zip(some, heard, strict=True)],
        )
        for part, some in zip(parts, cycle(rooms_of), strict=False)
    ]
    arrived = peers.stream(messages, len(rooms_of))
    for part, message in zip(parts, arrived, strict=True):
        yield part, [room for room, _ in message.received]


def _elements_of_a_message(own: Tensor) -> int:
    return _MESSAGE_ON_CPU if own.is_cpu else max(len(own), 1)


def _add(into: Tensor, own: Tensor, theirs: Sequence[Tensor], shares: Sequence[float]) -> None:
    left = list(zip(theirs, shares, strict=True))
    while len(left) > 1 and left[0][1] == left[1][1] and own.element_size() > 2:
        # Two ranks of one share take a pass less: twice a number is exact. 16 bits would round the
        # sum too much.
        (one, share), (other, _), *left = left
        into.sub_(one.add_(other).sub_(own, alpha=2), alpha=share)
    for each, share in left:
        into.add_(torch.sub(own, each, out=each), alpha=share)
