# SPDX-License-Identifier: Apache-2.0
"""Squared norms of many tensors in few kernels, exact even where float32 sums are not."""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from noisescale.collectors.devices import by_device

# torch's CPU kernels keep one running float32 sum a vector lane: a squared norm is off by 2e-5 at
# 1M elements and 1.4e-3 at 16M, a dot product by 6e-5 there (torch 2.13). Over so many elements
# either is right to 5e-7 or better, with AVX2 as with AVX-512 (2**19 were off by 2.8e-6 with AVX2).
_LONGEST_NORM = 2**14
LONGEST_DOT = 2**17

# Rows of 16-bit tensors are widened in blocks of 2 MB, or the CPU kernel makes a whole copy.
_ROW = 4096
_ROWS_WIDENED_AT_ONCE = 128


Norm = Tensor | float
"""Norms, still to be squared, in a one-dimensional tensor; or of CPU tensors a square as a number.

The host has that at once. As a tensor each would stay allocated among gradients that come and go,
which keeps the allocator from using their memory again: 6 % of a step's time (glibc, 16M weights).
"""


def squared_norm(tensors: Sequence[Tensor], *, device: torch.device) -> Tensor:
    """Return Σ|tensor|² over all elements of all `tensors`, without copying any of them.

    Args:
        tensors: Real or complex floating-point tensors, dense or sparse; none gives zero. |z|² of a
            complex number is that of its two parts. They may be on several devices.
        device: Where the result lives.

    Returns:
        A scalar in float64 (float32 where the device has no float64), still on the device:
        no host synchronisation. On CPU its relative error is below 1e-6 at any size. On other
        devices the norms have the error of the device's own kernels, and the sum of their squares
        adds less than 1e-6 even in float32.
    """
    return sums_of_squares([norms_of(tensors)], device=device)[0]


def norms_of(tensors: Sequence[Tensor]) -> list[Norm]:
    """Return norms from which `sums_of_squares` computes Σ|tensor|², with few kernels.

    Whole tensors are normed together on the CPU, and those of one dtype on each other device.
    """
    norms: list[Norm] = []
    on_cpu: list[Tensor] = []
    elsewhere: dict[tuple[int, torch.dtype], list[Tensor]] = {}
    for tensor in tensors:
        if tensor.is_sparse:
            tensor = tensor.coalesce().values()
        if tensor.is_complex():
            tensor = _as_real(tensor)
        if not tensor.numel():
            continue
        if not tensor.is_cpu:
            elsewhere.setdefault((tensor.get_device(), tensor.dtype), []).append(tensor)
        elif tensor.numel() <= _LONGEST_NORM:
            on_cpu.append(tensor)
        elif tensor.element_size() >= 4:
            norms.append(_dots(tensor.view(-1) if tensor.is_contiguous() else _flat(tensor)))
        else:
            flat = _flat(tensor)
            full_rows = flat.numel() // _ROW * _ROW
            norms.extend(_widened_row_norms(flat[:full_rows].view(-1, _ROW)))
            if full_rows < flat.numel():
                on_cpu.append(flat[full_rows:])
    for whole in (on_cpu, *elsewhere.values()):
        if whole:
            accumulator = torch.float32
            if any(tensor.dtype == torch.float64 for tensor in whole):
                accumulator = torch.float64
            found = torch._foreach_norm(whole, 2, dtype=accumulator)
            norms.append(found[0].view(1) if len(found) == 1 else torch.stack(found))
    return norms


def norms_of_one(tensor: Tensor) -> list[Norm]:
    """Return `norms_of((tensor,))`, in a single kernel if possible."""
    if tensor.is_complex() and not tensor.is_sparse:
        tensor = _as_real(tensor)
    quick = tensor.is_cpu and tensor.element_size() >= 4 and not tensor.is_sparse
    return [_dots(tensor.view(-1))] if quick and tensor.is_contiguous() else norms_of((tensor,))


def _as_real(tensor: Tensor) -> Tensor:
    """View a complex tensor as its real and imaginary parts, shape (..., 2); nothing is copied.

    Of a tensor that is stored as its conjugate these are the conjugate's: a square is the same.
    """
    return torch.view_as_real(tensor.conj() if tensor.is_conj() else tensor)


def scale(norms: Sequence[Norm], factor: float) -> list[Norm]:
    """Return what `norms_of` gives for tensors that are `factor` times as large."""
    return [x * (factor if isinstance(x, Tensor) else factor**2) for x in norms]


def sums_of_squares(norms: Sequence[Sequence[Norm]], *, device: torch.device) -> Tensor:
    """Return the sum of squares of each list from `norms_of`, in float64 where there is any.

    Norms on several devices are summed up on each of them, and the sums are brought to `device`.
    The host does not wait for them, unless `device` is the CPU.
    """
    tensors = [[x for x in pieces if isinstance(x, Tensor)] for pieces in norms]
    on_host = [sum(x for x in pieces if not isinstance(x, Tensor)) for pieces in norms]
    sums = []
    for where, there in by_device(tensors):
        flat = [x for pieces in there for x in pieces]
        whole = flat[0] if len(flat) == 1 else torch.cat(flat)
        squares = whole.to(wide_dtype(where)).square()
        if len(norms) == 1:
            sums.append(squares.sum().unsqueeze(0))
        else:
            lengths = [sum(x.numel() for x in pieces) for pieces in there]
            sums.append(torch.stack([entry.sum() for entry in squares.split(lengths)]))
    if any(on_host):
        sums.append(torch.tensor(on_host, dtype=torch.float64, device="cpu"))
    return _together(sums, device, entries=len(norms))


def sums_of(numbers: Sequence[Sequence[Tensor]], *, device: torch.device) -> Tensor:
    """Return the sum of all numbers in each list, as `sums_of_squares` returns its sums.

    Args:
        numbers: Scalars and vectors, which may be on several devices.
        device: Where the result lives.
    """
    sums = []
    for where, there in by_device(numbers):
        dtype = wide_dtype(where)
        sums.append(
            torch.stack(
                [
                    torch.hstack(list(some)).sum(dtype=dtype)
                    if some
                    else torch.zeros((), dtype=dtype, device=where)
                    for some in there
                ]
            )
        )
    return _together(sums, device, entries=len(numbers))


def _together(sums: Sequence[Tensor], device: torch.device, *, entries: int) -> Tensor:
    """Return the sum of vectors, each of which is on a device of its own or on the CPU."""
    dtype = wide_dtype(device)
    if not sums:
        return torch.zeros(entries, dtype=dtype, device=device)
    if device.type == "cpu":
        return functools.reduce(operator.add, [one.to(device, dtype) for one in sums])
    there = [one.to(device, dtype, non_blocking=True) for one in sums if not one.is_cpu]
    if of_host := [one.tolist() for one in sums if one.is_cpu]:
        # The host would wait for a copy; it does not for numbers that are filled in.
        whole = [sum(numbers) for numbers in zip(*of_host, strict=True)]
        filled = [torch.full((1,), x, dtype=dtype, device=device) for x in whole]
        there.append(torch.cat(filled))
    return functools.reduce(operator.add, there)


def _dots(flat: Tensor) -> float:
    """Return |flat|² of a CPU tensor, piece by piece."""
    if flat.numel() <= LONGEST_DOT:
        return float(torch.dot(flat, flat))
    return sum(float(torch.dot(piece, piece)) for piece in flat.split(LONGEST_DOT))


_HAS_FLOAT64: dict[str, bool] = {}
"""Whether a type of device has float64."""


def wide_dtype(device: torch.device) -> torch.dtype:
    """Return float64, or float32 on devices without float64 (Macs' MPS, some XPUs and NPUs)."""
    if device.type not in _HAS_FLOAT64:
        _HAS_FLOAT64[device.type] = _sums_up_float64(device)
    return torch.float64 if _HAS_FLOAT64[device.type] else torch.float32


def _sums_up_float64(device: torch.device) -> bool:
    try:
        torch.ones(1, device=device).to(torch.float64).square().sum()
    except torch.OutOfMemoryError:
        raise
    except (TypeError, RuntimeError):
        return False
    return True


def _widened_row_norms(rows: Tensor) -> Iterator[Tensor]:
    """Yield norms of rows of a 16-bit CPU tensor. Squared in 16 bits, half overflows at 256²."""
    for block in rows.split(_ROWS_WIDENED_AT_ONCE):
        yield torch.linalg.vector_norm(block, dim=1, dtype=torch.float32)


def _flat(tensor: Tensor) -> Tensor:
    """View all elements in storage order: a norm does not depend on the order."""
    strides_descending = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    in_storage_order = tensor.permute(strides_descending)
    # Autograd stores dense gradients without gaps; reshape copies only what some hook made.
    return in_storage_order.reshape(-1)
