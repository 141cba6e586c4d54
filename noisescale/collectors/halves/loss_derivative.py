# SPDX-License-Identifier: Apache-2.0
"""Whether rows act on each other in a loss, by its second derivative.

Let z be the tensors at the cut and v a random vector on a part A of the rows. The second derivative
h = d(v·dL/dz)/dz is zero on the other rows if L is a sum over rows. If L is a function of one such
sum (RMSE, perplexity), h is parallel to dL/dz on the other rows, and halves are right up to an
order of 1/B. So that component is taken out.

What is piecewise linear, sorted, or computed without gradient is not seen.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction

from noisescale.batches.row_groups import RowGroups
from noisescale.batches.to_device import to_device
from noisescale.collectors.halves.coupled import is_chain, is_root_of_one_number
from noisescale.collectors.halves.cut import Cut
from noisescale.collectors.halves.derivatives import (
    NoDerivativeError,
    derivatives,
    ends_of,
    parts_of,
    random_on_rows,
)
from noisescale.collectors.halves.graph import (
    Edge,
    Graph,
    Node,
    Output,
    kind,
    order_from_stops,
)

MOST_NUMBERS = 2**22
"""The most numbers at the cut. The second derivative takes about eight copies of them."""

_DRAWS = 3
"""Draws of a part A. At least one of them separates two rows with a probability of 7/8 or more."""

_ROUNDINGS = 4
"""Roundings of each number of h and of dL/dz."""

_MOST_ROOTS = 8

_SAME_DIRECTION = 1e-3
"""The length that rounding may leave of a vector without its components along others."""


def share_in_loss(
    graph: Graph, cut: Cut, gradient: Tensor, rows: int, groups: RowGroups | None = None
) -> Tensor:
    """Return the share of the second derivative of the loss on other rows; NaN if not known.

    Its shape is (1,), and the host does not wait for it.

    A chain of operations with too many numbers, such as a cross-entropy over many words, is left
    to the names of its operations.

    Args:
        graph: The graph of the loss.
        cut: Its cut.
        gradient: The gradient that a backward pass starts with.
        rows: Rows of the batch.
        groups: Of rows that may act on each other.

    Raises:
        NoDerivativeError: If an operation has no second derivative, or takes too much memory.
    """
    numbers = sum(math.prod(graph.shape(output)) for output in ends_of(cut))
    if numbers > MOST_NUMBERS and is_chain(cut.region):
        return torch.zeros(1, device="cpu")
    if numbers > MOST_NUMBERS:
        raise NoDerivativeError(f"it is computed from {numbers:,} numbers, too many for these")
    with _without_derivative():
        return _share_in_loss(graph, cut, gradient, rows, groups)


@contextmanager
def _without_derivative() -> Iterator[None]:
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise NoDerivativeError("they take too much memory") from error
    except Exception as error:  # a Function written in Python may raise any
        raise NoDerivativeError(str(error).partition("\n")[0].rstrip(".")) from error


def _share_in_loss(
    graph: Graph, cut: Cut, gradient: Tensor, rows: int, groups: RowGroups | None
) -> Tensor:
    ends = ends_of(cut)
    with torch.enable_grad():
        first = _gradients_at_cut(graph, cut, graph.start.output, gradient)
    curved = {output: one for output, one in first.items() if one.requires_grad}
    if not curved:
        return torch.zeros(1, device="cpu")  # linear, as far as derivatives show
    with torch.no_grad():
        of_roots = (
            _gradients_at_cut(graph, cut, root, graph.zeros(root) + 1)
            for root in _roots(graph, cut)
        )
        sums = [first, *of_roots]
    eps = max(_eps(graph, (node, 0)) for node in [*cut.region.nodes, *(end[0] for end in ends)])
    generator = torch.Generator().manual_seed(0)
    shares = []
    with _zeros_behind(graph, ends):
        for part in parts_of(rows, _DRAWS, groups):
            second = derivatives(
                list(curved.values()),
                [
                    random_on_rows(graph, one, part.repeat_interleave(ends[one]), generator)
                    for one in curved
                ],
                list(ends),
            )
            h = {output: one for output, one in zip(ends, second, strict=True) if one is not None}
            others = {
                end: to_device(
                    (1 - part).repeat_interleave(n).nonzero().view(-1),
                    graph.dtype_and_device(end)[1],
                )
                for end, n in ends.items()
            }
            shares.append(_share_of_others(graph, h, sums, others, eps))
    finite = torch.stack(
        [one.detach().isfinite().all().to(shares[0].device) for one in first.values()]
    )
    return torch.where(finite.all(), torch.stack(shares).max(), torch.nan).view(1)


def _share_of_others(
    graph: Graph,
    h: Mapping[Output, Tensor],
    sums: Sequence[Mapping[Output, Tensor]],
    others: Mapping[Output, Tensor],
    eps: float,
) -> Tensor:
    """Return |h'|/|h|, h' what is on other rows without its components along gradients of sums.

    What rounding leaves of these components does not count.
    """
    whole = _flat(graph, h, dict.fromkeys(others)).square().sum()
    on_others = _flat(graph, h, others)
    rest = _orthogonal_rest([_flat(graph, one, others) for one in sums], on_others)
    rounding = (_ROUNDINGS * eps) ** 2 * (on_others - rest).square().sum()
    return ((rest.square().sum() - rounding).clamp(min=0) / whole).sqrt().nan_to_num(0, 0, 0)


def _roots(graph: Graph, cut: Cut) -> list[Output]:
    """Return roots of one number, and norms: a loss may sum them up, see `first_coupling`."""
    found = [
        node
        for node in cut.region.nodes
        if is_root_of_one_number(graph, node)
        or (kind(node) in {"Norm", "LinalgVectorNorm"} and not graph.shape((node, 0)))
    ]
    return [(node, 0) for node in found[:_MOST_ROOTS]]


def _flat(
    graph: Graph, tensors: Mapping[Output, Tensor], rows: Mapping[Output, Tensor | None]
) -> Tensor:
    """Return some rows of the tensors at the cut as one vector, with zeros for what is missing.

    Args:
        graph: The graph.
        tensors: At the cut.
        rows: The indices of the rows; None: all.
    """
    pieces: list[Tensor] = []
    for output, chosen in rows.items():
        one = tensors.get(output)
        one = graph.zeros(output) if one is None else one
        one = one.detach() if chosen is None else one.detach().index_select(0, chosen)
        one = one.nan_to_num(0, 0, 0)  # the root of 0 has no derivative
        one = torch.view_as_real(one) if one.is_complex() else one
        pieces.append(one.flatten().to(pieces[0].device if pieces else one.device))
    return torch.cat([one.to(torch.promote_types(one.dtype, torch.float32)) for one in pieces])


def _orthogonal_rest(directions: Sequence[Tensor], vector: Tensor) -> Tensor:
    """Return what is left of a vector without its components along some directions."""
    across: list[Tensor] = []
    for one in [*directions, vector]:
        rest = one
        for other in across:
            rest = rest - other * ((other @ rest) / (other @ other)).nan_to_num(0, 0, 0)
        small = rest.square().sum() <= _SAME_DIRECTION**2 * one.square().sum()
        across.append(torch.where(small & (one is not vector), 0.0, rest))
    return across[-1]


def _gradients_at_cut(
    graph: Graph, cut: Cut, start: Output, gradient: Tensor
) -> dict[Output, Tensor]:
    """Return the gradients at the cut of what a node gave, with a graph of their own.

    Nodes are called one by one. Autograd's engine would go on behind tensors that others at the cut
    are made of, would run the hooks of others, and would need a second derivative of attention.
    Nodes that are called in this way neither sum over what was broadcast nor change the type of a
    gradient, so `_passed_on` does both.
    """
    stops = set(cut.region.stops)
    leading = order_from_stops(cut.region)
    into: dict[Output, Tensor] = {start: gradient}
    for node in reversed(leading):
        given = [into.pop((node, i), None) for i in range(len(graph.shapes(node)))]
        if all(one is None for one in given):
            continue
        for edge, one in _propagate(graph, node, cut.region.nodes[node], given):
            if edge in stops or edge.output[0] in leading:
                into[edge.output] = into[edge.output] + one if edge.output in into else one
    return into


def _propagate(
    graph: Graph, node: Node, edges: Sequence[Edge], given: Sequence[Tensor | None]
) -> Iterator[tuple[Edge, Tensor]]:
    """Yield the gradients that a node passes on, in the shapes of what they are gradients of."""
    if issubclass(type(node), BackwardCFunction):
        full = [graph.zeros((node, i)) if one is None else one for i, one in enumerate(given)]
        got = _as_tuple(node.apply(*full))
        # It gives one for each argument of `forward`, and there is an edge for each tensor.
        got = tuple(one for one, needed in zip(got, node.needs_input_grad, strict=True) if needed)
        passed = list(zip(edges, got, strict=True))
    else:
        got = _as_tuple(node(*given))
        passed = [(edge, got[edge.position]) for edge in edges]
    for edge, one in passed:
        if one is not None:
            yield (
                edge,
                one.sum_to_size(graph.shape(edge.output)).to(
                    graph.dtype_and_device(edge.output)[0]
                ),
            )


def _as_tuple(given: Any) -> tuple[Tensor | None, ...]:
    return given if isinstance(given, tuple) else (given,)


@contextmanager
def _zeros_behind(graph: Graph, ends: Mapping[Output, int]) -> Iterator[None]:
    """Let no gradient pass from a tensor at the cut to others that it is made of."""
    nodes = {output[0] for output in ends}
    with ExitStack() as held:
        for node in nodes:
            before = graph.nodes_behind([edge.output[0] for edge in graph.edges(node)])
            if not nodes.isdisjoint(before):
                held.callback(node.register_prehook(_zeros).remove)
        yield


def _zeros(gradients: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
    return tuple(None if one is None else torch.zeros_like(one) for one in gradients)


def _eps(graph: Graph, output: Output) -> float:
    dtype = graph.dtype_and_device(output)[0] if graph.shapes(output[0]) else torch.float32
    return torch.finfo(dtype).eps if dtype.is_floating_point else 0.0
