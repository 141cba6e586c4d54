# SPDX-License-Identifier: Apache-2.0
"""Adasum of the tensors of ranks, in place, on any process group.

Vector halving and distance doubling: at distance 1, 2, 4, ... a rank and its partner each keep one
half of what both hold, exchange the other halves, and combine. Dot products are summed over the
ranks that hold the same vector, first by exchanges with each of the distances so far. Then the
halves travel back. Each element is combined on one rank and copied from there, so that all ranks
end with the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import zip_longest
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from noisescale.checks import refuse
from noisescale.methods.across_ranks.alike import check_alike
from noisescale.methods.across_ranks.peers import Message, Peers
from noisescale.methods.adasum.arithmetic import Pair, combine_, fit, products
from noisescale.methods.adasum.fused import WIDTH, Buffers, Fused
from noisescale.methods.adasum.rule import TINY, Dots, check_dtype, coefficients, core_and_rest
from noisescale.refusal import TypeRefusal

_MESSAGE_ON_CPU = 4096
_UNDER_WAY = 2
"""Rows of a message, and messages under way between two ranks.

With 512 rows two ranks took 1.4 times the CPU time, as each message has costs of its own. The
messages that come first need room of their own.
"""

_COLUMNS = 3
"""What is added up over the pairs of the tree: Σ|leaf|², coefficients, cosines."""


class AdasumStatistics(NamedTuple):
    """How much the ranks agreed, one value a tensor, in float64 on the tensors' device."""

    coefficient: Tensor
    """Mean coefficient over the tree: 1 where vectors were added, 1/2 where they were averaged."""
    cosine: Tensor
    """Mean cosine of the angle between both vectors of a pair, over the tree; NaN on one rank."""
    orthogonality: Tensor
    """|Adasum|² over Σ|g_i|²: 1 if all ranks' vectors are orthogonal, 1/W if they are parallel."""


def adasum_all_reduce_(
    tensors: Sequence[Tensor],
    group: dist.ProcessGroup | None = None,
    *,
    mean_group: dist.ProcessGroup | None = None,
    check: bool = True,
) -> AdasumStatistics:
    """Replace the tensors of each rank by their Adasum over all ranks, see `adasum`.

    All ranks of the group must call this function with tensors of the same shapes and dtypes. Each
    tensor is a vector of its own. The result has the same bits on all ranks. Any number of ranks is
    possible. Non-finite elements come through as in an all-reduce of the mean, and the mean is
    taken of the other elements of such a tensor.

    Args:
        tensors: Of float16, bfloat16, float32, float64 or a complex dtype. Dot products are summed
            in float64. On a CPU those of up to 2¹⁷ elements are summed in float32, to 5e-7.
        group: The ranks that are combined; None: all.
        mean_group: Ranks whose mean is taken first, as those of one node. Then `group` has the
            ranks at the same place in the other nodes' groups, and each rank of a node combines a
            share of the elements.
        check: Whether ranks compare shapes and dtypes first. The comparison is one small collective
            that the host waits for. Pass False where ranks cannot differ, on all ranks.

    Returns:
        How much the ranks agreed. The values stay on the device.

    Raises:
        ValueError: If tensors differ in number, shape or dtype across ranks, or one is sparse. All
            ranks raise the error.
        TypeError: If a tensor is not of a floating-point or complex dtype.
        RuntimeError: If no process group was made.

    Examples:
        >>> import torch.distributed as dist
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> gradient = torch.tensor([1.0, 2.0])
        >>> adasum_all_reduce_([gradient]).orthogonality
        tensor([1.], dtype=torch.float64)
        >>> dist.destroy_process_group()
    """
    if isinstance(tensors, Tensor):
        refuse("tensors", "be a sequence", "a tensor", "Pass `[tensor]`.", error=TypeRefusal)
    tensors = list(tensors)
    peers = Peers(group)
    if check:
        groups = [group] if mean_group is None else [group, mean_group]
        check_alike(tensors, groups, {"mean_group": f"{parts_of(mean_group)} ranks"})
    for each in tensors:
        check_dtype(each.dtype)
        if each.layout != torch.strided:
            remedy = "Convert them with `.to_dense()`."
            refuse("tensors", "be dense", f"one of layout {each.layout}", remedy)
    buffers = Buffers(tensors, parts_of(mean_group), in_place=True)
    buffers.pack()
    statistics = reduce_(buffers, peers, mean_group)
    buffers.unpack()
    return statistics


def parts_of(mean_group: dist.ProcessGroup | None) -> int:
    """Return how many ranks share the work on a buffer."""
    return 1 if mean_group is None else dist.get_world_size(mean_group)


def reduce_(
    buffers: Buffers, peers: Peers, mean_group: dist.ProcessGroup | None
) -> AdasumStatistics:
    """Combine the buffers of all ranks, which have `parts_of(mean_group)` parts."""
    count, device = len(buffers.tensors), torch.device("cpu")
    if count:
        device = buffers.tensors[0].device
    found = torch.empty(count, 3, dtype=torch.float64, device=device)
    for indices, fused in buffers.fused:
        found[indices] = _reduce(fused, peers, mean_group).to(device)
    return AdasumStatistics(*found.unbind(1))


def _reduce(fused: Fused, peers: Peers, mean_group: dist.ProcessGroup | None) -> Tensor:
    if mean_group is None or dist.get_world_size(mean_group) == 1:
        return _Tree(fused.rows, fused.tensor_of_row, len(fused), peers, None).reduce_()
    parts = dist.get_world_size(mean_group)
    part = fused.rows.new_empty(len(fused.rows) // parts, WIDTH)
    reduce_scatter, all_gather = _collectives()
    reduce_scatter(part, fused.rows.div_(parts), group=mean_group)
    tensor_of_row = fused.tensor_of_row.chunk(parts)[dist.get_rank(mean_group)]
    found = _Tree(part, tensor_of_row, len(fused), peers, mean_group).reduce_()
    all_gather(fused.rows, part, group=mean_group)
    return found


class _Tree:
    """One reduction: what this rank holds of it, and what is known of the tree so far."""

    def __init__(
        self,
        rows: Tensor,
        tensor_of_row: Tensor,
        tensors: int,
        peers: Peers,
        mean_group: dist.ProcessGroup | None,
    ) -> None:
        self._rows, self._tensor_of_row, self._tensors = rows, tensor_of_row, tensors
        self._peers, self._mean_group = peers, mean_group
        self._core, self._beyond = core_and_rest(peers.size)
        self._sums = rows.new_zeros(tensors, _COLUMNS, dtype=torch.float64)
        self._square = self._sums.new_full((tensors,), torch.nan)
        half, message = (len(rows) + 1) // 2, _rows_of_a_message(rows)
        count = min(_UNDER_WAY, -(-half // message))
        self._rooms = list(rows.new_empty(count, min(half, message), WIDTH))

    def reduce_(self) -> Tensor:
        peers, pairs = self._peers, self._peers.size - 1
        if not pairs:
            nothing = torch.full_like(self._square, torch.nan)
            return torch.stack([torch.ones_like(nothing), nothing, torch.ones_like(nothing)], 1)
        statistics = torch.empty_like(self._sums)
        if peers.rank >= self._core:
            other = peers.rank - self._core
            peers.send(self._rows, other)
            peers.receive(self._rows, other)
            peers.receive(statistics, other)
            return statistics
        if peers.rank < self._beyond:
            self._fold_in()
        self._combine_halves()
        leaves, of_pairs, cosines = self._sums.unbind(1)
        found = [of_pairs / (2 * pairs), cosines / pairs, self._square / leaves]
        statistics = torch.stack(found, 1)
        if peers.rank < self._beyond:
            peers.send(self._rows, peers.rank + self._core)
            peers.send(statistics, peers.rank + self._core)
        return statistics

    def _fold_in(self) -> None:
        """Combine with the whole vector of a rank beyond the largest power of two."""
        other = torch.empty_like(self._rows)
        self._peers.receive(other, self._peers.rank + self._core)
        whole = [Pair(self._rows, other, self._tensor_of_row)]
        pairs, partial = products(whole, self._tensors, self._rows)
        dots = self._sum_in_node(partial)
        self._combine(pairs, dots, 1, 1, lower=True)
        self._sums[:, 0] = dots.aa + dots.bb

    def _combine_halves(self) -> None:
        peers, start, stop = self._peers, 0, len(self._rows)
        way: list[tuple[int, slice, slice]] = []
        distance = 1
        while distance < self._core:
            partner, middle = peers.rank ^ distance, (start + stop) // 2
            lower = not peers.rank & distance
            first, second = slice(start, middle), slice(middle, stop)
            kept, given = (first, second) if lower else (second, first)
            self._combine_pair(kept, given, distance, lower=lower)
            way.append((partner, kept, given))
            start, stop, distance = kept.start, kept.stop, 2 * distance
        for partner, kept, given in reversed(way):
            peers.swap(self._rows[kept], self._rows[given], partner)

    def _combine_pair(self, kept: slice, given: slice, distance: int, *, lower: bool) -> None:
        peers = self._peers
        swapped = self._swap_halves(kept, given, peers.rank ^ distance)
        pairs, partial = products(swapped, self._tensors, self._rows)
        if not lower:
            partial = partial[:, [0, 2, 1]]
        # All ranks of one vector hold the same sums: each adds its part of them.
        exchanged = torch.cat([partial, self._sums / distance], 1)
        theirs = torch.empty_like(exchanged)
        for step in (1 << i for i in range(distance.bit_length())):
            peers.swap(exchanged, theirs, peers.rank ^ step)
            exchanged += theirs
        dots = self._sum_in_node(exchanged[:, :3].contiguous())
        self._sums = exchanged[:, 3:].contiguous()
        first = peers.rank & ~(2 * distance - 1)
        if distance == 1:
            for rank, square in ((first, dots.aa), (first + 1, dots.bb)):
                if rank >= self._beyond:
                    self._sums[:, 0] += square
        in_a, in_b = (self._leaves(first + i * distance, distance) for i in (0, 1))
        self._combine(pairs, dots, in_a, in_b, lower=lower)

    def _swap_halves(self, kept: slice, given: slice, partner: int) -> Iterator[Pair]:
        """Swap halves with the partner in parts, and yield each part as it comes.

        What comes is written where a part of this rank was that has been sent by then.
        """
        rows, step = self._rows, _rows_of_a_message(self._rows)
        halves = [_split(half, step) for half in (kept, given)]
        slices = list(zip_longest(*halves, fillvalue=slice(0, 0)))
        free = [*self._rooms, *(rows[sent] for _, sent in slices)]
        messages = [
            Message([(rows[sent], partner)], [(room[: own.stop - own.start], partner)])
            for (own, sent), room in zip(slices, free, strict=False)
        ]
        arrived = self._peers.stream(messages, len(self._rooms))
        for (own, _), message in zip(slices, arrived, strict=True):
            if own.stop > own.start:
                yield Pair(rows[own], message.received[0][0], self._tensor_of_row[own])

    def _combine(
        self, pairs: Sequence[Pair], dots: Dots, ranks_in_a: int, ranks_in_b: int, *, lower: bool
    ) -> None:
        of_a, of_b = coefficients(dots, ranks_in_a, ranks_in_b)
        of_own, of_other = fit(dots, *((of_a, of_b) if lower else (of_b, of_a)), self._rows)
        combine_(pairs, of_own, of_other, self._rows)
        none = (dots.aa < TINY) | (dots.bb < TINY)
        cosine = torch.where(none, 0.0, dots.ab / (dots.aa * dots.bb).sqrt())
        self._sums[:, 1] += of_a + of_b
        self._sums[:, 2] += cosine
        self._square = of_a**2 * dots.aa + 2 * of_a * of_b * dots.ab + of_b**2 * dots.bb

    def _leaves(self, first: int, ranks: int) -> int:
        """Return the ranks in the vector of `ranks` ranks of the tree, with the ranks folded in."""
        return ranks + min(max(self._beyond - first, 0), ranks)

    def _sum_in_node(self, partial: Tensor) -> Dots:
        if self._mean_group is not None:
            dist.all_reduce(partial, group=self._mean_group)
        return Dots(*partial.unbind(1))


def _rows_of_a_message(rows: Tensor) -> int:
    return _MESSAGE_ON_CPU if rows.is_cpu else max(len(rows), 1)


def _split(whole: slice, step: int) -> list[slice]:
    starts = range(whole.start, whole.stop, step)
    return [slice(start, min(start + step, whole.stop)) for start in starts]


def _collectives() -> tuple[Callable[..., object], Callable[..., object]]:
    """Return reduce-scatter and all-gather of one tensor, which torch 2.13 gave new names."""
    if hasattr(dist, "reduce_scatter_single"):
        return dist.reduce_scatter_single, dist.all_gather_single
    return dist.reduce_scatter_tensor, dist.all_gather_into_tensor
