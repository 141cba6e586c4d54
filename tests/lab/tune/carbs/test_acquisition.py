# SPDX-License-Identifier: Apache-2.0
import math

import numpy as np
import pytest
from optuna.distributions import FloatDistribution
from scipy.integrate import quad
from scipy.stats import kstest, norm, truncnorm

from noisescale.lab.tune.carbs.acquisition import (
    FINE,
    RADIUS,
    Front,
    log_expected_improvement,
    log_near,
    small_steps_from,
    steps_from,
)
from noisescale.lab.tune.carbs.dimensions import dimensions_of


@pytest.mark.parametrize("best", [-3.0, -1.0, 0.0, 1.0, 4.0])
def test_expected_improvement_is_the_integral(best: float) -> None:
    mean, deviation = 0.3, 0.7
    integral, _ = quad(
        lambda f: (f - best) * norm.pdf(f, mean, deviation), best, best + 20, epsabs=1e-14
    )

    found = log_expected_improvement(np.array([mean]), np.array([deviation]), np.array([best]))

    assert found[0] == pytest.approx(math.log(integral), rel=1e-6)


def test_expected_improvement_keeps_its_order_where_it_underflows() -> None:
    best = np.linspace(0, 5000, 20_001)

    found = log_expected_improvement(np.zeros(1), np.ones(1), best)

    assert np.isfinite(found).all()
    assert (np.diff(found) < 0).all()
    # 1 - 3/z² is the next factor of the series of h(z)·z²/φ(z).
    z = 50.0
    expected = norm.logpdf(z) - 2 * math.log(z) + math.log1p(-3 / z**2 + 15 / z**4)
    (far,) = log_expected_improvement(np.zeros(1), np.ones(1), np.array([z]))
    assert far == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("z", [-999.0, -1001.0, -1e4, -1e6])
def test_expected_improvement_far_below_the_front_is_the_first_term_of_its_series(z: float) -> None:
    """h(z) = φ(z)/z²·(1 - 3/z² + ...), on both sides of where the bracket is given up."""
    deviation = 0.5

    (found,) = log_expected_improvement(
        np.array([z * deviation]), np.array([deviation]), np.zeros(1)
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


def test_small_steps_move_about_half_of_the_coordinates() -> None:
    names = [f"x{i}" for i in range(6)]
    dimensions = dimensions_of({name: FloatDistribution(-1.0, 1.0) for name in names}, {})
    origins = np.array([[0.0] * 6, [0.0] * 5 + [1.0]])

    drawn = small_steps_from(origins, dimensions, 4000, np.random.default_rng(0))

    inner = drawn[:, :5]
    assert (inner != 0).mean() == pytest.approx(0.5, abs=0.02)
    assert kstest(inner[inner != 0], norm(0, FINE).cdf).pvalue > 0.01
    assert drawn.max() == 1.0


def test_the_front_is_the_best_output_at_each_cost() -> None:
    rng = np.random.default_rng(0)
    log_costs, outputs = rng.uniform(0, 5, 30), rng.normal(size=30)

    front = Front.of(log_costs, outputs, (1.0, 2.0))

    assert front.edges[[0, -1]] == pytest.approx([log_costs.min() - 1, log_costs.max() + 2])
    assert (front.outputs[0], front.outputs[-1]) == (outputs.min(), outputs.max())
    for at in np.linspace(0, 5, 101):
        step = np.searchsorted(front.edges, at, side="right") - 1
        assert front.outputs[step] == outputs[log_costs <= at].max(initial=outputs.min())
    assert (log_costs[front.members] == front.edges[1:-1]).all()


@pytest.mark.parametrize("least", [-math.inf, 1.3])
@pytest.mark.parametrize("cost", [-3.0, -0.5, 0.4, 1.0, 2.9])
def test_the_gain_is_the_expected_area(cost: float, least: float) -> None:
    """Of a candidate among members at log costs 0, 1 and 2. Costs count from -1 to 3."""
    mean, deviation = 0.6, 0.4
    front = Front.of(np.arange(4.0), np.array([0.2, 0.5, 1.1, -1.0]), (1.0, 0.0))
    drawn = np.random.default_rng(0).normal(mean, deviation, 40_000)
    at = -1 + (np.arange(400) + 0.5) / 100
    best = np.array([-1.0, 0.2, 0.5, 1.1])[np.floor(at).astype(int) + 1]

    (found,) = front.log_gain(np.array([cost]), np.array([mean]), np.array([deviation]), least)

    over = np.array([np.maximum(drawn - one, 0).mean() for one in best])
    assert math.exp(found) == pytest.approx((over * (at > max(cost, least))).sum() / 100, rel=0.02)


def test_what_costs_more_than_counts_gains_nothing() -> None:
    front = Front.of(np.zeros(1), np.zeros(1), (1.0, 1.0))

    assert front.log_gain(np.array([1.1]), np.ones(1), np.ones(1)) == -math.inf
