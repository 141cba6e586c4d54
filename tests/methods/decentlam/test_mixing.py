# SPDX-License-Identifier: Apache-2.0
import pytest
import torch

from noisescale.methods.decentlam.mixing import _add


@pytest.mark.parametrize("shares", [[0.2] * 2, [0.2] * 3, [0.1, 0.1, 0.3, 0.3, 0.05]])
def test_weighted_differences_from_all_neighbours_are_added(shares: list[float]) -> None:
    torch.manual_seed(0)
    into, own = torch.randn(100), torch.randn(100)
    theirs = [torch.randn(100) for _ in shares]
    wanted = into.double()
    for share, each in zip(shares, theirs, strict=True):
        wanted += share * (own.double() - each.double())

    _add(into, own, theirs, shares)

    torch.testing.assert_close(into, wanted.float())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ranks_that_agree_stay_as_they_are(dtype: torch.dtype) -> None:
    into, own = torch.zeros(1000, dtype=dtype), torch.linspace(-3, 3, 1000).to(dtype)

    _add(into, own, [own.clone() for _ in range(5)], [0.15] * 5)

    assert not into.any()


def test_a_small_difference_in_16_bits_is_not_lost_in_a_sum() -> None:
    """1 + 2^-7 and 1 are both in bfloat16, and their sum is not."""
    into, own = torch.zeros(3, dtype=torch.bfloat16), torch.ones(3, dtype=torch.bfloat16)

    _add(into, own, [own + 2**-7, own.clone()], [0.25, 0.25])

    assert torch.equal(into, torch.full((3,), -(2.0**-9), dtype=torch.bfloat16))
