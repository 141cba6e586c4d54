# SPDX-License-Identifier: Apache-2.0
import math

import numpy as np
import pytest
from scipy.stats import norm

from noisescale.bounded import Bounded
from noisescale.tradeoff.profile import log_law, profile_of


def law(batch_size: float, *, least: float = 50.0, critical: float = 100.0) -> float:
    return least * (1 + critical / batch_size)


def profiled(sizes: list[float], steps: list[float], scatter: float = 0.15) -> Bounded:
    """B_crit of the law S_min·(1 + B_crit/B), the 90 % interval of known scatter."""

    def misfit(log_critical: float) -> float:
        left = np.log(np.array(steps) / [law(b, critical=math.exp(log_critical)) for b in sizes])
        return float(((left - left.mean()) ** 2).sum())

    return profile_of(misfit, np.array(sizes), (norm.ppf(0.95) * scatter) ** 2)


@pytest.mark.parametrize("alpha", [0.5, 1.0, 3.0])
def test_the_law_has_its_asymptotes_and_a_bend_of_its_sharpness(alpha: float) -> None:
    ratios = np.array([1e-9, 0.3, 1.0, 7.0])

    steps = np.exp(log_law(np.log(ratios), alpha))

    assert steps == pytest.approx((1 + ratios**alpha) ** (1 / alpha))
    assert log_law(100.0, alpha) == pytest.approx(100.0)


def test_the_interval_is_that_of_the_logarithm_of_two_steps() -> None:
    found = profiled([16, 256], [law(16), law(256)], 0.1)

    assert found.value == pytest.approx(100)
    # At an end the steps' ratio is by the quantile of a difference of two logarithms off.
    quantile = norm.ppf(0.95) * math.sqrt(2) * 0.1
    ratios = [law(16, critical=x) / law(256, critical=x) for x in (found.low, found.high)]
    assert [math.log(r * law(256) / law(16)) for r in ratios] == pytest.approx(
        [-quantile, quantile]
    )


OPEN = (math.inf, math.inf)


@pytest.mark.parametrize(
    ("sizes", "steps", "low_value_and_high"),
    [
        ([8, 16], [1000.0, 500.0], [(1, math.inf), OPEN, OPEN]),
        ([512, 1024], [100.0, 100.0], [(0, 0), (0, 0), (100, 2000)]),
        ([8, 16], [1000.0, 540.0], [(0.1, 80), (80, 120), OPEN]),
    ],
    ids=["perfect scaling", "steps that do not fall", "both far below"],
)
def test_ends_are_open_where_the_steps_leave_them_open(
    sizes: list[float], steps: list[float], low_value_and_high: list[tuple[float, float]]
) -> None:
    found = profiled(sizes, steps)

    ends = (found.low, found.value, found.high)
    for end, (least, most) in zip(ends, low_value_and_high, strict=True):
        assert least <= end <= most
