# SPDX-License-Identifier: Apache-2.0
"""Whether rows act on each other, by derivatives: beside the names of operations in `coupled`.

1. In the loss. Let z be the tensors at the cut and v a random vector on a part A of the rows. The
   second derivative h = d(v·dL/dz)/dz is zero on the other rows if L is a sum over rows. If L is a
   function of one such sum (RMSE, perplexity), h is parallel to dL/dz on the other rows, and halves
   are right up to an order of 1/B. So that component is taken out.
2. In the network. Let x be the first tensors with rows in front. Each row of x acts on rows of z
   in A, or on rows that are not in A, but not on both. This allows for rows in another order.

Derivatives do not show what is piecewise linear, sorted, or computed without gradient.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge

from noisescale.collectors.halves.coupled import has_rows, is_chain, is_root_of_one_number
from noisescale.collectors.halves.cut import Cut
from noisescale.collectors.halves.graph import (
    Edge,
    Graph,
    Node,
    Output,
    Region,
    dimensions_of,
    ends_first,
    kind,
    that_lead_to,
    walk,
)
from noisescale.collectors.own_pass import own_pass

LARGEST_SHARE = 1e-4
"""The most of a derivative that may be on other rows: 2e-8 in sound losses, 0.0127 in others."""

MOST_NUMBERS = 2**22
"""At the cut. The second derivative of the loss takes about eight copies of these."""

_PARTS_IN_LOSS, _PARTS_IN_NETWORK = 3, 2
"""Parts A that are drawn: two rows are apart in one of three with a probability of 7/8 or more."""

_ROUNDINGS = 4
"""That a number of h or of dL/dz may have gone through."""

_MOST_ROOTS = 8

_SAME_DIRECTION = 1e-3
"""What is left of a vector, as a share, where it has the direction of others but for rounding."""

_OF_INDICES = ("Embedding", "Index", "Gather", "Take")


class NoDerivativeError(Exception):
    """There is no second derivative, and why."""


def share_in_loss(graph: Graph, cut: Cut, gradient: Tensor, rows: int) -> float:
    """Return the share of the second derivative of the loss on other rows; NaN if not known.

    A chain of operations with too many numbers, such as a cross-entropy over many words, is left
    to the names of its operations.

    Args:
        graph: The graph of the loss.
        cut: Its cut.
        gradient: The gradient that a backward pass starts with.
        rows: Rows of the batch.

    Raises:
        NoDerivativeError: If an operation has no second derivative, or takes too much memory.
    """
    numbers = sum(math.prod(graph.shape(output)) for output in _ends(cut))
    if numbers > MOST_NUMBERS and is_chain(cut.region):
        return 0.0
    if numbers > MOST_NUMBERS:
        raise NoDerivativeError(f"it is computed from {numbers:,} numbers, too many for these")
    with _without_derivative():
        return _share_in_loss(graph, cut, gradient, rows)


@contextmanager
def _without_derivative() -> Iterator[None]:
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise NoDerivativeError("they take too much memory") from error
    except Exception as error:  # a Function written in Python may raise any
        raise NoDerivativeError(str(error).partition("\n")[0].rstrip(".")) from error


def share_in_network(graph: Graph, cut: Cut, rows: int) -> float:
    """Return the share of the derivative by x that is of rows that act on both parts of z.

    The largest share of all x. Two backward passes through the network show it for each part.
    """
    ends, firsts = _ends(cut), first_rows(graph, cut, rows)
    if not firsts:
        return 0.0
    shares: list[Tensor] = []
    for part in _parts(rows, _PARTS_IN_NETWORK):
        of_parts = []
        for factor in (part, 1 - part):
            generator = torch.Generator().manual_seed(0)
            starts = [
                _on_rows(graph, output, factor.repeat_interleave(repeats), generator, alike=True)
                for output, repeats in ends.items()
            ]
            with own_pass():
                try:
                    of_parts.append(_derivatives(ends, starts, firsts))
                except torch.OutOfMemoryError as error:
                    raise NoDerivativeError("they take too much memory") from error
        for a, b in zip(*of_parts, strict=True):
            if a is not None and b is not None:
                in_part, in_other = _sq_norms(a), _sq_norms(b)
                both = torch.minimum(in_part, in_other).sum() / (in_part + in_other).sum()
                shares.append(both.nan_to_num().to(shares[0].device if shares else both.device))
    return math.sqrt(float(torch.stack(shares).max())) if shares else 0.0


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
    of_data = that_lead_to(Region(graph.nodes, []), with_data)

    def before(output: Output) -> list[Output]:
        return [
            edge.output
            for edge in graph.edges(output[0])
            if edge.output[0] in of_data and not _is_for_all(graph, edge.output, output)
        ]

    def further(output: Output) -> list[Output]:
        return [
            one
            for one in before(output)
            if has_rows(graph.shape(one)[:1], rows) and not _moves_first(graph, one, output)
        ]

    ends = _ends(cut)
    return [
        output
        for output in walk(ends, further)
        if output not in ends and graph.shape(output)[:1] == (rows,) and not before(output)
    ]


def _is_for_all(graph: Graph, output: Output, result: Output) -> bool:
    """Whether a tensor has been expanded by one or more dimensions in front."""
    shape, wider = graph.shape(output), graph.shape(result)
    return len(shape) < len(wider) and wider[-len(shape) :] == shape


def _moves_first(graph: Graph, output: Output, result: Output) -> bool:
    """Whether the first dimension went elsewhere, as that of (positions, rows, ...) may."""
    node, shape = result[0], graph.shape(output)
    over = dimensions_of(node, len(shape))
    if kind(node) == "Permute":
        return over[0] != 0
    lost = len(graph.shape(result)) < len(shape)
    return kind(node) == "T" or (0 in over and (lost or kind(node) == "Transpose"))


def _share_in_loss(graph: Graph, cut: Cut, gradient: Tensor, rows: int) -> float:
    ends = _ends(cut)
    with torch.enable_grad():
        first = _gradients_at_cut(graph, cut, graph.start.output, gradient)
    curved = {output: one for output, one in first.items() if one.requires_grad}
    if not curved:
        return 0.0  # linear, as far as derivatives show
    with torch.no_grad():
        ones = [(root, torch.ones_like(gradient).sum()) for root in _roots(graph, cut)]
        sums = [first, *(_gradients_at_cut(graph, cut, *one) for one in ones)]
    eps = max(_eps(graph, (node, 0)) for node in [*cut.region.nodes, *(end[0] for end in ends)])
    generator = torch.Generator().manual_seed(0)
    shares = []
    with _zeros_behind(graph, ends), own_pass():
        for part in _parts(rows, _PARTS_IN_LOSS):
            second = _derivatives(
                list(curved.values()),
                [
                    _on_rows(graph, one, part.repeat_interleave(ends[one]), generator)
                    for one in curved
                ],
                list(ends),
            )
            h = {output: one for output, one in zip(ends, second, strict=True) if one is not None}
            others = {end: (1 - part).repeat_interleave(n).bool() for end, n in ends.items()}
            shares.append(_share_of_others(graph, h, sums, others, eps))
    finite = torch.stack(
        [one.detach().isfinite().all().to(shares[0].device) for one in first.values()]
    )
    return float(torch.where(finite.all(), torch.stack(shares).max(), torch.nan))


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
    all_rows: dict[Output, Any] = dict.fromkeys(others, slice(None))
    whole = _flat(graph, h, all_rows).square().sum()
    on_others = _flat(graph, h, others)
    rest = _without([_flat(graph, one, others) for one in sums], on_others)
    rounding = (_ROUNDINGS * eps) ** 2 * (on_others - rest).square().sum()
    return ((rest.square().sum() - rounding).clamp(min=0) / whole).sqrt().nan_to_num(0, 0, 0)


def _roots(graph: Graph, cut: Cut) -> list[Output]:
    """Roots of one number, and norms. The loss may be a sum of these: see `where_rows_meet`."""
    found = [
        node
        for node in cut.region.nodes
        if is_root_of_one_number(graph, node)
        or (kind(node) in {"Norm", "LinalgVectorNorm"} and not graph.shape((node, 0)))
    ]
    return [(node, 0) for node in found[:_MOST_ROOTS]]


def _flat(graph: Graph, tensors: Mapping[Output, Tensor], rows: Mapping[Output, Tensor]) -> Tensor:
    """Return some rows of the tensors at the cut as one vector, with zeros for what is missing."""
    pieces: list[Tensor] = []
    for output, chosen in rows.items():
        one = tensors.get(output)
        one = graph.zeros(output) if one is None else one
        # The root of 0 has no derivative.
        one = one.detach()[chosen].nan_to_num(0, 0, 0)
        one = torch.view_as_real(one) if one.is_complex() else one
        pieces.append(one.flatten().to(pieces[0].device if pieces else one.device))
    return torch.cat([one.to(torch.promote_types(one.dtype, torch.float32)) for one in pieces])


def _without(directions: Sequence[Tensor], vector: Tensor) -> Tensor:
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

    Node by node: autograd's engine would go on behind tensors that others at the cut are made of.
    """
    stops = set(cut.region.stops)
    leading = that_lead_to(cut.region, [e.node for e in stops if e.node is not None])
    into: dict[Output, Tensor] = {start: gradient}
    for node in reversed(ends_first(cut.region, leading)):
        given = [into.pop((node, i), None) for i in range(len(graph.shapes(node)))]
        if all(one is None for one in given):
            continue
        for edge, one in _passed_on(graph, node, cut.region.nodes[node], given):
            if edge in stops or edge.output[0] in leading:
                into[edge.output] = into[edge.output] + one if edge.output in into else one
    return into


def _passed_on(
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
            yield edge, one.sum_to_size(graph.shape(edge.output)).to(graph.kept_in(edge.output)[0])


def _as_tuple(given: Any) -> tuple[Tensor | None, ...]:
    return given if isinstance(given, tuple) else (given,)


@contextmanager
def _zeros_behind(graph: Graph, ends: Mapping[Output, int]) -> Iterator[None]:
    """Let no gradient pass from a tensor at the cut to others that it is made of."""
    nodes = {output[0] for output in ends}
    with ExitStack() as held:
        for node in nodes:
            before = graph.behind([edge.output[0] for edge in graph.edges(node)])
            if not nodes.isdisjoint(before):
                held.callback(node.register_prehook(_zeros).remove)
        yield


def _zeros(gradients: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
    return tuple(None if one is None else torch.zeros_like(one) for one in gradients)


def _derivatives(
    of: Collection[Output] | Sequence[Tensor], starts: Sequence[Tensor], by: Sequence[Output]
) -> Sequence[Tensor | None]:
    outputs: Any = [one if isinstance(one, Tensor) else GradientEdge(*one) for one in of]
    inputs: Any = [GradientEdge(*one) for one in by]
    found: Sequence[Tensor | None] = torch.autograd.grad(
        outputs, inputs, starts, retain_graph=True, allow_unused=True
    )
    return found


def _ends(cut: Cut) -> dict[Output, int]:
    """The tensors at the cut, and how many rows each example has in them."""
    return {
        stop.output: edge.repeats for stop, edge in zip(cut.region.stops, cut.edges, strict=True)
    }


def _parts(rows: int, most: int) -> Iterator[Tensor]:
    """Yield vectors of 1 for a random half of the rows, and 0 for the others."""
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(rows))
    for bit in range(min(most, (rows - 1).bit_length())):
        yield (order >> bit & 1).float()


def _on_rows(
    graph: Graph,
    output: Output,
    factor: Tensor,
    generator: torch.Generator,
    *,
    alike: bool = False,
) -> Tensor:
    """Return random numbers of a tensor's shape, times a factor for each row; `alike` in all."""
    shape = graph.shape(output)
    dtype, device = graph.kept_in(output)
    drawn = torch.randn(
        (1 if alike else shape[0], *shape[1:]),
        generator=generator,
        dtype=dtype if dtype.is_complex else torch.float32,
    )
    by_row = factor.to(device, dtype).reshape(-1, *[1] * (len(shape) - 1))
    return by_row * drawn.to(device, dtype) if alike else drawn.to(device, dtype).mul_(by_row)


def _sq_norms(one: Tensor) -> Tensor:
    """|row|² of each row."""
    if one.is_complex():
        one = torch.view_as_real(one)
    dtype = torch.promote_types(one.dtype, torch.float32)
    return one.reshape(len(one), -1).to(dtype).square().sum(1)


def _eps(graph: Graph, output: Output) -> float:
    dtype = graph.kept_in(output)[0] if graph.shapes(output[0]) else torch.float32
    return torch.finfo(dtype).eps if dtype.is_floating_point else 0.0
