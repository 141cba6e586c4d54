# SPDX-License-Identifier: Apache-2.0
"""Squared norms of many tensors in few kernels, exact where float32 sums are not."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

# torch's CPU kernel keeps one running float32 sum a vector lane: its squared norm is off by
# 2e-5 at 1M elements and 1.4e-3 at 16M (torch 2.13). Rows this long are off by less than 1e-7
# and reduce at the same speed.
_ROW = 4096

# Rows of 16-bit tensors are widened in blocks of 2 MB, or the CPU kernel makes a whole copy.
_ROWS_WIDENED_AT_ONCE = 128


def squared_norm(tensors: Sequence[Tensor], *, device: torch.device) -> Tensor:
    """Return Σ|tensor|² over all elements of all `tensors`, without copying any of them.

    Args:
        tensors: Floating-point tensors on one device, dense or sparse; none gives zero.
        device: Where the result lives.

    Returns:
        A scalar in float64 (float32 where the device has no float64), still on the device:
        no host synchronisation. On CPU its relative error is below 1e-6 at any size.
    """
    return sum_of_squares(norms_of(tensors), device=device)


def norms_of(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return one-dimensional tensors of norms whose squares sum to Σ|tensor|²: few kernels."""
    norms: list[Tensor] = []
    whole: list[Tensor] = []
    for tensor in tensors:
        if tensor.is_sparse:
            tensor = tensor.coalesce().values()
        if tensor.device.type == "cpu" and tensor.numel() > _ROW:
            flat = _flat(tensor)
            full_rows = flat.numel() // _ROW * _ROW
            norms.extend(_row_norms(flat[:full_rows].view(-1, _ROW)))
            tensor = flat[full_rows:]
        if tensor.numel():
            whole.append(tensor)
    if whole:
        accumulator = torch.float32
        if any(tensor.dtype == torch.float64 for tensor in whole):
            accumulator = torch.float64
        norms.append(torch.stack(torch._foreach_norm(whole, 2, dtype=accumulator)))
    return norms


def sum_of_squares(norms: Sequence[Tensor], *, device: torch.device) -> Tensor:
    """Return the sum of the squares of all elements, in float64 where the device has it."""
    if not norms:
        return torch.zeros((), dtype=wide_dtype(device), device=device)
    return torch.cat(list(norms)).to(wide_dtype(device)).square_().sum()


def wide_dtype(device: torch.device) -> torch.dtype:
    """float64, or float32 on the one device type that lacks it."""
    return torch.float32 if device.type == "mps" else torch.float64


def _row_norms(rows: Tensor) -> Iterator[Tensor]:
    """Norms of the rows of a CPU tensor. Never squares in 16 bits: half overflows at 256²."""
    if rows.element_size() >= 4:
        yield torch.linalg.vector_norm(rows, dim=1)
    else:
        for block in rows.split(_ROWS_WIDENED_AT_ONCE):
            yield torch.linalg.vector_norm(block, dim=1, dtype=torch.float32)


def _flat(tensor: Tensor) -> Tensor:
    """View all elements in storage order: a norm does not depend on the order."""
    strides_descending = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    in_storage_order = tensor.permute(strides_descending)
    # Autograd stores dense gradients without gaps; reshape copies only what some hook made.
    return in_storage_order.reshape(-1)
