# SPDX-License-Identifier: Apache-2.0
"""Losses in which rows act on each other: contrastive ones, functions of means over the batch.

A row acts on the gradient of such a loss in two ways: through its own gradient, and through its
effect on the gradients of other rows. Rows that are signed at a cut show only the first effect. By
Hoeffding's decomposition the second effect is of the same order, however large the batch.

References:
    Hoeffding 1948, "A class of statistics with asymptotically normal distribution".
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from torch import Tensor

from noisescale.batches.row_groups import RowGroups
from noisescale.collectors.halves.cut import Cut
from noisescale.collectors.halves.graph import (
    Edge,
    Graph,
    Node,
    Output,
    Region,
    dimensions_of,
    kind,
    order_from_stops,
    walk,
)

_PRODUCTS = {"Mm", "Bmm", "Addmm", "Baddbmm", "Cdist", "EuclideanDist"}
_ELEMENTWISE_PRODUCTS = {"Mul", "Div", "Dot", "Mv"}
_SUMS = {"Sum", "Mean", "Nansum"}
_SPREADS = {"Std", "Var", "StdMean", "VarMean", "Norm", "LinalgVectorNorm", "Prod"}
_SOFT = {"Softmax", "LogSoftmax"}
_ORDERS = {
    "Sort", "Topk", "Max", "Min", "Amax", "Amin", "Median", "Nanmedian", "Kthvalue", "Mode",
    "Cummax", "Cummin",
}  # fmt: skip
_DIFFERENCES = {"Sub", "L1Loss", "SmoothL1Loss", "HuberLoss", "MseLoss"}
_PARTS = {"Split", "SplitWithSizes", "Unbind"}
_CURVED = {
    *_SOFT, *_SPREADS, "Pow", "Exp", "Expm1", "Log", "Log1P", "Log2", "Log10", "Logsumexp", "Sqrt",
    "Rsqrt", "Reciprocal", "Sigmoid", "LogSigmoid", "Tanh", "Softplus", "Xlogy", "Cosh", "MseLoss",
    "HuberLoss", "SmoothL1Loss", "BinaryCrossEntropy", "BinaryCrossEntropyWithLogits", "KlDiv",
}  # fmt: skip


class _Parts(NamedTuple):
    """The sizes of the parts that rows were split into."""

    rows: tuple[int, ...]


class _Step(NamedTuple):
    """A node between the loss and the cut."""

    kind: str
    shape: tuple[int, ...]
    inputs: int
    edges: tuple[Edge, ...]
    from_rows: list[Edge]
    """The node's edges whose tensors come from the cut."""
    summed: list[bool]
    """Whether rows have been summed over, for each edge of `from_rows`."""
    picked: list[tuple[Hashable, ...]]
    """How rows were picked out of the batch, for each edge of `from_rows`."""


def first_coupling(
    graph: Graph, cut: Cut, rows: int, groups: RowGroups | None = None, *, derived: bool = False
) -> str | None:
    """Name an operation between the loss and the cut that makes rows act on each other, or None.

    1. A product or distance of two matrices that both come from rows of the cut: rows are
       dimensions of what it gives (similarities), or summed over (covariances). So is a sum or a
       difference for which rows are laid out in two dimensions.
    2. A softmax, a spread, a log-sum-exp, a maximum, or an order of rows.
    3. A function that is not linear of what rows were summed or averaged to: products and quotients
       (Dice, correlations), powers (of a gradient, say). A root of one number is allowed: it
       changes only the gradient's length, and little in a batch. So do other functions of one
       number, but the sum of several such functions may not: they are left to the derivatives,
       where those can be had.
    4. A difference of rows that were picked in two ways: `z[0::2] - z[1::2]`. Derivatives do not
       show it where the loss is piecewise linear in it. Of groups only rows of two groups count.

    Args:
        graph: The graph of the loss.
        cut: Its cut.
        rows: Rows of the batch.
        groups: Of rows that may act on each other.
        derived: Whether derivatives say something about the loss as well.
    """
    for edge in cut.region.stops:
        if maker := _maker_of_similarities(graph, edge.output, rows):
            return maker
    stops = set(cut.region.stops)
    leading = order_from_stops(cut.region)
    summed: dict[Node, bool] = {}
    picked: dict[Node, tuple[Hashable, ...]] = {}
    for node in leading:
        edges = cut.region.nodes[node]
        from_rows = [edge for edge in edges if edge in stops or edge.output[0] in leading]
        step = _Step(
            kind(node),
            graph.shape((node, 0)),
            len(node.next_functions),
            edges,
            from_rows,
            [edge not in stops and summed.get(edge.output[0], False) for edge in from_rows],
            [() if edge in stops else _picks_of(edge, picked) for edge in from_rows],
        )
        if _meets(graph, node, step, rows, groups, derived):
            return f"{step.kind} of shape {step.shape}"
        summed[node] = _is_summed(graph, node, step, rows)
        if not summed[node]:
            picked[node] = (*step.picked[0], *_pick(graph, node, step, rows))
    return None


def _picks_of(edge: Edge, picked: Mapping[Node, tuple[Hashable, ...]]) -> tuple[Hashable, ...]:
    how = picked.get(edge.output[0], ())
    return (*how, edge.output[1]) if how and isinstance(how[-1], _Parts) else how


def _pick(graph: Graph, node: Node, step: _Step, rows: int) -> tuple[Hashable, ...]:
    """Return how a node picks rows, or orders them; empty if it leaves rows as they are."""
    shape = graph.shape(step.from_rows[0].output)
    if not has_rows(shape[:1], rows):
        return ()
    if step.kind == "Index":
        chosen = node._saved_indices[0]
        return () if chosen is None else ((step.kind, *_content(chosen)),)
    if 0 not in dimensions_of(node, len(shape)):
        return ()
    if step.kind == "Slice":
        whole = step.shape[:1] == shape[:1]
        bounds = node._saved_start, node._saved_end, node._saved_step
        return () if whole else ((step.kind, *bounds),)
    if step.kind in {"IndexSelect", "Gather"}:
        return ((step.kind, *_content(node._saved_index)),)
    if step.kind in {"Select", "Roll"}:
        how = node._saved_index if step.kind == "Select" else tuple(node._saved_shifts)
        return ((step.kind, how),)
    if step.kind in _PARTS:
        return (_Parts(tuple((1, *one)[-len(shape)] for one in graph.shapes(node))),)
    return ((step.kind,),) if step.kind == "Flip" else ()


def _content(index: Tensor) -> tuple[str, bytes]:
    content = index.detach().cpu().numpy()
    return content.dtype.str, content.tobytes()


def _groups_after(how: tuple[Hashable, ...], groups: RowGroups) -> Hashable:
    """Return the groups of rows that were picked by `how`; `how` itself if these are not known."""
    now, parts = groups.of_rows.numpy(), [groups.of_rows.numpy()]
    for pick in how:
        match pick:
            case _Parts(sizes) if sum(sizes) == len(now):
                parts = np.split(now, np.cumsum(sizes)[:-1])
            case int(which):
                now = parts[which]
            case ("Slice", int(start), int(end), int(step)):
                now = now[start:end:step]
            case ("Index" | "IndexSelect", str(dtype), bytes(content)):
                now = now[np.frombuffer(content, dtype)]
            case _:
                return how
    return tuple(now.tolist())


def is_root_of_one_number(graph: Graph, node: Node) -> bool:
    """Return whether a node gives the root of one number."""
    root = kind(node) == "Pow" and getattr(node, "_saved_exponent", None) == 0.5
    return not graph.shape((node, 0)) and (root or kind(node) == "Sqrt")


def is_chain(region: Region) -> bool:
    """Return whether each operation of a loss has one input.

    Rows then act on each other only in operations whose name says it.
    """
    return all(len(edges) <= 1 for edges in region.nodes.values())


def _maker_of_similarities(graph: Graph, output: Output, rows: int) -> str | None:
    """Name the product that made a cut tensor with a row and a column for each example.

    A matrix of logits is as large where there are as many classes, but made by a weight.
    """

    def is_product(one: Output) -> bool:
        return kind(one[0]) in _PRODUCTS and len(graph.shape(one)) == 2

    def squares(made_of: list[Output]) -> list[Output]:
        return [one for one in made_of if graph.shape(one)[:2] == (rows, rows)]

    def further(one: Output) -> list[Output]:
        return [] if is_product(one) else squares([e.output for e in graph.edges(one[0])])

    for one in walk(squares([output]), further):
        node = one[0]
        if is_product(one):
            factors = [e for e in graph.edges(node) if e.position >= len(node.next_functions) - 2]
            if len(factors) == 2 and not any(graph.is_weight(e.output[0]) for e in factors):
                return f"{kind(node)} of shape {(rows, rows)}"
    return None


def _meets(
    graph: Graph, node: Node, step: _Step, rows: int, groups: RowGroups | None, derived: bool
) -> bool:
    shapes = [graph.shape(edge.output) for edge in step.from_rows]
    if step.kind in _PRODUCTS and _is_of_rows(step, rows, groups):
        return True
    if _is_spread_out(step.shape, shapes, rows):
        return True
    over_rows = _sums_over_rows(node, shapes, step.shape, rows)
    if over_rows and (
        step.kind in {*_SOFT, *_ORDERS, "Logsumexp"} or (step.kind in _SPREADS and step.shape)
    ):
        return True
    if step.kind in _DIFFERENCES and len(set(step.picked)) > 1 and not any(step.summed):
        of_groups = {_groups_after(how, groups) for how in step.picked} if groups else step.picked
        return groups is None or len(of_groups) > 1
    if not any(step.summed):
        return False
    if step.kind in _ELEMENTWISE_PRODUCTS | _PRODUCTS:
        return len(step.from_rows) > 1 or (step.kind == "Div" and step.from_rows[0].position == 1)
    of_one_number = not step.shape and len(step.from_rows) == 1
    if is_root_of_one_number(graph, node) or (derived and of_one_number):
        return False
    return step.kind in _CURVED


def _is_summed(graph: Graph, node: Node, step: _Step, rows: int) -> bool:
    """Return whether rows have been summed over in what the node gives."""
    if all(step.summed) or not step.shape:
        return True
    if step.kind in _PRODUCTS and len(step.shape) == 2:
        return any(_is_summed_by_product(graph, step, edge, rows) for edge in step.from_rows)
    shapes = [graph.shape(edge.output) for edge in step.from_rows]
    sums = step.kind in _SUMS | _SPREADS | {"Logsumexp"}
    return sums and _sums_over_rows(node, shapes, step.shape, rows)


def _is_summed_by_product(graph: Graph, step: _Step, edge: Edge, rows: int) -> bool:
    """Return whether a product of two matrices sums over the rows of a factor: Xᵀ·W, or W·X."""
    shape = graph.shape(edge.output)
    if edge.position == step.inputs - 1:
        return has_rows(shape[:1], rows)
    return edge.position == step.inputs - 2 and (
        not has_rows(shape[:1], rows) and has_rows(shape[1:2], rows)
    )


def _sums_over_rows(
    node: Node, inputs: Sequence[tuple[int, ...]], shape: tuple[int, ...], rows: int
) -> bool:
    """Return whether an operation goes over the first dimension, where that has rows."""
    if not any(has_rows(one[:1], rows) for one in inputs):
        return False
    dimensions = len(next(one for one in inputs if has_rows(one[:1], rows)))
    over = dimensions_of(node, dimensions)
    if not over:
        return not shape
    kept = str(node.name()).startswith(("Softmax", "LogSoftmax"))
    # Of (length, batch, ...) the batch may be left in front.
    one_a_row = any(one[:1] == (rows,) for one in inputs)
    return 0 in over and (kept or one_a_row or shape[:1] != (rows,))


def _is_of_rows(step: _Step, rows: int, groups: RowGroups | None) -> bool:
    """Return whether both factors of a product, its last two inputs, come from rows of the cut.

    One that needs no gradient may be anything: rows, if there are as many.
    """
    shape = step.shape
    within = rows if groups is None else groups.number
    if len(shape) == 3 and (has_rows(shape[:1], rows) or shape[0] == within):
        return False  # a product within each row, or each group
    factors = [edge for edge in step.edges if edge.position >= step.inputs - 2]
    if not factors or any(edge not in step.from_rows for edge in factors):
        return False
    return len(factors) == 2 or (shape[-1] == shape[-2] and has_rows(shape[-1:], rows))


def _is_spread_out(shape: tuple[int, ...], inputs: Sequence[tuple[int, ...]], rows: int) -> bool:
    """Return whether rows are in the first two dimensions, but in the second one of an input."""
    if len(shape) < 2 or shape[0] != shape[1] or not has_rows(shape[:1], rows):
        return False
    return any(one[:2] == (1, shape[1]) for one in inputs)


def has_rows(leading: tuple[int, ...], rows: int) -> bool:
    """Return whether the first dimension has one or more rows for each example."""
    return bool(leading) and leading[0] > 0 and leading[0] % rows == 0
