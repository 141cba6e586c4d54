# SPDX-License-Identifier: Apache-2.0
"""What the derivatives of a loss and of a network have in common: see `apart`.

Rows are drawn into a part A, v is random on A and zero elsewhere, and the derivative of what v
multiplies must be zero on other rows.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from noisescale.batches.row_groups import RowGroups
from noisescale.batches.to_device import to_device
from noisescale.collectors.halves.cut import Cut
from noisescale.collectors.halves.graph import Graph, Output

LARGEST_SHARE = 1e-4
"""The most of a derivative that may be on other rows: 2e-8 in sound losses, 0.0127 in others."""


class NoDerivativeError(Exception):
    """There is no second derivative; the text says why."""


def derivatives(
    of: Collection[Output] | Sequence[Tensor], starts: Sequence[Tensor], by: Sequence[Output]
) -> Sequence[Tensor | None]:
    """Return d(Σ starts·of)/d(by), by autograd's engine; None where one does not depend on it."""
    outputs: Any = [one if isinstance(one, Tensor) else GradientEdge(*one) for one in of]
    inputs: Any = [GradientEdge(*one) for one in by]
    found: Sequence[Tensor | None] = torch.autograd.grad(
        outputs, inputs, starts, retain_graph=True, allow_unused=True
    )
    return found


def ends_of(cut: Cut) -> dict[Output, int]:
    """Return the tensors at the cut, and how many rows each example has in them."""
    return {
        stop.output: edge.repeats for stop, edge in zip(cut.region.stops, cut.edges, strict=True)
    }


def parts_of(rows: int, most: int, groups: RowGroups | None = None) -> Iterator[Tensor]:
    """Yield vectors of 1 for a random half of the rows, or of whole groups, and 0 for others."""
    apart = rows if groups is None else groups.number
    order = torch.randperm(apart, generator=torch.Generator().manual_seed(apart), device="cpu")
    for bit in range(min(most, (apart - 1).bit_length())):
        part = (order >> bit & 1).float()
        yield part if groups is None else part[groups.of_rows]


def random_on_rows(
    graph: Graph,
    output: Output,
    factor: Tensor,
    generator: torch.Generator,
    *,
    alike: bool = False,
) -> Tensor:
    """Return random numbers of a tensor's shape, times a factor for each row; `alike` in all."""
    shape = graph.shape(output)
    dtype, device = graph.dtype_and_device(output)
    drawn = torch.randn(
        (1 if alike else shape[0], *shape[1:]),
        generator=generator,
        device="cpu",
        dtype=dtype if dtype.is_complex else torch.float32,
    )
    by_row = to_device(factor, device, dtype).reshape(-1, *[1] * (len(shape) - 1))
    drawn = to_device(drawn, device, dtype)
    return by_row * drawn if alike else drawn.mul_(by_row)


def sq_norms(one: Tensor) -> Tensor:
    """Return |row|² of each row."""
    if one.is_complex():
        one = torch.view_as_real(one)
    dtype = torch.promote_types(one.dtype, torch.float32)
    return one.reshape(len(one), -1).to(dtype).square().sum(1)
