# SPDX-License-Identifier: Apache-2.0
import pytest

from noisescale.estimation.pair_shares import PairShares


def test_many_batch_sizes_have_one_mean() -> None:
    """As of tokens: a mean of each size would be the share of a single step."""
    shares = PairShares()
    few = [shares.mean(size, share) for size, share in ((16, 0.5), (16, 0.7), (12, 0.2))]
    many = [shares.mean(100 + step, 0.9) for step in range(20)]

    assert few == pytest.approx([0.5, 0.6, 0.2])
    assert many[:6] == [0.9] * 6  # each is the first of its size
    assert many[-1] == pytest.approx((0.5 + 0.7 + 0.2 + 20 * 0.9) / 23)
    restored = PairShares()
    restored.load_state_dict(shares.state_dict())
    assert restored.mean(7, 0.3) == shares.mean(7, 0.3)
