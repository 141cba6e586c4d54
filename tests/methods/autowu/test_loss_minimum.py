# SPDX-License-Identifier: Apache-2.0
import math
from dataclasses import replace

import numpy as np
import pytest
from refused import refused
from scipy.optimize import minimize
from scipy.stats import multivariate_normal
from tiers import slow, slow_after

from noisescale.methods.autowu.loss_minimum import LossCurve, fit_loss_curve, loss_minimum


def valley(steps: int, bottom: float = 0.6, noise: float = 0.3, seed: int = 0) -> np.ndarray:
    """A loss of 2 that falls to 0.5 at `bottom` and rises again, with noise."""
    x = np.arange(steps) / steps
    return 0.5 + 4 * (x - bottom) ** 2 + noise * np.random.default_rng(seed).normal(size=steps)


def sklearn_posterior(
    curve: LossCurve, x: np.ndarray, y: np.ndarray, at: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """The same mean, amplitude and noise in scikit-learn's Gaussian process."""
    from sklearn.gaussian_process import GaussianProcessRegressor
    from sklearn.gaussian_process.kernels import RBF, ConstantKernel

    process = GaussianProcessRegressor(
        ConstantKernel(curve.amplitude) * RBF(0.2), alpha=curve.noise, optimizer=None
    )
    mean, covariance = process.fit(x[:, None], y - curve.mean).predict(at[:, None], return_cov=True)
    return mean + curve.mean, covariance


@pytest.mark.parametrize("steps", [3, 40, 400])
def test_the_posterior_is_that_of_scikit_learn(steps: int) -> None:
    y = valley(steps)
    at = np.linspace(0, 1, 50)

    curve = fit_loss_curve(y)
    mean, covariance = curve.posterior(at)

    theirs = sklearn_posterior(curve, np.arange(steps) / steps, y, at)
    np.testing.assert_allclose(mean, theirs[0], atol=1e-8)
    np.testing.assert_allclose(covariance, theirs[1], atol=1e-8)


def test_no_mean_amplitude_or_noise_is_likelier() -> None:
    """The likelihood by SciPy's normal distribution, searched from several starts."""
    y = valley(60)
    x = np.arange(60) / 60
    correlation = np.exp(-((x[:, None] - x) ** 2) / (2 * 0.2**2))

    def surprise(parameters: np.ndarray) -> float:
        mean, amplitude, noise = parameters[0], *np.exp(parameters[1:])
        covariance = amplitude * correlation + noise * np.eye(60)
        return -float(multivariate_normal.logpdf(y, np.full(60, mean), covariance))

    curve = fit_loss_curve(y)

    ours = surprise(np.array([curve.mean, math.log(curve.amplitude), math.log(curve.noise)]))
    starts = [(0, 0, 0), (1, -3, -3), (2, 2, -1)]
    assert ours == pytest.approx(min(minimize(surprise, start).fun for start in starts), abs=1e-5)


@pytest.mark.parametrize(
    ("steps", "noise", "seed"), slow_after(1, [(15, 0.5, 3), (15, 0.2, 3), (30, 0.5, 0)])
)
def test_the_probability_is_the_share_of_drawn_curves_that_were_lower(
    steps: int, noise: float, seed: int
) -> None:
    """Rises that are not certain yet, from minima near enough to now to be correlated with it.

    20,000 curves are drawn from scikit-learn's posterior, and the least variance is added.
    """
    y = valley(steps, bottom=0.8, noise=noise, seed=seed)
    curve = fit_loss_curve(y)
    grid = np.linspace(0, 1, 500)
    mean, covariance = sklearn_posterior(curve, np.arange(steps) / steps, y, grid)
    rng = np.random.default_rng(0)
    drawn = rng.multivariate_normal(mean, covariance, 20_000, method="eigh")

    found = loss_minimum(y)

    least = 0.01 * y.std() * rng.normal(size=(20_000, 1))
    share = (drawn[:, :-1] < drawn[:, -1:] + least).mean(0).max()
    assert 0.6 < share < 0.9
    assert found.probability == pytest.approx(share, abs=0.02)  # one standard error is 0.0035
    assert found.position == grid[mean.argmin()]


def test_averages_of_stretches_say_what_all_losses_say() -> None:
    """2000 losses in 500 points, against scikit-learn's process through all 2000."""
    y = valley(2000, bottom=0.7, noise=1.0)
    curve = fit_loss_curve(y)
    at = np.linspace(0, 1, 50)

    mean, covariance = curve.posterior(at)

    assert curve.losses.size == 500
    curve_of_all = replace(curve, noise=4 * curve.noise)
    theirs = sklearn_posterior(curve_of_all, np.arange(2000) / 2000, y, at)
    deviation = np.sqrt(np.diag(theirs[1]))
    assert np.abs(mean - theirs[0]).max() < 0.02 * deviation.max()
    np.testing.assert_allclose(np.sqrt(np.diag(covariance)), deviation, rtol=0.02)


@pytest.mark.parametrize("steps", [999, 1000, 1001, 1499])
def test_stretches_are_equally_long_and_end_now(steps: int) -> None:
    curve = fit_loss_curve(np.arange(steps))

    size = round(steps * (curve.positions[1] - curve.positions[0]))
    assert curve.losses.size == steps // size <= 500
    assert curve.losses[-1] == pytest.approx(steps - 1 - (size - 1) / 2)
    np.testing.assert_allclose(curve.positions, curve.losses / steps)


def test_a_valley_is_found_where_it_is() -> None:
    errors = np.array([loss_minimum(valley(400, noise=0.1, seed=s)).position for s in range(10)])
    errors -= 0.6

    assert np.abs(errors).max() < 0.05, errors
    assert abs(errors.mean()) < 3 * errors.std(ddof=1) / math.sqrt(10), errors


@pytest.mark.parametrize(("slope", "runs"), [(0.0, 40), slow(-3.0, 100)])
def test_a_loss_that_does_not_rise_seldom_seems_to(slope: float, runs: int) -> None:
    x, rng = np.arange(200) / 200, np.random.default_rng(0)

    risen = [loss_minimum(slope * x + 0.3 * rng.normal(size=200)).probability for _ in range(runs)]

    assert np.mean(np.array(risen) > 0.95) < 0.1


@pytest.mark.parametrize("unit", [1e-6, 1e6])
def test_the_unit_of_the_loss_does_not_matter(unit: float) -> None:
    losses = valley(100, bottom=0.75)

    plain, scaled = loss_minimum(losses), loss_minimum(7 * unit + unit * losses)

    assert scaled.probability == pytest.approx(plain.probability, abs=1e-4)
    assert scaled.position == plain.position


def test_losses_that_are_not_finite_are_left_out() -> None:
    losses = valley(100)
    holes = losses.copy()
    holes[[3, 50, 51]] = math.nan, math.inf, -math.inf
    kept = np.isfinite(holes)

    curve = fit_loss_curve(holes)

    np.testing.assert_array_equal(curve.positions, (np.arange(100) / 100)[kept])
    np.testing.assert_array_equal(curve.losses, losses[kept])
    assert loss_minimum(holes).probability > 0.99


def test_losses_without_a_shape_have_no_minimum_in_the_past_and_nothing_finite_is_refused() -> None:
    for losses in ([2.0], [2.0] * 50, [math.nan, 1.0]):
        assert loss_minimum(losses).probability == pytest.approx(0.5, abs=0.01)
    for losses in ([], [math.nan, math.inf]):
        with refused("losses", got=f"{len(losses)} without one"):
            loss_minimum(losses)
