# SPDX-License-Identifier: Apache-2.0
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from methods.adasum.oracle_of_adasum import expected
from refused import refused

from noisescale import adasum

SEEDS = st.integers(0, 10**6)
RANKS = st.integers(1, 9)


def random(ranks: int, seed: int, length: int = 6) -> list[torch.Tensor]:
    return list(torch.from_numpy(np.random.default_rng(seed).normal(size=(ranks, length))))


@settings(max_examples=25)
@given(RANKS, SEEDS)
def test_any_number_of_vectors_follows_the_oracle_and_two_are_symmetric_bit_by_bit(
    ranks: int, seed: int
) -> None:
    vectors = random(ranks, seed)

    got = adasum(vectors)

    np.testing.assert_allclose(got, expected([v.numpy() for v in vectors]), rtol=1e-9, atol=1e-12)
    if ranks == 2:
        assert torch.equal(got, adasum(vectors[::-1]))


def test_two_vectors_and_the_ranks_in_a_vector_by_hand() -> None:
    # a·b = 2, |a|² = 4, |b|² = 2: coefficients 1 - 2/8 and 1 - 2/4
    assert adasum([torch.tensor([2.0, 0.0]), torch.ones(2)]).tolist() == [0.75 * 2 + 0.5, 0.5]
    # Three ranks: the first is combined with the third, then both with the second.
    assert adasum([torch.tensor([x]) for x in (1.0, 4.0, 7.0)]).item() == pytest.approx(4.0)


def test_the_norm_below_which_a_coefficient_is_one_is_that_of_horovod() -> None:
    # |a|² = 1e-156 < sqrt(2.2e-308) = 1.5e-154 <= 1e-150: the sum there, the mean here.
    below, above = (torch.tensor([math.sqrt(x)], dtype=torch.float64) for x in (1e-156, 1e-150))

    assert adasum([below, below]).item() == 2 * below.item()
    assert adasum([above, above]).item() == pytest.approx(above.item(), rel=1e-12)


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_non_finite_elements_stay_where_they_are_and_the_others_are_averaged(bad: float) -> None:
    got = adasum([torch.tensor([1.0, bad]), torch.tensor([3.0, 1.0])])

    assert got[0] == 2.0
    assert not got[1].isfinite()


def test_a_single_tensor_is_copied_a_zero_vector_adds_nothing_and_complex_ones_are_pairs() -> None:
    one, real = torch.tensor([3.0, 1.0]), random(3, 0)

    got = adasum([one])
    pairs = adasum([torch.view_as_complex(v.view(3, 2)) for v in real])

    assert torch.equal(got, one)
    assert got.data_ptr() != one.data_ptr()
    assert torch.equal(adasum([torch.zeros(2), one]), one)
    assert torch.equal(torch.view_as_real(pairs).flatten(), adasum(real))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_the_dtype_is_kept_and_squares_do_not_overflow(dtype: torch.dtype) -> None:
    large = torch.full((4,), 300.0, dtype=dtype)  # 4 · 300² is beyond float16

    got = adasum([large, large])

    assert got.dtype == dtype
    assert torch.equal(got, large)


@pytest.mark.parametrize(
    ("tensors", "error", "got"),
    [
        ([], ValueError, "none"),
        ([torch.ones(2), torch.ones(3)], ValueError, "(2,) torch.float32 and (3,)"),
        ([torch.ones(2), torch.ones(2).double()], ValueError, "(2,) torch.float32 and (2,)"),
        ([torch.ones(2, dtype=torch.int64)], TypeError, "torch.int64"),
    ],
)
def test_tensors_that_cannot_be_combined(
    tensors: list[torch.Tensor], error: type[Exception], got: str
) -> None:
    with refused("tensors", error=error) as raised:
        adasum(tensors)

    assert raised.value.got.startswith(got)
