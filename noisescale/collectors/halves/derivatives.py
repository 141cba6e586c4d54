# SPDX-License-Identifier: Apache-2.0
"""What derivatives of a loss and of a network have in common, and whether the network mixes rows.

Rows are drawn into a part A, v is random on A and zero elsewhere, and the derivative of what v
multiplies must be zero on other rows.

In a network let x be the first tensors with rows in front, and z the tensors at the cut. Each row
of x acts on rows of z in a part A, or on rows that are not in A, but not on both. This allows for
rows in another order. Statistics that no gradient flows through are not seen.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from noisescale.batches.row_groups import RowGroups
from noisescale.batches.to_device import to_device
from noisescale.collectors.halves.coupled import has_rows
from noisescale.collectors.halves.cut import Cut
from noisescale.collectors.halves.graph import (
    Graph,
    Output,
    Region,
    dimensions_of,
    kind,
    nodes_leading_to,
    walk,
)

LARGEST_SHARE = 1e-4
"""The most of a derivative that may be on other rows: 2e-8 in sound losses, 0.0127 in others."""


class NoDerivativeError(Exception):
    """There is no second derivative; the text says why."""


def derivatives(
    of: Collection[Output] | Sequence[Tensor], starts: Sequence[Tensor], by: Sequence[Output]
) -> Sequence[Tensor | None]:
    """Return d(Σ starts·of)/d(by), by autograd's engine; None where one does not depend on it."""
    outputs: Any = [one if isinstance(one, Tensor) else GradientEdge(*one) for one in of]
    inputs: Any = [GradientEdge(*one) for one in by]
    found: Sequence[Tensor | None] = torch.autograd.grad(
        outputs, inputs, starts, retain_graph=True, allow_unused=True
    )
    return found


def ends_of(cut: Cut) -> dict[Output, int]:
    """Return the tensors at the cut, and how many rows each example has in them."""
    return {
        stop.output: edge.repeats for stop, edge in zip(cut.region.stops, cut.edges, strict=True)
    }


def parts_of(rows: int, most: int, groups: RowGroups | None = None) -> Iterator[Tensor]:
    """Yield vectors of 1 for a random half of the rows, or of whole groups, and 0 for others."""
    apart = rows if groups is None else groups.number
    order = torch.randperm(apart, generator=torch.Generator().manual_seed(apart), device="cpu")
    for bit in range(min(most, (apart - 1).bit_length())):
        part = (order >> bit & 1).float()
        yield part if groups is None else part[groups.of_rows]


def random_on_rows(
    graph: Graph,
    output: Output,
    factor: Tensor,
    generator: torch.Generator,
    *,
    alike: bool = False,
) -> Tensor:
    """Return random numbers of a tensor's shape, times a factor for each row; `alike` in all."""
    shape = graph.shape(output)
    dtype, device = graph.dtype_and_device(output)
    drawn = torch.randn(
        (1 if alike else shape[0], *shape[1:]),
        generator=generator,
        device="cpu",
        dtype=dtype if dtype.is_complex else torch.float32,
    )
    by_row = to_device(factor, device, dtype).reshape(-1, *[1] * (len(shape) - 1))
    drawn = to_device(drawn, device, dtype)
    return by_row * drawn if alike else drawn.mul_(by_row)


def sq_norms(one: Tensor) -> Tensor:
    """Return |row|² of each row."""
    if one.is_complex():
        one = torch.view_as_real(one)
    dtype = torch.promote_types(one.dtype, torch.float32)
    return one.reshape(len(one), -1).to(dtype).square().sum(1)


_DRAWS = 2
"""Draws of a part A. At least one of them separates two rows with a probability of 3/4 or more."""

_OF_INDICES = ("Embedding", "Index", "Gather", "Take")


def share_in_network(graph: Graph, cut: Cut, rows: int, groups: RowGroups | None = None) -> Tensor:
    """Return the share of the derivative by x that is of rows that act on both parts of z.

    The largest share of all x, shape (1,): the host does not wait for it. Two backward passes
    through the network show it for each part.
    """
    ends, firsts = ends_of(cut), first_rows(graph, cut, rows)
    shares: list[Tensor] = []
    for part in parts_of(rows, _DRAWS, groups) if firsts else ():
        of_parts = []
        for factor in (part, 1 - part):
            generator = torch.Generator().manual_seed(0)
            starts = [
                random_on_rows(
                    graph, output, factor.repeat_interleave(repeats), generator, alike=True
                )
                for output, repeats in ends.items()
            ]
            try:
                of_parts.append(derivatives(ends, starts, firsts))
            except torch.OutOfMemoryError as error:
                raise NoDerivativeError("they take too much memory") from error
        for a, b in zip(*of_parts, strict=True):
            if a is not None and b is not None:
                in_part, in_other = sq_norms(a), sq_norms(b)
                both = torch.minimum(in_part, in_other).sum() / (in_part + in_other).sum()
                shares.append(both.nan_to_num().to(shares[0].device if shares else both.device))
    return torch.stack(shares).max().sqrt().view(1) if shares else torch.zeros(1, device="cpu")


def first_rows(graph: Graph, cut: Cut, rows: int) -> list[Output]:
    """Return the tensors farthest from the loss with rows in front, up to z, and no data before.

    A table that is added to all rows, such as one of positions, does not count, nor does what is
    made of parameters alone, even where its first dimension happens to be as long as the batch.
    """
    with_data = [
        node
        for node, edges in graph.nodes.items()
        if not hasattr(node, "variable")
        and (len(edges) < len(node.next_functions) or node.name().startswith(_OF_INDICES))
    ]
    of_data = nodes_leading_to(Region(graph.nodes, []), with_data)

    def data_inputs(output: Output) -> list[Output]:
        return [
            edge.output
            for edge in graph.edges(output[0])
            if edge.output[0] in of_data and not _is_for_all(graph, edge.output, output)
        ]

    def further(output: Output) -> list[Output]:
        return [
            one
            for one in data_inputs(output)
            if _may_have_rows(graph.shape(one), rows) and not _moves_first(graph, one, output)
        ]

    ends = ends_of(cut)
    return [
        output
        for output in walk(ends, further)
        if output not in ends and graph.shape(output)[:1] == (rows,) and not data_inputs(output)
    ]


def _may_have_rows(shape: tuple[int, ...], rows: int) -> bool:
    """Return whether the first dimension has rows for each example, or groups of rows."""
    return has_rows(shape[:1], rows) or (shape[:1] > (1,) and rows % shape[0] == 0)


def _is_for_all(graph: Graph, output: Output, result: Output) -> bool:
    """Return whether a tensor has been expanded by one or more dimensions in front."""
    shape, wider = graph.shape(output), graph.shape(result)
    return len(shape) < len(wider) and wider[-len(shape) :] == shape


def _moves_first(graph: Graph, output: Output, result: Output) -> bool:
    """Return whether the first dimension moved, as in a transpose to (positions, rows, ...)."""
    node, shape = result[0], graph.shape(output)
    over = dimensions_of(node, len(shape))
    if kind(node) == "Permute":
        return over[0] != 0
    lost = len(graph.shape(result)) < len(shape)
    return kind(node) == "T" or (0 in over and (lost or kind(node) == "Transpose"))
