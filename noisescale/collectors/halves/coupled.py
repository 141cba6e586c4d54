# SPDX-License-Identifier: Apache-2.0
"""Losses in which rows act on each other: contrastive ones, functions of means over the batch.

A row acts on the gradient of such a loss in two ways: through its own gradient, and through its
effect on the gradients of other rows. Rows that are signed at a cut show only the first effect. By
Hoeffding's decomposition the second effect is of the same order, however large the batch.

References:
    Hoeffding 1948, "A class of statistics with asymptotically normal distribution".
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from noisescale.collectors.halves.cut import Cut
from noisescale.collectors.halves.graph import (
    Edge,
    Graph,
    Node,
    Output,
    Region,
    kind,
    that_lead_to,
    walk,
)

_PRODUCTS = {"Mm", "Bmm", "Addmm", "Baddbmm", "Cdist", "EuclideanDist"}
_ELEMENTWISE_PRODUCTS = {"Mul", "Div", "Dot", "Mv"}
_SUMS = {"Sum", "Mean", "Nansum"}
_SPREADS = {"Std", "Var", "StdMean", "VarMean", "Norm", "LinalgVectorNorm", "Prod"}
_SOFT = {"Softmax", "LogSoftmax"}
_CURVED = {
    *_SOFT, *_SPREADS, "Pow", "Exp", "Expm1", "Log", "Log1P", "Log2", "Log10", "Logsumexp", "Sqrt",
    "Rsqrt", "Reciprocal", "Sigmoid", "LogSigmoid", "Tanh", "Softplus", "Xlogy", "Cosh", "MseLoss",
    "HuberLoss", "SmoothL1Loss", "BinaryCrossEntropy", "BinaryCrossEntropyWithLogits", "KlDiv",
}  # fmt: skip


class _Step(NamedTuple):
    """A node between the loss and the cut."""

    kind: str
    shape: tuple[int, ...]
    inputs: int
    edges: tuple[Edge, ...]
    from_rows: list[Edge]
    """Those of its edges whose tensors come from the cut."""
    summed: list[bool]
    """Of each of those, whether rows have been summed over."""


def where_rows_meet(graph: Graph, cut: Cut, rows: int) -> str | None:
    """Name an operation between the loss and the cut that makes rows act on each other, or None.

    1. A product or distance of two matrices that both come from rows of the cut: rows are
       dimensions of what it gives (similarities), or summed over (covariances). So is a sum or a
       difference for which rows are laid out in two dimensions.
    2. A softmax, a spread or a log-sum-exp over rows.
    3. A function that is not linear of what rows were summed or averaged to: products and quotients
       (Dice, correlations), powers (of a gradient, say). A root of one number is allowed: it
       changes only the gradient's length, and little in a batch.
    """
    for edge in cut.region.stops:
        if maker := _maker_of_similarities(graph, edge.output, rows):
            return maker
    stops = set(cut.region.stops)
    ends = [edge.node for edge in stops if edge.node is not None]
    leading = that_lead_to(cut.region, ends)
    summed: dict[Node, bool] = {}
    for node in _from_the_cut_on(cut.region, leading):
        edges = cut.region.nodes[node]
        from_rows = [edge for edge in edges if edge in stops or edge.output[0] in leading]
        step = _Step(
            kind(node),
            graph.shape((node, 0)),
            len(node.next_functions),
            edges,
            from_rows,
            [edge not in stops and summed.get(edge.output[0], False) for edge in from_rows],
        )
        if _meets(graph, node, step, rows):
            return f"{step.kind} of shape {step.shape}"
        summed[node] = _is_summed(graph, node, step, rows)
    return None


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


def _from_the_cut_on(region: Region, leading: Collection[Node]) -> list[Node]:
    """The nodes that lead to the cut, each after those that it leads to."""
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
    return list(ordered)


def _meets(graph: Graph, node: Node, step: _Step, rows: int) -> bool:
    shapes = [graph.shape(edge.output) for edge in step.from_rows]
    if step.kind in _PRODUCTS and _is_of_rows(step, rows):
        return True
    if _is_spread_out(step.shape, shapes, rows):
        return True
    over_rows = _sums_over_rows(node, shapes, step.shape, rows)
    if over_rows and (step.kind in {*_SOFT, "Logsumexp"} or (step.kind in _SPREADS and step.shape)):
        return True
    if not any(step.summed):
        return False
    if step.kind in _ELEMENTWISE_PRODUCTS | _PRODUCTS:
        return len(step.from_rows) > 1 or (step.kind == "Div" and step.from_rows[0].position == 1)
    return step.kind in _CURVED and not _is_root_of_one_number(node, step)


def _is_summed(graph: Graph, node: Node, step: _Step, rows: int) -> bool:
    """Whether rows have been summed over in what the node gives."""
    if all(step.summed) or not step.shape:
        return True
    if step.kind in _PRODUCTS and len(step.shape) == 2:
        return any(_is_summed_by_product(graph, step, edge, rows) for edge in step.from_rows)
    shapes = [graph.shape(edge.output) for edge in step.from_rows]
    sums = step.kind in _SUMS | _SPREADS | {"Logsumexp"}
    return sums and _sums_over_rows(node, shapes, step.shape, rows)


def _is_summed_by_product(graph: Graph, step: _Step, edge: Edge, rows: int) -> bool:
    """Whether a product of two matrices sums over the rows of a factor: Xᵀ·W, or W·X."""
    shape = graph.shape(edge.output)
    if edge.position == step.inputs - 1:
        return _has_rows(shape[:1], rows)
    return edge.position == step.inputs - 2 and (
        not _has_rows(shape[:1], rows) and _has_rows(shape[1:2], rows)
    )


def _sums_over_rows(
    node: Node, inputs: Sequence[tuple[int, ...]], shape: tuple[int, ...], rows: int
) -> bool:
    """Whether an operation goes over the first dimension, where that has rows."""
    if not any(_has_rows(one[:1], rows) for one in inputs):
        return False
    over = getattr(node, "_saved_dim", None)
    if over is None:
        return not shape
    dimensions = len(next(one for one in inputs if _has_rows(one[:1], rows)))
    listed = over if isinstance(over, tuple | list) else [over]
    # Torch shows negative dimensions as unsigned numbers.
    first = {(d - 2**64 if d >= 2**63 else d) % dimensions for d in listed} or {0}
    kept = str(node.name()).startswith(("Softmax", "LogSoftmax"))
    # Of (length, batch, ...) the batch may be left in front.
    one_a_row = any(one[:1] == (rows,) for one in inputs)
    return 0 in first and (kept or one_a_row or shape[:1] != (rows,))


def _is_of_rows(step: _Step, rows: int) -> bool:
    """Whether both factors of a product, its last two inputs, come from rows of the cut.

    One that needs no gradient may be anything: rows, if there are as many.
    """
    shape = step.shape
    if len(shape) == 3 and _has_rows(shape[:1], rows):
        return False  # a product within each row
    factors = [edge for edge in step.edges if edge.position >= step.inputs - 2]
    if not factors or any(edge not in step.from_rows for edge in factors):
        return False
    return len(factors) == 2 or (shape[-1] == shape[-2] and _has_rows(shape[-1:], rows))


def _is_spread_out(shape: tuple[int, ...], inputs: Sequence[tuple[int, ...]], rows: int) -> bool:
    """Whether rows stand in its first two dimensions, while an input has them in the second."""
    if len(shape) < 2 or shape[0] != shape[1] or not _has_rows(shape[:1], rows):
        return False
    return any(one[:2] == (1, shape[1]) for one in inputs)


def _is_root_of_one_number(node: Node, step: _Step) -> bool:
    if step.shape:
        return False
    root = step.kind == "Pow" and getattr(node, "_saved_exponent", None) == 0.5
    return root or step.kind == "Sqrt"


def _has_rows(leading: tuple[int, ...], rows: int) -> bool:
    return bool(leading) and leading[0] > 0 and leading[0] % rows == 0
