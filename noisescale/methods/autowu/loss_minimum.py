# SPDX-License-Identifier: Apache-2.0
"""Whether a noisy loss has passed its minimum, by a Gaussian process through all of it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import cho_factor, cho_solve
from scipy.optimize import minimize_scalar
from scipy.special import ndtr

from noisescale.refusal import Refusal

Floats = NDArray[np.float64]

GRID_POINTS = 500
LENGTH_SCALE = 0.2
"""Length scale of the kernel, as a share of the steps so far."""
MOST_POINTS = 500
"""The most points that a curve is fitted to; the time grows as their cube."""
# AutoWU adds 1e-4 to the variances of losses that span a few units (autowu.py,
# `past_minimum_prob`); as a share of the variance of the losses it has no unit.
LEAST_VARIANCE = 1e-4
LOG_RATIOS = np.linspace(math.log(1e-6), math.log(1e6), 61)  # of noise to amplitude


@dataclass(frozen=True)
class LossMinimum:
    """Where the smoothed loss was lowest, and the probability that this lies in the past.

    Args:
        probability: max over x of P(f(x) < f(1)): near 1 if the loss was certainly lower
            somewhere than it is now.
        position: Where the posterior mean is lowest, from 0 (first loss) to 1 (now).
    """

    probability: float
    position: float


@dataclass(frozen=True)
class LossCurve:
    """A Gaussian process through losses: y(x) = f(x) + noise, f with a squared-exponential kernel.

        k(x, x') = amplitude·exp(-(x - x')²/(2·LENGTH_SCALE²))

    Args:
        positions: x of each loss, from 0 to 1.
        losses: y.
        mean: The constant that f varies about.
        amplitude: Variance of f.
        noise: Variance of the noise of one loss.
    """

    positions: Floats
    losses: Floats
    mean: float
    amplitude: float
    noise: float

    def posterior(self, at: Floats) -> tuple[Floats, Floats]:
        """Return the mean and the covariance matrix of f, given the losses, at each of `at`.

        References:
            Rasmussen and Williams 2006, "Gaussian Processes for Machine Learning", algorithm 2.1.
        """
        covariance = self._kernel(self.positions, self.positions)
        covariance[np.diag_indices_from(covariance)] += self.noise
        factor, across = cho_factor(covariance, lower=True), self._kernel(self.positions, at)
        mean = self.mean + across.T @ cho_solve(factor, self.losses - self.mean)
        return mean, self._kernel(at, at) - across.T @ cho_solve(factor, across)

    def _kernel(self, one: Floats, other: Floats) -> Floats:
        return self.amplitude * _correlation(one, other)


def loss_minimum(losses: Sequence[float] | Floats) -> LossMinimum:
    """Estimate from a run's losses whether a smooth curve through them has passed its minimum.

    With f the posterior of `fit_loss_curve` and x on a grid from the first loss to now,

        P(f(x) < f(1)) = Φ((m(1) - m(x))/√(v(x, x) + v(1, 1) - 2·v(x, 1) + ε))

    The largest value over x is the answer's `probability`. ε is 1e-4 of the variance of the losses:
    without it, differences too small to matter would look certain.

    Args:
        losses: One loss for each step, in order. Losses that are not finite are left out.

    Returns:
        The probability, and the position of the minimum. While the loss falls the probability is
        near 0.5, the value at the last x before 1. The probability is not corrected for being the
        largest of many: flat losses exceed 0.95 now and then.

    Raises:
        ValueError: If no loss is finite.

    Examples:
        >>> steps = np.linspace(-1, 1, 100)
        >>> loss_minimum(steps**2)
        LossMinimum(probability=1.0, position=0.49...)
        >>> loss_minimum(-steps).probability < 0.5
        True

    References:
        Kim et al. 2021, arXiv:2107.05855; github.com/kakaobrain/autowu, `maybe_switch`.
    """
    curve = fit_loss_curve(losses)
    grid = np.linspace(0, 1, GRID_POINTS)
    mean, covariance = curve.posterior(grid)
    variance = np.diag(covariance)[:-1] + covariance[-1, -1] - 2 * covariance[:-1, -1]
    least = LEAST_VARIANCE * float(curve.losses.var()) or 1.0
    certainty = (mean[-1] - mean[:-1]) / np.sqrt(variance.clip(min=0) + least)
    return LossMinimum(float(ndtr(certainty.max())), float(grid[mean.argmin()]))


def fit_loss_curve(losses: Sequence[float] | Floats) -> LossCurve:
    """Fit mean, amplitude and noise to losses, by their marginal likelihood.

    With R the correlations exp(-(x - x')²/(2·LENGTH_SCALE²)) and λ = noise/amplitude, the losses
    have the covariance amplitude·(R + λI). Mean and amplitude of the greatest likelihood are
    known for each λ, and the eigenvectors of R serve every λ: what is left to search is one
    number. More than `MOST_POINTS` losses are first averaged in equal stretches: next to the
    length scale such a stretch is a point, and its mean as good as its losses.

    Args:
        losses: One loss for each step, in order. Losses that are not finite are left out.

    Raises:
        ValueError: If no loss is finite.

    References:
        Rasmussen and Williams 2006, equation 2.30.
    """
    positions, values = _points(np.asarray(losses, dtype=np.float64))
    eigenvalues, vectors = np.linalg.eigh(_correlation(positions, positions))
    eigenvalues = eigenvalues.clip(min=0)
    y, one = vectors.T @ values, vectors.sum(0)

    def fit(log_ratio: float) -> tuple[float, float, float]:
        weight = 1 / (eigenvalues + math.exp(log_ratio))
        mean = float((weight * one * y).sum() / (weight * one * one).sum())
        amplitude = float((weight * (y - mean * one) ** 2).mean()) or np.finfo(float).tiny
        return y.size * math.log(amplitude) - float(np.log(weight).sum()), mean, amplitude

    best = int(np.argmin([fit(log_ratio)[0] for log_ratio in LOG_RATIOS]))
    log_ratio = minimize_scalar(
        lambda log_ratio: fit(log_ratio)[0],
        bounds=(LOG_RATIOS[max(best - 1, 0)], LOG_RATIOS[min(best + 1, LOG_RATIOS.size - 1)]),
        method="bounded",
    ).x
    _, mean, amplitude = fit(log_ratio)
    return LossCurve(positions, values, mean, amplitude, amplitude * math.exp(log_ratio))


def _points(losses: Floats) -> tuple[Floats, Floats]:
    """Return at most `MOST_POINTS` means of equally many losses each, and their places on [0, 1).

    What does not fill a stretch is left out at the beginning, so that the last is now.
    """
    size = -(-losses.size // MOST_POINTS) or 1
    positions = np.arange(losses.size) / (losses.size or 1)
    start, finite = losses.size % size, np.isfinite(losses)
    count = finite[start:].reshape(-1, size).sum(1)
    if not count.any():
        raise Refusal(
            "losses",
            "have a finite value",
            f"{losses.size} without one",
            "Look for what made them infinite, such as too high a learning rate.",
        )

    def means(values: Floats) -> Floats:
        sums = np.where(finite, values, 0)[start:].reshape(-1, size).sum(1)
        return np.asarray(sums[count > 0] / count[count > 0])

    return means(positions), means(losses)


def _correlation(one: Floats, other: Floats) -> Floats:
    return np.asarray(np.exp(-0.5 * ((one[:, None] - other) / LENGTH_SCALE) ** 2))
