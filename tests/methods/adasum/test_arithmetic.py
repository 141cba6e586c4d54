# SPDX-License-Identifier: Apache-2.0
"""Products and sums in float32, against numpy in float64."""

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from noisescale.methods.adasum.arithmetic import Pair, combine_, fit, products
from noisescale.methods.adasum.fused import WIDTH
from noisescale.methods.adasum.rule import Dots

Array = np.ndarray[Any, np.dtype[np.float64]]

NARROW = [torch.float32, torch.bfloat16, torch.float16]
ROWS = [1, 700, 0, 3, 1, 256, 2]
"""Of each tensor: some larger than a block, some in one block with others, one empty."""


def drawn(dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    """Rows whose elements are all above zero, so that float32 loses most in sums."""
    generator = torch.Generator().manual_seed(1)
    rows = torch.rand(2, sum(ROWS), WIDTH, generator=generator, dtype=torch.float64)
    return ((rows + 0.1) * scale).to(dtype)


def pairs_of(own: Tensor, other: Tensor) -> list[Pair]:
    """In messages of 500 rows, in which two tensors end."""
    of_row = torch.repeat_interleave(torch.tensor(ROWS))
    return [
        Pair(*each)
        for each in zip(own.split(500), other.split(500), of_row.split(500), strict=True)
    ]


def by_numpy(own: Tensor, other: Tensor) -> Array:
    ends = np.cumsum(ROWS)[:-1]
    halves = [np.split(each.double().numpy(), ends) for each in (own, other)]
    return np.array(
        [[(a * b).sum(), (a * a).sum(), (b * b).sum()] for a, b in zip(*halves, strict=True)]
    )


def errors_of(own: Tensor, other: Tensor) -> Array:
    """Errors of a·b, |a|² and |b|² over |a||b|, |a|² and |b|², of the tensors that are not zero."""
    _, found = products(pairs_of(own, other), len(ROWS), own)
    wanted = by_numpy(own, other)
    scale = np.stack([np.sqrt(wanted[:, 1] * wanted[:, 2]), wanted[:, 1], wanted[:, 2]], 1)
    assert (found.numpy()[scale == 0] == 0).all()
    errors: Array = np.abs(found.numpy() - wanted)[scale > 0] / scale[scale > 0]
    return errors


@pytest.mark.parametrize(
    ("dtype", "largest"),
    [(torch.float64, 1e-14), *((dtype, 5e-7) for dtype in NARROW)],
)
def test_products_are_as_exact_as_documented(dtype: torch.dtype, largest: float) -> None:
    own, other = drawn(dtype)

    assert errors_of(own, other).max() < largest


def test_products_of_a_long_message_are_as_exact() -> None:
    generator = torch.Generator().manual_seed(0)
    own = torch.rand(2**13, WIDTH, generator=generator) + 0.1
    whole = Pair(own, own, torch.zeros(len(own), dtype=torch.int64))

    _, found = products([whole], 1, own)

    wanted = np.square(own.numpy(), dtype=np.float64).sum()
    np.testing.assert_allclose(found.numpy(), [[wanted] * 3], rtol=5e-7)


@pytest.mark.parametrize("scale", [1e-36, 1e-25, 1e-10, 1e10, 1e25, 1e37])
def test_products_that_float32_cannot_hold_are_exact_too(scale: float) -> None:
    own, other = drawn(torch.float32)

    assert errors_of(own * scale, other).max() < 5e-7
    assert errors_of(own, other * scale).max() < 5e-7


@pytest.mark.parametrize(("rows", "factor"), [(slice(-2, None), 1e-30), (slice(1, 701), 0.0)])
def test_a_tensor_of_small_numbers_or_zeros_beside_others_is_exact(
    rows: slice, factor: float
) -> None:
    own, other = drawn(torch.float32)
    own[rows] *= factor

    assert errors_of(own, other).max() < 5e-7


@pytest.mark.parametrize("bad", [np.inf, np.nan])
def test_numbers_that_are_not_finite_show_in_their_tensor_alone(bad: float) -> None:
    own, other = drawn(torch.float32)
    own[300, 5] = bad

    _, found = products(pairs_of(own, other), len(ROWS), own)

    assert not found[1, :2].isfinite().any()
    assert found[[0, *range(2, len(ROWS))]].isfinite().all()


@pytest.mark.parametrize(
    ("dtype", "scale"),
    [
        *itertools.product([torch.float64, *NARROW], [1.0]),
        *((torch.float32, x) for x in (1e-37, 1e37)),
    ],
)
def test_both_vectors_are_multiplied_and_added(dtype: torch.dtype, scale: float) -> None:
    """If one vector is `scale` times the other, c is about 100/scale, maybe beyond float32."""
    own, other = drawn(dtype)
    own *= scale
    c = torch.tensor([-0.5, 0.7, 1.0, 1.3, 0.5, -2.0, 1.0], dtype=torch.float64)
    c *= 100 / scale
    d = torch.tensor([1.0, -0.3, 1.0, 0.5, 0.5, 2.0, -1.0], dtype=torch.float64)
    dots = Dots(*torch.from_numpy(by_numpy(own, other)).T)
    of_row = np.repeat(np.arange(len(ROWS)), ROWS)
    parts = [
        factor[of_row, None].numpy() * each.double().numpy()
        for factor, each in ((c, own), (d, other))
    ]
    largest = np.abs(parts[0]) + np.abs(parts[1])

    combine_(pairs_of(own, other), *fit(dots, c, d, own), own)

    error = np.abs(own.double().numpy() - sum(parts)) / largest
    assert error.max() < 2 * torch.finfo(dtype).eps
