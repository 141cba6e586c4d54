# SPDX-License-Identifier: Apache-2.0
"""A backward pass of our own, with a factor on each row of the batch at the cut."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge
from torch.nn import Parameter

from noisescale.batches.row_groups import RowGroups
from noisescale.collectors.halves.cut import CutEdge
from noisescale.collectors.halves.graph import Node
from noisescale.collectors.halves.upset import hooks_of_tensors, silenced
from noisescale.collectors.own_pass import own_pass


def signs(parts: int, draw: int, device: torch.device, groups: RowGroups | None = None) -> Tensor:
    """Return +1 for a random half of the parts and -1 for the other; 0 for an odd part.

    Parts are rows, or `groups` of rows: then each row has the sign of its group. The same `draw`
    gives the same halves.
    """
    half = parts // 2
    sizes = [half, half, parts - 2 * half]
    ordered = np.repeat(np.array([1.0, -1.0, 0.0], dtype=np.float32), sizes)
    drawn = torch.from_numpy(np.random.default_rng(draw).permutation(ordered))
    of_rows = drawn if groups is None else drawn[groups.of_rows]
    return of_rows.to(device, non_blocking=True)


def row_pass(
    loss: GradientEdge,
    gradient: Tensor,
    edges: Sequence[CutEdge],
    factors: Tensor,
    parameters: Sequence[Parameter],
    on_gradient: Callable[[int, Tensor], None],
    live: list[Tensor] | None = None,
) -> None:
    """Run a backward pass, multiply each row by its factor at the cut, and show the gradients.

    The pass leaves no trace: gradients are not added to `p.grad` and not kept, random numbers that
    it draws are drawn again by later passes, and hooks of tensors are not called.

    Args:
        loss: What the pass starts from.
        gradient: The gradient that the pass starts with.
        edges: The cut.
        factors: Shape (rows,).
        parameters: The parameters whose gradients are wanted.
        on_gradient: Called in hooks with an index and a gradient, which is gone after the call.
        live: Receives for each edge which rows have a gradient there that is not zero.
    """
    rows = len(factors)
    wanted = [i for i, p in enumerate(parameters) if p.requires_grad]
    factor_of = {
        repeats: factors if repeats == 1 else factors.repeat_interleave(repeats)
        for repeats in {edge.repeats for edge in edges}
    }
    cut: dict[Node, dict[int, Tensor]] = {}
    for edge in edges:
        cut.setdefault(edge.node, {})[edge.position] = factor_of[edge.repeats]
    for factor in cut.pop(None, {}).values():  # the pass starts with rows
        gradient = _noted(live, rows, _scaled(gradient, factor), gradient)
    with ExitStack() as held, torch.no_grad(), own_pass(), random_numbers_kept(factors.device):
        held.enter_context(silenced(hooks_of_tensors(parameters)))
        for node, at in cut.items():
            held.callback(node.register_hook(partial(_scale_rows, at, live, rows)).remove)
        for index in wanted:
            hook = partial(_show, on_gradient, index)
            held.callback(parameters[index].register_hook(hook).remove)
        torch.autograd.grad(
            loss, [parameters[i] for i in wanted], gradient, retain_graph=True, allow_unused=True
        )


def _scale_rows(
    at: dict[int, Tensor],
    live: list[Tensor] | None,
    rows: int,
    inputs: tuple[Tensor | None, ...],
    _: Any,
) -> tuple[Tensor | None, ...]:
    return tuple(
        gradient
        if gradient is None or position not in at
        else _noted(live, rows, _scaled(gradient, at[position]), gradient)
        for position, gradient in enumerate(inputs)
    )


def _noted(live: list[Tensor] | None, rows: int, scaled: Tensor, gradient: Tensor) -> Tensor:
    """Return `scaled`, and note which rows of the gradient are not zero."""
    if live is not None:
        largest = torch.linalg.vector_norm(gradient.reshape(rows, -1), torch.inf, dim=1)
        live.append(largest != 0)
    return scaled


def _scaled(gradient: Tensor, factor: Tensor) -> Tensor:
    shape = (-1, *[1] * (gradient.dim() - 1))
    return gradient * factor.to(gradient.dtype).reshape(shape)


def _show(
    on_gradient: Callable[[int, Tensor], None], index: int, gradient: Tensor
) -> Tensor | None:
    on_gradient(index, gradient)
    if gradient.layout is not torch.strided:
        return None
    return gradient.new_zeros(()).expand_as(gradient)


@contextmanager
def random_numbers_kept(device: torch.device) -> Iterator[None]:
    """Restore the random number generators after a block."""
    of_torch, of_numpy, of_python = torch.get_rng_state(), np.random.get_state(), random.getstate()
    of_device = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    try:
        yield
    finally:
        torch.set_rng_state(of_torch)
        np.random.set_state(of_numpy)
        random.setstate(of_python)
        if of_device is not None:
            torch.cuda.set_rng_state(of_device, device)
