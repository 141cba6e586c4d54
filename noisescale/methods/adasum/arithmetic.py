# SPDX-License-Identifier: Apache-2.0
"""Products and sums of the rows of two ranks.

On a CPU numbers of 32 and 16 bits are multiplied in float32. Products of a block are summed in
float32, blocks in float64. On other devices everything is in float64: a choice by the numbers would
make the host wait.

Let the products of a block have the error δ: a·b is off by at most δ·|a|·|b|, and |a|² by δ·|a|².
Then 1 - a·b/(2|a|²) is off by at most δ·|b|/|a|, and Adasum by at most δ·(|a| + |b|). In a block of
2¹⁷ elements δ is 5e-7 or less, see `LONGEST_DOT`. To add up of_own·own + of_other·other rounds each
element three times by 2⁻²⁴ = 6e-8.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from noisescale.collectors.squared_norms import LONGEST_DOT
from noisescale.methods.adasum.fused import WIDTH
from noisescale.methods.adasum.rule import Dots

_ROWS_ON_CPU = LONGEST_DOT // WIDTH
_ROWS_ON_DEVICE = 2**15
"""Rows of a block: half a MB of float32 on a CPU, or 16M elements."""

_SQUARES = 2.0**-80, 2.0**120
"""|a|² of a block between which float32 loses nothing.

Squares of elements below 2⁻¹²⁶ are off by 2⁻¹⁵⁰. 2¹⁷ of them are off by 2⁻¹³³, which is nothing in
2⁻⁸⁰. Squares from 2¹²⁸ overflow.
"""

_LARGEST_COEFFICIENT, _LARGEST_SQUARE = 2.0**60, 2.0**250
"""No product of a smaller coefficient and a vector of a smaller |a|² overflows float32."""


class Pair(NamedTuple):
    """Rows of this rank, and the same rows of another one."""

    own: Tensor
    other: Tensor
    tensor_of_row: Tensor


def products(pairs: Iterable[Pair], tensors: int, rows: Tensor) -> tuple[list[Pair], Tensor]:
    """Return the pairs, and own·other, |own|² and |other|² of each tensor in them.

    Args:
        pairs: Parts of rows, one after another.
        tensors: How many tensors there are.
        rows: All rows of this rank.

    Returns:
        The products have shape (tensors, 3). They are in float64.
    """
    seen: list[Pair] = []
    of_blocks: list[tuple[int, float, float, float]] = []
    found = rows.new_zeros(tensors, 3, dtype=torch.float64)
    rooms = _rooms(3, rows, _narrow_dtype(rows))
    for pair in pairs:
        known = pair.tensor_of_row.tolist() if rows.is_cpu and rows.dtype == rooms.dtype else []
        for start in range(0, len(pair.own), rooms.shape[1]):
            x, y, of_row = (each[start : start + rooms.shape[1]] for each in pair)
            if known and known[start] == known[start + len(x) - 1]:
                a, b = x.view(-1), y.view(-1)
                ab, aa, bb = float(a @ b), float(a @ a), float(b @ b)
                if _SQUARES[0] < min(aa, bb) and max(aa, bb) < _SQUARES[1]:
                    of_blocks.append((known[start], ab, aa, bb))
                    continue
            of_rows = _products_by_row(x, y, rooms)
            if rows.is_cpu:
                least, largest = of_rows[:, 1:].aminmax()
                if not (_SQUARES[0] < least and largest < _SQUARES[1]):
                    of_rows = _products_by_row(x, y, _rooms(3, x, torch.float64))
            found.index_add_(0, of_row, of_rows)
        seen.append(pair)
    if of_blocks:
        tensor_of_block, *columns = map(found.new_tensor, zip(*of_blocks, strict=True))
        found.index_add_(0, tensor_of_block.long(), torch.stack(columns, 1))
    return seen, found


def _products_by_row(x: Tensor, y: Tensor, rooms: Tensor) -> Tensor:
    sums = x.new_empty(len(x), 3, dtype=torch.float64)
    some = rooms[:, : len(x)]
    if x.dtype != rooms.dtype:
        x, y = some[1].copy_(x), some[2].copy_(y)
    for column, factors in enumerate(((x, y), (x, x), (y, y))):
        sums[:, column] = torch.mul(*factors, out=some[0]).sum(1)
    return sums


def fit(dots: Dots, of_own: Tensor, of_other: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return the coefficients in the dtype in which rows are combined."""
    narrow = _narrow_dtype(rows)
    if narrow != torch.float64:
        small = torch.maximum(of_own.abs(), of_other.abs()) < _LARGEST_COEFFICIENT
        fits = small & (torch.maximum(dots.aa, dots.bb) < _LARGEST_SQUARE)
        narrow = narrow if fits.all() else torch.float64
    return of_own.to(narrow), of_other.to(narrow)


def combine_(pairs: Sequence[Pair], of_own: Tensor, of_other: Tensor, rows: Tensor) -> None:
    """Write of_own·own + of_other·other over the rows of this rank.

    Args:
        pairs: Parts of rows, one after another.
        of_own: The coefficient of each tensor, in the dtype to compute in.
        of_other: The same for the other rank's.
        rows: All rows of this rank.
    """
    rooms = _rooms(2, rows, of_own.dtype)
    for own, other, of_row in pairs:
        factors = (each[of_row].unsqueeze(1) for each in (of_own, of_other))
        if own.dtype == of_own.dtype:
            c, d = factors
            own.mul_(c).addcmul_(other, d)
            continue
        blocks = (each.split(rooms.shape[1]) for each in (own, other, *factors))
        for into, given, c, d in zip(*blocks, strict=True):
            x, y = rooms[:, : len(into)]
            into.copy_(x.copy_(into).mul_(c).addcmul_(y.copy_(given), d))


def _rooms(count: int, rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Return room for blocks of rows."""
    block = _ROWS_ON_CPU if rows.is_cpu else _ROWS_ON_DEVICE
    return rows.new_empty(count, max(min(len(rows), block), 1), WIDTH, dtype=dtype)


def _narrow_dtype(rows: Tensor) -> torch.dtype:
    """Return what numbers that are neither large nor small are computed in."""
    return torch.float32 if rows.is_cpu and rows.dtype != torch.float64 else torch.float64
