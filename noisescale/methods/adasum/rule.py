# SPDX-License-Identifier: Apache-2.0
"""Adasum of two vectors, and the tree that combines any number of them."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from noisescale.checks import refuse
from noisescale.refusal import TypeRefusal

TINY = math.sqrt(sys.float_info.min)
"""A vector of a smaller squared norm keeps the coefficient 1, as in Horovod."""


class Dots(NamedTuple):
    """Scalar products of two vectors a and b, of many pairs at once, in float64."""

    ab: Tensor
    aa: Tensor
    bb: Tensor


def coefficients(dots: Dots, ranks_in_a: int, ranks_in_b: int) -> tuple[Tensor, Tensor]:
    """Return what a and b are multiplied by, before they are added.

    With m_a and m_b ranks in both, and M = m_a + m_b, these are 1 - (m_a/M)·a·b/|a|² and
    1 - (m_b/M)·a·b/|b|². Orthogonal vectors are added. Parallel ones give their mean, weighted by
    the ranks. For m_a = m_b this is Adasum as published.

    A dot product that is not finite gives m_a/M and m_b/M: the mean. So infinite and NaN elements
    stay where they are, as in an all-reduce.
    """
    share = ranks_in_a / (ranks_in_a + ranks_in_b)
    finite = dots.ab.isfinite() & dots.aa.isfinite() & dots.bb.isfinite()

    def one(part: float, square: Tensor) -> Tensor:
        adasum = torch.where(square < TINY, 1.0, 1 - part * (dots.ab / square))
        return torch.where(finite, adasum, part)

    return one(share, dots.aa), one(1 - share, dots.bb)


def core_and_rest(ranks: int) -> tuple[int, int]:
    """Return the largest power of two that is not above `ranks`, and how many ranks are beyond it.

    Rank i beyond the power of two is combined with rank i first. The tree is over the others.

    Examples:
        >>> core_and_rest(8), core_and_rest(7)
        ((8, 0), (4, 3))
    """
    core = 1 << (ranks.bit_length() - 1)
    return core, ranks - core


def adasum(tensors: Sequence[Tensor]) -> Tensor:
    """Combine the tensors of several ranks, each of them taken as one vector.

    Two vectors a and b give (1 - a·b/(2|a|²))·a + (1 - a·b/(2|b|²))·b: the sum if they are
    orthogonal, the mean if they are parallel. A tree combines neighbours, then neighbouring pairs,
    and so on. This is the reference: `adasum_all_reduce_` has the same result across processes.

    If the number of tensors is no power of two, those beyond the largest power of two are combined
    with the first ones before the tree. Each vector then counts with the number of tensors in it.
    So parallel vectors still give their mean, and orthogonal ones their sum.

    Args:
        tensors: One a rank, all of one shape and one floating-point dtype.

    Returns:
        A new tensor of the same shape and dtype. Dot products are summed in float64.

    Raises:
        ValueError: If there is no tensor, or they differ in shape or dtype.
        TypeError: If they are not of a floating-point or complex dtype.

    Examples:
        >>> adasum([torch.tensor([1.0, 0.0]), torch.tensor([0.0, 2.0])])
        tensor([1., 2.])
        >>> adasum([torch.tensor([1.0, 0.0]), torch.tensor([2.0, 0.0])])
        tensor([1.5000, 0.0000])

    References:
        Maleki et al. 2020, arXiv:2006.02924. The rule for any number of ranks is our own.
    """
    _check(tensors)
    core, beyond = core_and_rest(len(tensors))
    vectors = [(each, 1) for each in tensors[:core]]
    for i in range(beyond):
        vectors[i] = _combine(vectors[i], (tensors[core + i], 1))
    while len(vectors) > 1:
        vectors = [_combine(*vectors[i : i + 2]) for i in range(0, len(vectors), 2)]
    return vectors[0][0].clone()


def _combine(a: tuple[Tensor, int], b: tuple[Tensor, int]) -> tuple[Tensor, int]:
    (x, ranks_in_a), (y, ranks_in_b) = a, b
    flat_x, flat_y = (_real(each).double().flatten() for each in (x, y))
    dots = Dots(flat_x @ flat_y, flat_x @ flat_x, flat_y @ flat_y)
    of_x, of_y = coefficients(dots, ranks_in_a, ranks_in_b)
    combined = (of_x * flat_x + of_y * flat_y).view_as(_real(x)).to(_real(x).dtype)
    return (
        torch.view_as_complex(combined) if x.is_complex() else combined
    ), ranks_in_a + ranks_in_b


def _real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def _check(tensors: Sequence[Tensor]) -> None:
    if not len(tensors):
        refuse("tensors", "hold a tensor for each rank", "none", "Pass at least one.")
    first = tensors[0]
    for each in tensors:
        check_dtype(each.dtype)
        if each.shape != first.shape or each.dtype != first.dtype:
            got = f"{tuple(first.shape)} {first.dtype} and {tuple(each.shape)} {each.dtype}"
            remedy = "Pass the same parameter's tensor of each rank."
            refuse("tensors", "have one shape and one dtype", got, remedy)


def check_dtype(dtype: torch.dtype) -> None:
    """Raise a TypeError unless vectors of this dtype can be combined."""
    if not (dtype.is_floating_point or dtype.is_complex):
        remedy = "Convert them with `.float()`."
        refuse("tensors", "be of a floating-point dtype", str(dtype), remedy, error=TypeRefusal)
