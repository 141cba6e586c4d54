# SPDX-License-Identifier: Apache-2.0
"""A cut of the autograd graph, which each path from the loss to a parameter passes once.

At the edges of the cut the gradient has a row for each example. A factor on a row there multiplies
what the example adds to the gradient of each parameter. It does so once, as each path from the loss
is cut at the first edge of the cut that it reaches.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

from torch.autograd.graph import GradientEdge

from noisescale.collectors.halves.graph import (
    Graph,
    Node,
    Output,
    Region,
    kind,
    nodes_leading_to,
    walk,
)

_VIEWS = ("View", "UnsafeView", "_UnsafeView", "ReshapeAlias")


class CutEdge(NamedTuple):
    """An edge that is cut."""

    node: Node | None
    """See `Edge`."""
    position: int
    repeats: int
    """Rows for each example, next to each other."""


class Cut(NamedTuple):
    """The edges that are cut, and what is reached past them."""

    edges: list[CutEdge]
    outside: list[int]
    """Parameters, by index, that are reached by a path that is not cut."""
    region: Region
    """What is between the loss and the cut."""

    @property
    def pattern(self) -> Pattern:
        """A pattern that finds the cut again in a graph built in the same way."""
        places = {node: place for place, node in enumerate(self.region.nodes)}
        return Pattern(
            tuple((node.name(), len(further)) for node, further in self.region.nodes.items()),
            tuple(
                (-1 if e.node is None else places[e.node], e.position, e.repeats)
                for e in self.edges
            ),
        )


class Pattern(NamedTuple):
    """The part of a graph between the loss and a cut."""

    names: tuple[tuple[str, int], ...]
    """Kinds of nodes in the order of the walk, and how many gradients each passes on."""
    stops: tuple[tuple[int, int, int], ...]
    """The node, the position and the repeats of each edge that is cut.

    A node is given by its place in the walk; -1 is the start.
    """


def find_cut(
    graph: Graph,
    rows: int,
    outputs: Mapping[Output, int],
    parameters: Mapping[int, int],
    *,
    scalars: Collection[int] = (),
) -> Cut:
    """Return the cut, which separates all parameters from the loss if there is such a cut.

    The search prefers edges into outputs of modules, first of modules that no other module called.
    If that leaves out parameters, it takes edges into the tensors nearest to the loss whose first
    dimension is the rows of the batch. A tensor with a row and a column for each example
    (similarities) is cut only if no cut above it exists, and one with k rows for each example only
    behind the view that made them.

    Args:
        graph: The graph of the loss.
        rows: Rows of the batch.
        outputs: Outputs of modules, and how deep each module was called in others.
        parameters: Ids of the trained parameters, with their indices.
        scalars: Indices of parameters that the cut may leave out: factors such as a temperature.
    """
    search = _Search(graph, rows, outputs, parameters, frozenset(scalars))
    best: Cut | None = None
    least = 0
    for repeats in (False, True):
        for squares in (False, True):
            cut = search.cut(squares=squares, repeats=repeats)
            lost = len([index for index in cut.outside if index not in search.scalars])
            if cut.edges and not lost:
                return cut
            if best is None or (not best.edges, least) > (not cut.edges, lost):
                best, least = cut, lost
    assert best is not None
    return best


def find_again(loss: GradientEdge, rows: int, pattern: Pattern) -> list[CutEdge] | None:
    """Return the edges of a cut in a graph built like an earlier one; None if it differs."""
    graph = Graph(loss)
    stops = {(place, position): repeats for place, position, repeats in pattern.stops}
    places: dict[Node | None, int] = {None: -1}
    edges: list[CutEdge] = []
    left = [graph.start]
    while left:
        edge = left.pop()
        repeats = stops.get((places[edge.node], edge.position))
        node = edge.output[0]
        if repeats is not None:
            if graph.shape(edge.output)[:1] != (rows * repeats,):
                return None
            edges.append(CutEdge(edge.node, edge.position, repeats))
        elif node not in places:
            place = len(places) - 1
            further = graph.edges(node)
            if place >= len(pattern.names) or pattern.names[place] != (node.name(), len(further)):
                return None
            places[node] = place
            left.extend(reversed(further))
    complete = len(places) - 1 == len(pattern.names) and len(edges) == len(pattern.stops)
    return edges if complete else None


class _Search:
    """A search for a cut of one graph."""

    def __init__(
        self,
        graph: Graph,
        rows: int,
        outputs: Mapping[Output, int],
        parameters: Mapping[int, int],
        scalars: Collection[int],
    ) -> None:
        self.scalars = scalars
        self._graph = graph
        self._rows = rows
        self._outputs = outputs
        self._parameters = parameters
        self._repeated: dict[Output, int] = {}

    def cut(self, *, squares: bool, repeats: bool) -> Cut:
        """Cut at the outputs that were called least deep, and below where that leaves some out."""
        for depth in sorted(set(self._outputs.values())):
            called = {output for output, at in self._outputs.items() if at <= depth}
            cut, met = self._cut(called, squares=squares, repeats=repeats)
            if met:
                return cut
        return self._cut(frozenset(), squares=squares, repeats=repeats)[0]

    def _cut(self, called: Collection[Output], *, squares: bool, repeats: bool) -> tuple[Cut, bool]:
        """Return a cut, and whether it goes through an output of `called`."""
        graph = self._graph
        avoided: Collection[Node] = frozenset()
        if not squares:
            above = graph.region(
                lambda output: (
                    output in called
                    and len(graph.shape(output)) > 1
                    and not self._is_square(output)
                    and self._repeats(output, repeats)
                )
            )
            coupled = [
                node
                for node in above.nodes
                if any(self._is_square((node, i)) for i in range(len(graph.shapes(node))))
                and not graph.is_weight(node)
            ]
            avoided = nodes_leading_to(above, coupled)

        def takes(output: Output) -> int:
            node = output[0]
            if node in avoided or (not squares and self._is_square(output)):
                return 0
            return 0 if graph.is_weight(node) else self._repeats(output, repeats)

        region = graph.region(lambda output: output in called and takes(output))
        met = bool(region.stops)
        past = self._trained_parameters(region)
        leaky: Collection[Node] = frozenset()
        if {index for index in past.values() if index not in self.scalars} or not met:
            leaky = nodes_leading_to(
                region, [n for n, i in past.items() if not met or i not in self.scalars]
            )

        def stops_at(output: Output) -> bool:
            return (output in called or output[0] in leaky) and bool(takes(output))

        region = graph.region(stops_at)
        # What is behind a cut is cut off there: a way round the cut is cut before it comes to that.
        behind = graph.nodes_behind([edge.output[0] for edge in region.stops])
        if not behind.isdisjoint(region.nodes):
            region = graph.region(
                lambda output: takes(output) and (stops_at(output) or output[0] in behind)
            )
        past = self._trained_parameters(region)
        edges = [CutEdge(e.node, e.position, takes(e.output)) for e in region.stops]
        return Cut(edges, sorted(set(past.values())), region), met

    def _trained_parameters(self, region: Region) -> dict[Node, int]:
        """Return the trained parameters in a region: no stop separates them from the loss."""
        return {
            node: self._parameters[id(node.variable)]
            for node in region.nodes
            if hasattr(node, "variable") and id(node.variable) in self._parameters
        }

    def _is_square(self, output: Output) -> bool:
        return self._graph.shape(output) == (self._rows, self._rows)

    def _repeats(self, output: Output, several: bool) -> int:
        """Return how many neighbouring rows each example has in an output; 0 if it has none."""
        shape = self._graph.shape(output)
        if shape[:1] == (self._rows,):
            return 1
        if not several or not shape or not shape[0] or shape[0] % self._rows:
            return 0
        if output not in self._repeated:
            self._repeated[output] = shape[0] // self._rows if self._was_viewed(output) else 0
        return self._repeated[output]

    def _was_viewed(self, output: Output) -> bool:
        """Return whether an output's rows come from a view of a tensor with the batch in front."""

        def leading_to(node: Node, rows: tuple[int, ...]) -> list[Node]:
            edges = self._graph.edges(node)
            return [e.output[0] for e in edges if self._graph.shape(e.output)[:1] == rows]

        flat = self._graph.shape(output)[:1]
        return any(
            kind(node) in _VIEWS and leading_to(node, (self._rows,))
            for node in walk([output[0]], lambda node: leading_to(node, flat))
        )
