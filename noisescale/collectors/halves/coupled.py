# SPDX-License-Identifier: Apache-2.0
"""Losses in which each row is compared with each other: contrastive ones, and their like.

Such a loss changes with a row in two ways: by the row's own embedding, and by what the other rows'
gradients become as they are compared with it. Rows that are signed at a cut show the first alone.
By Hoeffding's decomposition the second is of the same order, however large the batch.

References:
    Hoeffding 1948, "A class of statistics with asymptotically normal distribution".
"""

from __future__ import annotations

from collections.abc import Sequence

from noisescale.collectors.halves.cut import Cut
from noisescale.collectors.halves.graph import Edge, Graph, that_lead_to

_PRODUCTS = ("Mm", "Bmm", "Addmm", "Baddbmm", "Cdist", "EuclideanDist")


def where_rows_meet(graph: Graph, cut: Cut, rows: int) -> str | None:
    """Name an operation between the loss and the cut that brings each row to each other; or None.

    A product or distance of two matrices is one if both come from rows of the cut: rows are either
    dimensions of what it gives (similarities), or summed over (covariances). So is a sum or a
    difference for which rows are laid out in two dimensions.

    Args:
        graph: That of the loss.
        cut: Of the graph.
        rows: Of the batch.
    """
    ends = [edge.node for edge in cut.region.stops if edge.node is not None]
    leading = that_lead_to(cut.region, ends)
    stops = set(cut.region.stops)
    for node, edges in cut.region.nodes.items():
        shape = graph.shape((node, 0))
        from_rows = [edge for edge in edges if edge in stops or edge.output[0] in leading]
        kind = node.name().rstrip("0123456789").removesuffix("Backward")
        if kind in _PRODUCTS:
            meet = _is_of_rows(shape, from_rows, edges, len(node.next_functions), rows)
        else:
            meet = _is_spread(shape, [graph.shape(edge.output) for edge in from_rows], rows)
        if meet:
            return f"{kind} of shape {shape}"
    return None


def _is_of_rows(
    shape: tuple[int, ...],
    from_rows: Sequence[Edge],
    edges: Sequence[Edge],
    inputs: int,
    rows: int,
) -> bool:
    """Whether both factors of a product, its last two inputs, come from rows of the cut.

    One that needs no gradient may be anything: rows, if there are as many.
    """
    if len(shape) == 3 and _has_rows(shape[0], rows):
        return False  # a product within each row
    factors = [edge for edge in edges if edge.position >= inputs - 2]
    if not factors or any(edge not in from_rows for edge in factors):
        return False
    return len(factors) == 2 or (shape[-1] == shape[-2] and _has_rows(shape[-1], rows))


def _is_spread(shape: tuple[int, ...], inputs: Sequence[tuple[int, ...]], rows: int) -> bool:
    """Whether rows stand in its first two dimensions, while an input has them in the second."""
    if len(shape) < 2 or shape[0] != shape[1] or not _has_rows(shape[0], rows):
        return False
    return any(one[:2] == (1, shape[1]) for one in inputs)


def _has_rows(dimension: int, rows: int) -> bool:
    return dimension > 0 and dimension % rows == 0
