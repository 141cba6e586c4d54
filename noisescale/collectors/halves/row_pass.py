# SPDX-License-Identifier: Apache-2.0
"""A backward pass of our own, with a factor on each row of the batch at the cut."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge
from torch.nn import Parameter

from noisescale.batches.row_groups import RowGroups
from noisescale.batches.to_device import to_device
from noisescale.collectors.halves.cut import CutEdge
from noisescale.collectors.halves.graph import Node, device_behind


def signs(parts: int, draw: int, groups: RowGroups | None = None) -> Tensor:
    """Return +1 for a random half of the parts and -1 for the other; 0 for an odd part. On CPU.

    Parts are rows, or `groups` of rows: then each row has the sign of its group. The same `draw`
    gives the same halves.
    """
    half = parts // 2
    sizes = [half, half, parts - 2 * half]
    ordered = np.repeat(np.array([1.0, -1.0, 0.0], dtype=np.float32), sizes)
    drawn = torch.from_numpy(np.random.default_rng(draw).permutation(ordered))
    return drawn if groups is None else drawn[groups.of_rows]


def row_pass(
    loss: GradientEdge,
    gradient: Tensor,
    edges: Sequence[CutEdge],
    factors: Tensor,
    parameters: Sequence[Parameter],
    on_gradient: Callable[[int, Tensor], None],
    sizes: list[Tensor] | None = None,
) -> None:
    """Run a backward pass, multiply each row by its factor at the cut, and show the gradients.

    Gradients are not added to `p.grad` and not kept. See `Bearing.leave_no_trace` for what else a
    pass may change.

    Args:
        loss: What the pass starts from.
        gradient: The gradient that the pass starts with.
        edges: The cut.
        factors: Shape (rows,), on the CPU.
        parameters: The parameters whose gradients are wanted.
        on_gradient: Called in hooks with an index and a gradient. What made the gradient may write
            to its memory again after the pass.
        sizes: Receives for each edge the norm of the gradient of each row there.
    """
    rows = len(factors)
    wanted = [i for i, p in enumerate(parameters) if p.requires_grad]
    factors_of: dict[tuple[int, bool], _Factors] = {}
    cut: dict[Node, dict[int, _Factors]] = {}
    for edge in edges:
        near = edge.node is None or device_behind(edge.node, edge.position) == gradient.device
        if (kind := (edge.repeats, near)) not in factors_of:
            device = gradient.device if near else None
            factors_of[kind] = _Factors(factors, edge.repeats, device)
        cut.setdefault(edge.node, {})[edge.position] = factors_of[kind]
    for factor in cut.pop(None, {}).values():  # the pass starts with rows
        gradient = _note_sizes(sizes, rows, factor.times(gradient), gradient)
    with ExitStack() as held, torch.no_grad():
        for node, at in cut.items():
            held.callback(node.register_hook(partial(_scale_rows, at, sizes, rows)).remove)
        zeros: dict[tuple[torch.device, torch.dtype], Tensor] = {}
        for index in wanted:
            hook = partial(_show, on_gradient, index, zeros)
            held.callback(parameters[index].register_hook(hook).remove)
        torch.autograd.grad(
            loss, [parameters[i] for i in wanted], gradient, retain_graph=True, allow_unused=True
        )


class _Factors:
    """A factor on each row of a gradient.

    Args:
        of_examples: On the CPU.
        repeats: Rows for each example.
        device: Where the gradient is, if the pass starts there. In a model on several devices it
            may be elsewhere: then it is None, and factors are copied when the gradient comes, on
            the stream that it comes on.
    """

    def __init__(self, of_examples: Tensor, repeats: int, device: torch.device | None) -> None:
        of_rows = of_examples if repeats == 1 else of_examples.repeat_interleave(repeats)
        self._of_rows = of_rows if device is None else to_device(of_rows, device)

    def times(self, gradient: Tensor) -> Tensor:
        """Return the gradient with its rows multiplied."""
        factor = to_device(self._of_rows, gradient.device)
        shape = (-1, *[1] * (gradient.dim() - 1))
        return gradient * factor.to(gradient.dtype).reshape(shape)


def _scale_rows(
    at: dict[int, _Factors],
    sizes: list[Tensor] | None,
    rows: int,
    inputs: tuple[Tensor | None, ...],
    _: Any,
) -> tuple[Tensor | None, ...]:
    return tuple(
        gradient
        if gradient is None or position not in at
        else _note_sizes(sizes, rows, at[position].times(gradient), gradient)
        for position, gradient in enumerate(inputs)
    )


def _note_sizes(sizes: list[Tensor] | None, rows: int, scaled: Tensor, gradient: Tensor) -> Tensor:
    """Return `scaled`, and note the norms of the rows of the gradient."""
    if sizes is not None:
        of_rows = gradient.detach().reshape(rows, -1)
        wide = torch.promote_types(
            torch.float32, of_rows.abs().dtype if of_rows.is_complex() else of_rows.dtype
        )
        sizes.append(torch.linalg.vector_norm(of_rows, dim=1).to(wide))
    return scaled


def _show(
    on_gradient: Callable[[int, Tensor], None],
    index: int,
    zeros: dict[tuple[torch.device, torch.dtype], Tensor],
    gradient: Tensor,
) -> Tensor | None:
    on_gradient(index, gradient)
    if gradient.layout is not torch.strided:
        return None
    kind = gradient.device, gradient.dtype
    zero = zeros.get(kind)
    if zero is None:
        zero = zeros[kind] = gradient.new_zeros(())
    return zero.expand_as(gradient)
