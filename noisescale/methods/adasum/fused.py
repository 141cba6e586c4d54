# SPDX-License-Identifier: Apache-2.0
"""Tensors of one dtype in one buffer, in which each tensor is a run of whole rows."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

WIDTH = 512
"""Elements of a row. The last row of a tensor is filled up with zeros, which change no product."""


class Fused:
    """Tensors of one kind in the rows of a matrix: sums by tensor are sums over runs of rows.

    Args:
        tensors: Dense real tensors of one dtype on one device.
        parts: The buffer can be cut into this number of parts of as many rows.
        in_place: Whether a single tensor of whole rows may be its own buffer.
    """

    def __init__(self, tensors: Sequence[Tensor], parts: int = 1, *, in_place: bool) -> None:
        first = tensors[0]
        lengths = [-(-each.numel() // WIDTH) for each in tensors]
        empty = -sum(lengths) % parts
        whole_rows = first.is_contiguous() and not first.numel() % (WIDTH * parts)
        if in_place and len(tensors) == 1 and whole_rows:
            self.rows = first.view(-1, WIDTH)
        else:
            self.rows = first.new_zeros(sum(lengths) + empty, WIDTH)
        of_row = torch.repeat_interleave(torch.tensor(lengths))
        self.tensor_of_row = torch.cat([of_row, of_row.new_full((empty,), len(tensors) - 1)]).to(
            first.device
        )
        runs = self.rows.split([*lengths, empty])
        self.views = [
            run.view(-1)[: each.numel()].view_as(each)
            for run, each in zip(runs, tensors, strict=False)
        ]
        """The part of the buffer of each tensor, in the tensor's shape."""

    def __len__(self) -> int:
        return len(self.views)


class Buffers:
    """Any tensors, in a `Fused` for each dtype and device.

    Args:
        tensors: Dense tensors. A complex one is taken as two real ones.
        parts: See `Fused`.
        in_place: See `Fused`.
    """

    def __init__(self, tensors: Sequence[Tensor], parts: int = 1, *, in_place: bool) -> None:
        self.tensors = [as_real(each) for each in tensors]
        self.fused = [
            (indices, Fused([self.tensors[i] for i in indices], parts, in_place=in_place))
            for indices in kinds_of(self.tensors)
        ]
        """Each buffer with the indices of its tensors."""
        self.views = list(self.tensors)
        for indices, fused in self.fused:
            for index, view in zip(indices, fused.views, strict=True):
                self.views[index] = view

    def pack(self) -> None:
        """Copy the tensors into the buffers."""
        copy_(self.views, self.tensors)

    def unpack(self) -> None:
        """Copy the buffers into the tensors."""
        copy_(self.tensors, self.views)


def kinds_of(tensors: Sequence[Tensor]) -> list[list[int]]:
    """Return the indices of the tensors of each dtype and device."""
    kinds: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for index, each in enumerate(tensors):
        kinds.setdefault((each.dtype, each.device), []).append(index)
    return list(kinds.values())


def as_real(tensor: Tensor) -> Tensor:
    """View a complex tensor as two real ones, apart from the graph."""
    tensor = tensor.detach()
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def copy_(into: Sequence[Tensor], tensors: Sequence[Tensor]) -> None:
    """Copy all tensors in one fused call, but not onto themselves."""
    pairs = [(x, y) for x, y in zip(into, tensors, strict=True) if x.data_ptr() != y.data_ptr()]
    if pairs:
        with torch.no_grad():
            torch._foreach_copy_([x for x, _ in pairs], [y for _, y in pairs])
