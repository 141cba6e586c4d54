# SPDX-License-Identifier: Apache-2.0
import math

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import optimize

from noisescale.estimation.ratio_interval import WeightedMeans, fieller_interval


def test_fieller_ends_are_where_the_test_of_the_ratio_turns() -> None:
    s, q, (ss, sq, qq), t = 30.0, 1.0, (4.0, -0.05, 0.01), 1.7

    low, high = fieller_interval(s, q, np.array([ss, sq, qq]), t)

    def excess(ratio: float) -> float:
        return (s - ratio * q) ** 2 - t**2 * (ss - 2 * ratio * sq + ratio**2 * qq)

    assert low == pytest.approx(optimize.brentq(excess, 0, s / q))
    assert high == pytest.approx(optimize.brentq(excess, s / q, 1e3))


@pytest.mark.parametrize("noise_unit", [1e-150, 1e-20, 1e90, 1e150])
@pytest.mark.parametrize("signal_unit", [1e-140, 1.0, 1e100])
def test_the_interval_does_not_depend_on_units(noise_unit: float, signal_unit: float) -> None:
    """Also where products of the moments would overflow, or vanish."""
    units = np.array([noise_unit * noise_unit, noise_unit * signal_unit, signal_unit * signal_unit])
    covariance, unit = np.array([4.0, -0.05, 0.01]), noise_unit / signal_unit
    for s, q in ((30.0, 1.0), (30.0, 0.1), (1.0, 3.0), (0.0, 1.0)):
        low, high = fieller_interval(s, q, covariance, 2.0)

        scaled = fieller_interval(s * noise_unit, q * signal_unit, covariance * units, 2.0)

        assert scaled == pytest.approx((low * unit, high * unit), rel=1e-9, abs=0)


RATIOS = np.concatenate([[0.0], np.geomspace(1e-7, 1e9, 40_001)])


def accepted(s: float, q: float, covariance: np.ndarray, t: float) -> np.ndarray:
    """Which of `RATIOS` the test "S - r·Q has mean zero" does not reject, one by one."""
    ss, sq, qq = covariance
    variance = np.maximum(ss - 2 * RATIOS * sq + RATIOS**2 * qq, 0)
    return np.abs(s - RATIOS * q) <= t * np.sqrt(variance)


def cases() -> list[tuple[float, float, np.ndarray]]:
    """S, Q and covariances of all ranks: of full rank, perfectly correlated, one or both exact."""
    generator = np.random.default_rng(0)
    found = []
    for number in range(600):
        s, q = generator.normal(3, 5), (0.0, 1.0, 0.2, -0.2)[number % 4] * generator.random()
        factor = generator.normal(size=(2, 2)) * [[2.0], [0.2]]
        kind = number // 4 % 5
        factor[:, 1] *= kind != 0
        factor[0] *= kind not in (1, 3)
        factor[1] *= kind not in (2, 3)
        (ss, sq), (_, qq) = factor @ factor.T
        found.append((float(s), q, np.array([ss, sq, qq])))
    return found


def test_fieller_is_what_a_scan_over_ratios_accepts() -> None:
    """Where it claims to know something; and the claims are made wherever signs allow it."""
    t, kinds = 1.7, {"between": 0, "above": 0, "nothing": 0}
    for s, q, covariance in cases():
        signal_differs, noise_differs = (
            abs(mean) > t * np.sqrt(v) for mean, v in ((q, covariance[2]), (s, covariance[0]))
        )
        passes = accepted(s, q, covariance, t)

        low, high = fieller_interval(s, q, covariance, t)

        if signal_differs and q > 0:
            kinds["between"] += 1
            where = np.flatnonzero(passes)
            if where.size:
                assert low == pytest.approx(RATIOS[where[0]], rel=1e-3, abs=1e-6)
                assert high == pytest.approx(RATIOS[where[-1]], rel=1e-3, abs=1e-6)
            else:  # an exact ratio, or one that is negative: the scan has neither
                assert low == pytest.approx(max(s / q, 0), rel=1e-6) or low == 0
                assert high == pytest.approx(low, rel=1e-6)
            assert low <= max(s / q, 0.0) * (1 + 1e-9)
            assert max(s / q, 0.0) * (1 - 1e-9) <= high
        elif not signal_differs and noise_differs and s > 0 and passes.any():
            kinds["above"] += 1
            assert low == pytest.approx(RATIOS[np.argmax(passes)], rel=1e-3)
            assert high == math.inf
        else:
            kinds["nothing"] += 1
            assert (low, high) == (0.0, math.inf)
    assert min(kinds.values()) > 100


def test_noise_that_reads_below_zero_has_an_upper_end() -> None:
    """By chance it may read below by more than its error: zero alone would be too sure."""
    known = WeightedMeans(-3.0, 1.0, 1.0, [0.01, 0.0, 1e-4], sq_weight=0.01, fourth_weight=1e-6)
    found = known.ratio_interval(0.95)
    assert (found.value, found.low) == (0.0, 0.0)
    zero = known._replace(noise_trace=0.0).ratio_interval(0.95)
    assert found.high == pytest.approx(zero.high)
    assert found.high > 0.1


@pytest.mark.parametrize("beyond", [1e-3, 1e-9, 1e-12, 1e-15, 0.0, -1e-15, -1e-12, -1e-9, -1e-3])
def test_the_low_end_is_continuous_where_the_signal_differs_from_zero(beyond: float) -> None:
    """At A = 0 it is C/2B, here with S = 30, Q = t·√v_QQ = 0.2: B = 6, C = 884."""
    low, _ = fieller_interval(30.0, 0.2 * (1 + beyond), np.array([4.0, 0.0, 0.01]), 2.0)

    assert low == pytest.approx(884 / 12, rel=2e-3 if abs(beyond) == 1e-3 else 1e-8)


def test_a_value_without_scatter_is_within_its_interval() -> None:
    """Ends are computed in other units than the value, and round differently."""
    for s, q in np.random.default_rng(0).uniform(0.1, 100.0, (500, 2)).tolist():
        means = WeightedMeans(s, q, 1.0, np.zeros(3), sq_weight=0.1, fourth_weight=0.001)

        value, low, high = means.ratio_interval(0.95)

        assert low <= value <= high
        assert value == pytest.approx(s / q, rel=1e-14)


def test_the_scale_of_weights_does_not_matter() -> None:
    weight = np.array([1.0, 2.0, 4.0, 1.0])
    r = np.array([[3.0, -1.0], [-2.0, 1.0], [1, 0], [-3, -1]])

    def means(weight: NDArray[np.float64]) -> WeightedMeans[float]:
        ss, sq, _, qq = ((weight**2)[:, None, None] * r[:, :, None] * r[:, None, :]).sum(0).ravel()
        powers = [float((weight**k).sum()) for k in (2, 4)]
        return WeightedMeans(30.0, 2.0, weight.sum(), np.array([ss, sq, qq]), *powers)

    one, other = means(weight), means(weight / weight.sum())

    assert one.freedom == pytest.approx(22**2 / (1 + 16 + 256 + 1) - 1)
    assert one.sq_share == pytest.approx(22 / 64)
    assert other.freedom == pytest.approx(one.freedom)
    assert other.covariance == pytest.approx(one.covariance)
    assert other.ratio_interval(0.9) == pytest.approx(one.ratio_interval(0.9))


def test_fewer_degrees_of_freedom_widen_the_interval() -> None:
    means = WeightedMeans(30.0, 2.0, 1.0, np.array([1.0, 0.0, 0.01]), 0.1, 0.001)

    value, low, high = means.ratio_interval(0.95)
    fewer = means.ratio_interval(0.95, freedom=3.0)
    unknown = means.ratio_interval(0.95, freedom=0.0)

    assert fewer.low < low < value < high < fewer.high
    assert unknown == (value, 0.0, math.inf)
