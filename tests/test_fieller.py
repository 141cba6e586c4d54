# SPDX-License-Identifier: Apache-2.0
import math

import numpy as np
import pytest
from scipy import optimize

from noisescale.fieller import fieller_interval


def test_fieller_ends_are_where_the_test_of_the_ratio_turns() -> None:
    s, q, (ss, sq, qq), t = 30.0, 1.0, (4.0, -0.05, 0.01), 1.7

    low, high = fieller_interval(s, q, np.array([ss, sq, qq]), t)

    def excess(ratio: float) -> float:
        return (s - ratio * q) ** 2 - t**2 * (ss - 2 * ratio * sq + ratio**2 * qq)

    assert low == pytest.approx(optimize.brentq(excess, 0, s / q))
    assert high == pytest.approx(optimize.brentq(excess, s / q, 1e3))


@pytest.mark.parametrize("q", [0.19, 0.0, -0.15])
def test_fieller_is_unbounded_where_the_signal_may_be_zero(q: float) -> None:
    s, (ss, sq, qq), t = 30.0, (4.0, 0.0, 0.01), 2.0

    low, high = fieller_interval(s, q, np.array([ss, sq, qq]), t)

    def excess(ratio: float) -> float:
        return (s - ratio * q) ** 2 - t**2 * (ss - 2 * ratio * sq + ratio**2 * qq)

    assert math.isinf(high)
    assert low == pytest.approx(optimize.brentq(excess, 0, 1e6))
    assert all(excess(ratio) <= 0 for ratio in np.geomspace(low * 1.001, 1e9, 50))


def test_fieller_knows_nothing_where_both_may_be_zero_or_signal_is_negative() -> None:
    assert fieller_interval(1.0, 0.1, np.array([4.0, 0.0, 0.01]), 2.0) == (0.0, math.inf)
    assert fieller_interval(30.0, -1.0, np.array([4.0, 0.0, 0.01]), 2.0) == (0.0, math.inf)
    assert fieller_interval(-30.0, 0.1, np.array([4.0, 0.0, 0.01]), 2.0) == (0.0, math.inf)
    assert fieller_interval(30.0, 0.0, np.zeros(3), 2.0) == (0.0, math.inf)
