# SPDX-License-Identifier: Apache-2.0
"""A backward pass of our own, with a factor on each row of the batch at the cut, and its proof.

With the factor ½ on all rows, the gradient must halve. A path that the cut misses gives the factor
1, and a path that is cut twice gives ¼. Setting rows to zero would not show paths that are cut
twice, and doubling the gradient may overflow in 16 bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
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
from noisescale.collectors.squared_norms import squared_norm, sums_of
from noisescale.estimation.row_similarity import RowSimilarity


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


class RowsAtCut:
    """Collects means and variances of log|dL/dz_i|, on the device until measured steps are read.

    Args:
        found: What receives them.
    """

    def __init__(self, found: RowSimilarity) -> None:
        self._found = found
        self._rows: list[tuple[float, bool, Tensor]] = []
        self._sent = 0
        self._follows = False

    def add(self, sq_norms: Tensor, size: float) -> None:
        """Receive |dL/dz_i|² of all rows, shape (rows,). Rows without a loss do not count."""
        some = sq_norms > 0
        logs = torch.where(some, sq_norms, 1.0).log() / 2
        number = some.sum()
        mean = logs.sum() / number
        variance = torch.where(some, (logs - mean).square(), 0.0).sum() / (number - 1)
        numbers = torch.stack([number.to(mean.dtype), mean, variance])
        self._rows.append((size, self._follows, numbers))
        self._follows = True

    def leave_gap(self) -> None:
        """Note that a step is not measured."""
        self._follows = False

    def unread(self) -> Sequence[Tensor]:
        """Return the numbers on the device."""
        self._sent = len(self._rows)
        return [numbers for *_, numbers in self._rows]

    def take(self, numbers: Sequence[Sequence[float]]) -> None:
        """Receive what is in them."""
        for (size, follows, _), one in zip(self._rows, numbers, strict=False):
            if not follows:
                self._found.add_gap()
            self._found.add_rows(*one, size=size)
        del self._rows[: self._sent]


FACTOR = 0.5
"""The factor on all rows."""

LARGEST_ERROR = 0.01
"""The most error that a proof allows, as a share of |g/2|²."""

_NAMED = 3


class Proof:
    """Compares the gradients of a pass with the factor ½ with those of the training's own pass."""

    def __init__(self, names: Sequence[str], left_out: Collection[int]) -> None:
        self._names = names
        self._left_out = left_out
        self._halved: dict[int, Tensor] = {}
        self._errors: dict[int, Tensor] = {}
        self._totals: dict[int, Tensor] = {}
        self._seen_twice = False

    def take_halved(self, index: int, gradient: Tensor) -> None:
        """Keep a gradient of the pass with the factor ½: see `row_pass`."""
        self._halved[index] = gradient.detach().clone()

    def take_own(self, index: int, gradient: Tensor) -> None:
        """Compare a halved gradient with that of the training's own pass, and release both."""
        if index in self._left_out:
            return
        if index in self._totals:
            self._seen_twice = True
        half = FACTOR * gradient.detach()
        halved = self._halved.pop(index, None)
        self._totals[index] = _sq_norm(half)
        self._errors[index] = self._totals[index] if halved is None else _sq_norm(halved - half)

    @property
    def reached(self) -> bool:
        """Whether the training's own pass reached a parameter."""
        return bool(self._totals)

    def share(self) -> float:
        """Return the error as a share of |g/2|², read from the device; NaN if it is not known."""
        if not self._totals or self._seen_twice:
            return math.nan
        device = next(iter(self._totals.values())).device
        both = [list(some.values()) for some in (self._errors, self._totals)]
        errors, totals = sums_of(both, device=device).tolist()
        return errors / totals if 0 < totals < math.inf and errors < math.inf else math.nan

    def worst(self) -> str:
        """Name the parameters with the largest errors, and their share of the error."""
        errors = {self._names[i]: float(error) for i, error in self._errors.items()}
        whole = sum(errors.values())
        most = sorted(errors, key=errors.__getitem__, reverse=True)[:_NAMED]
        more = f" and {len(errors) - _NAMED} more" if len(errors) > _NAMED else ""
        return ", ".join(f"{name} ({errors[name] / whole:.0%})" for name in most if whole) + more


def _sq_norm(gradient: Tensor) -> Tensor:
    return squared_norm([gradient], device=gradient.device)
