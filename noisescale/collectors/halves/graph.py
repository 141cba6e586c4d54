# SPDX-License-Identifier: Apache-2.0
"""The autograd graph, read on demand: nodes, edges, and the shapes of gradients.

Private attribute read here, as of torch 2.13: `Node._input_metadata`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from functools import cached_property
from math import prod
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

Node = Any
"""A node of the graph: what torch calls a `grad_fn`."""

Output = tuple[Node, int]
"""A tensor of the forward pass: the node that made it, and which of its outputs it is."""

_T = TypeVar("_T")


class Edge(NamedTuple):
    """An edge along which a gradient flows, from a node to the node that made `output`."""

    node: Node | None
    """The node nearer to the loss; None: the backward pass starts with this gradient."""
    position: int
    """The index of the output among the node's inputs."""
    output: Output
    """The output whose gradient flows."""


class Region(NamedTuple):
    """The part of a graph in which a backward pass starts."""

    nodes: dict[Node, tuple[Edge, ...]]
    """The nodes in it, in the order of the walk, and where gradients go from each."""
    stops: list[Edge]
    """The edges that lead out of it."""


class Graph:
    """The graph behind the loss. Nodes and results are kept once they were read."""

    def __init__(self, loss: GradientEdge) -> None:
        self.start = Edge(None, 0, (loss.node, loss.output_nr))
        self._edges: dict[Node, tuple[Edge, ...]] = {}
        self._shapes: dict[Node, list[tuple[int, ...]]] = {}

    @cached_property
    def nodes(self) -> dict[Node, tuple[Edge, ...]]:
        """All nodes, and where gradients flow from each."""
        return self.region(lambda _: False).nodes

    def edges(self, node: Node) -> tuple[Edge, ...]:
        """Return where gradients flow from a node."""
        if node not in self._edges:
            self._edges[node] = tuple(
                Edge(node, position, output)
                for position, output in enumerate(node.next_functions)
                if output[0] is not None
            )
        return self._edges[node]

    def shape(self, output: Output) -> tuple[int, ...]:
        """Return the shape of what a node gave; () where it is not known."""
        node, which = output
        if node not in self._shapes:
            self._shapes[node] = [tuple(x.shape) for x in node._input_metadata]
        shapes = self._shapes[node]
        return shapes[which] if which < len(shapes) else ()

    def shapes(self, node: Node) -> list[tuple[int, ...]]:
        """Return the shapes of all that a node gave."""
        self.shape((node, 0))
        return self._shapes[node]

    def dtype_and_device(self, output: Output) -> tuple[torch.dtype, torch.device]:
        """Return the kind of numbers in what a node gave, and the device that has them."""
        metadata = output[0]._input_metadata[output[1]]
        return metadata.dtype, metadata.device

    def zeros(self, output: Output) -> Tensor:
        """Return zeros like what a node gave."""
        dtype, device = self.dtype_and_device(output)
        return torch.zeros(self.shape(output), dtype=dtype, device=device)

    def region(self, stops_at: Callable[[Output], object]) -> Region:
        """Return what the start reaches without an edge to an output that `stops_at` names."""
        nodes: dict[Node, tuple[Edge, ...]] = {}
        stops: list[Edge] = []
        left = [self.start]
        while left:
            edge = left.pop()
            node = edge.output[0]
            if stops_at(edge.output):
                stops.append(edge)
            elif node not in nodes:
                nodes[node] = self.edges(node)
                left.extend(reversed(nodes[node]))
        return Region(nodes, stops)

    def nodes_behind(self, nodes: Iterable[Node]) -> set[Node]:
        """Return nodes and all nodes that gradients flow on to from them."""
        return set(walk(nodes, lambda node: [e.output[0] for e in self.edges(node)]))

    def normalizes_over_batch(self, rows: int) -> bool:
        """Return whether a BatchNorm normalizes over `rows` rows, not over one instance."""
        return any(
            "BatchNorm" in node.name()
            and getattr(node, "_saved_training", True)
            and self.shape((node, 0))[:1] != (1,)
            and self.shape((node, 0))[0] % rows == 0
            for node in self.nodes
        )

    def is_weight(self, node: Node) -> bool:
        """Return whether a node gives a parameter, as it is or cast, transposed or reshaped."""
        name, shapes = node.name(), self.shapes(node)
        if name.startswith(("Embedding", "Index", "Gather")) or len(shapes) != 1:
            return False
        size = prod(shapes[0])
        while not hasattr(node, "variable"):
            edges = self.edges(node)
            if len(edges) != len(node.next_functions) or len(edges) != 1:
                return False
            node = edges[0].output[0]
        return bool(node.variable.numel() == size)


def next_nodes(node: Node) -> list[Node]:
    """Return the nodes that gradients flow on to from a node."""
    return [one for one, _ in node.next_functions if one is not None]


def device_behind(node: Node, position: int) -> torch.device:
    """Return the device of a gradient that a node passes on."""
    further, which = node.next_functions[position]
    device: torch.device = further._input_metadata[which].device
    return device


def nodes_leading_to(region: Region, ends: Iterable[Node]) -> Collection[Node]:
    """Return the nodes of a region from which one of some nodes in it is reached, with those."""
    before: dict[Node, list[Node]] = {}
    for node, edges in region.nodes.items():
        for edge in edges:
            before.setdefault(edge.output[0], []).append(node)
    return set(walk(ends, lambda node: before.get(node, ())))


def order_from_stops(region: Region) -> dict[Node, None]:
    """Return the nodes of a region that lead to a stop, each after those that it leads to."""
    leading = nodes_leading_to(region, [e.node for e in region.stops if e.node is not None])
    ordered: dict[Node, None] = {}
    for start in region.nodes:
        left: list[tuple[Node, bool]] = [(start, False)]
        while left:
            node, done = left.pop()
            if node in ordered or node not in leading or node not in region.nodes:
                continue
            if done:
                ordered[node] = None
                continue
            left.append((node, True))
            left.extend((edge.output[0], False) for edge in region.nodes[node])
    return ordered


def walk(starts: Iterable[_T], further: Callable[[_T], Iterable[_T]]) -> Iterator[_T]:
    """Yield what is reached, each once, before it is asked what is further from there."""
    seen = dict.fromkeys(starts)
    left = list(seen)
    while left:
        yield (one := left.pop())
        for another in further(one):
            if another not in seen:
                seen[another] = None
                left.append(another)


def kind(node: Node) -> str:
    """Return the kind of operation of a node, as in "AddmmBackward0"."""
    return str(node.name()).rstrip("0123456789").removesuffix("Backward")


def dimensions_of(node: Node, of: int) -> list[int]:
    """Return which of `of` dimensions an operation goes over or moves; none if it names none."""
    names = ("_saved_dim", "_saved_dims", "_saved_dim0", "_saved_dim1")
    saved = [one for name in names if (one := getattr(node, name, None)) is not None]
    listed = [d for one in saved for d in (one if isinstance(one, tuple | list) else [one])]
    # Torch shows negative dimensions as unsigned numbers.
    return [(d - 2**64 if d >= 2**63 else d) % of for d in listed] or [0][: len(saved)]


_CURVED = frozenset(
    {"Exp", "Expm1", "LinalgVectorNorm", "Log", "Log10", "Log1P", "Log2", "Norm", "Pow"}
    | {"Reciprocal", "Rsqrt", "Sigmoid", "Sqrt", "Tanh"}
)
"""Operations that make another function of one number."""


def is_curved(loss: Node) -> bool:
    """Return whether a loss is a function of sums over rows, as RMSE and perplexity are.

    All rows of a batch then have one factor in common, which differs between batches.
    """

    def further(node: Node) -> list[Node]:
        return [one for one in next_nodes(node) if _is_number(one)]

    return any(kind(node) in _CURVED for node in walk([loss], further))


def _is_number(node: Node) -> bool:
    return all(prod(x.shape) == 1 for x in node._input_metadata)
