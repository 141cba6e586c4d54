# SPDX-License-Identifier: Apache-2.0
import math

import numpy as np
import pytest
from optuna.distributions import FloatDistribution
from scipy.integrate import quad
from scipy.stats import kstest, norm, truncnorm

from noisescale.lab.tune.carbs.acquisition import (
    EXPLORATION,
    RADIUS,
    log_expected_improvement,
    log_near,
    steps_from,
)
from noisescale.lab.tune.carbs.dimensions import dimensions_of


@pytest.mark.parametrize("best", [-3.0, -1.0, 0.0, 1.0, 4.0])
def test_expected_improvement_is_the_integral(best: float) -> None:
    mean, deviation = 0.3, 0.7
    start = best + EXPLORATION
    integral, _ = quad(
        lambda f: (f - start) * norm.pdf(f, mean, deviation), start, start + 20, epsabs=1e-14
    )

    found = log_expected_improvement(np.array([mean]), np.array([deviation]), np.array([best]))

    assert found[0] == pytest.approx(math.log(integral), rel=1e-6)


def test_expected_improvement_keeps_its_order_where_it_underflows() -> None:
    best = np.linspace(0, 5000, 20_001)

    found = log_expected_improvement(np.zeros(1), np.ones(1), best)

    assert np.isfinite(found).all()
    assert (np.diff(found) < 0).all()
    # 1 - 3/z² is the next factor of the series of h(z)·z²/φ(z).
    z = 49 + EXPLORATION
    expected = norm.logpdf(z) - 2 * math.log(z) + math.log1p(-3 / z**2 + 15 / z**4)
    (far,) = log_expected_improvement(np.zeros(1), np.ones(1), np.array([49.0]))
    assert far == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("z", [-999.0, -1001.0, -1e4, -1e6])
def test_expected_improvement_far_below_the_front_is_the_first_term_of_its_series(z: float) -> None:
    """h(z) = φ(z)/z²·(1 - 3/z² + ...), on both sides of where the bracket is given up."""
    deviation = 0.5

    (found,) = log_expected_improvement(
        np.array([z * deviation]), np.array([deviation]), np.array([-EXPLORATION])
    )

    expected = math.log(deviation) + norm.logpdf(z) - 2 * math.log(-z) - 3 / z**2
    assert found - norm.logpdf(z) == pytest.approx(expected - norm.logpdf(z), abs=1e-3)


def test_density_is_that_of_the_nearest_origin() -> None:
    origins = np.array([[0.0, 0.0], [3.0, 0.0]])

    found = log_near(np.array([[0.3, 0.4], [3.0, 0.0]]), origins)

    assert found == pytest.approx([-0.25 / (2 * 0.09), 0.0])


def test_steps_are_normal_and_cut_off_at_the_ends() -> None:
    (dimension,) = dimensions_of({"x": FloatDistribution(-1.0, 1.0)}, {})  # coordinates: x
    rng = np.random.default_rng(0)

    drawn = steps_from(np.array([[0.9]]), [dimension], 4000, rng)[:, 0]

    cut = truncnorm((-1 - 0.9) / RADIUS, (1 - 0.9) / RADIUS, 0.9, RADIUS)
    assert kstest(drawn, cut.cdf).pvalue > 0.01
