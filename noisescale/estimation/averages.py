# SPDX-License-Identifier: Apache-2.0
"""Exponentially weighted means of the two moments, and how much single steps scatter."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from noisescale.estimation.level import Level, WeightedStep
from noisescale.estimation.moments import GradientMoments
from noisescale.estimation.ratio_interval import WeightedMeans

FEWEST_PAIRS = 7.0
"""Differences, each weighted by its decay, that a scatter is taken from: 8 steps' worth."""


class Averages(NamedTuple):
    """Exponentially weighted sums over one window a row; column 0 is S = tr(Σ), 1 is Q = |G|²."""

    weight: NDArray[np.float64]
    """Σw, shape (windows,)."""
    sq_weight: NDArray[np.float64]
    """Σw², shape (windows,)."""
    fourth_weight: NDArray[np.float64]
    """Σw⁴, shape (windows,)."""
    mean: NDArray[np.float64]
    """Σwx/Σw, shape (windows, 2)."""
    offset: NDArray[np.float64]
    """Σw²(x - mean), shape (windows, 2)."""
    scatter: NDArray[np.float64]
    """Σw²(x - mean)(x - mean)ᵀ, its distinct entries SS, SQ and QQ, shape (windows, 3)."""

    @classmethod
    def empty(cls, windows: int) -> Averages:
        """Return the sums over no steps."""
        zero, two, three = np.zeros(windows), np.zeros((windows, 2)), np.zeros((windows, 3))
        return cls(zero, zero, zero, two, two, three)

    def after(
        self, moments: GradientMoments, weight: float, decay: NDArray[np.float64]
    ) -> Averages:
        """Add one step. Sums stay centred on the moving mean: raw squares would cancel."""
        decay_sq, sq_weight = decay * decay, weight * weight
        total = decay * self.weight + weight
        share = weight / total
        difference = np.array([moments.noise_trace, moments.grad_sq_norm]) - self.mean
        shift = difference * share[:, None]
        earlier = decay_sq * self.sq_weight
        offset = decay_sq[:, None] * self.offset
        # The step's own square and what earlier steps add as the mean moves away from them, by
        # columns: numpy is slow at picking them by lists of indices.
        squared = earlier * share * share + sq_weight * (1 - share) * (1 - share)
        (of_noise, of_signal), (noise, signal) = difference.T, offset.T
        scatter = decay_sq[:, None] * self.scatter
        scatter[:, 0] += of_noise * (squared * of_noise - 2 * share * noise)
        scatter[:, 1] += squared * of_noise * of_signal
        scatter[:, 1] -= share * (noise * of_signal + of_noise * signal)
        scatter[:, 2] += of_signal * (squared * of_signal - 2 * share * signal)
        return Averages(
            weight=total,
            sq_weight=earlier + sq_weight,
            fourth_weight=decay_sq * decay_sq * self.fourth_weight + sq_weight * sq_weight,
            mean=self.mean + shift,
            offset=offset - earlier[:, None] * shift + sq_weight * (difference - shift),
            scatter=scatter,
        )

    @property
    def means(self) -> WeightedMeans[NDArray[np.float64]]:
        """The averages over all windows, and what their errors come from."""
        noise_trace, grad_sq_norm = self.mean.T
        return WeightedMeans(
            noise_trace=noise_trace,
            grad_sq_norm=grad_sq_norm,
            weight=self.weight,
            scatter=self.scatter,
            sq_weight=self.sq_weight,
            fourth_weight=self.fourth_weight,
        )


class _Sums(NamedTuple):
    """The columns of `Scatter.sums`: exponential sums over the steps of a window."""

    noise_trace: float
    """Σ w·S."""
    grad_sq_norm: float
    """Σ w·Q."""
    weight: float
    """Σ w."""
    pairs: float
    """Of 1, over differences of successive steps."""
    noise_trace_squares: float
    """Of w₁w₂/(w₁ + w₂)·(S₁ - S₂)²; the two after it likewise."""
    products: float
    grad_sq_norm_squares: float
    level: float
    """Σ w·L."""
    sq_level: float
    """Σ w·L², with the decay squared."""


class Scatter(NamedTuple):
    """How precise a window is expected to be, whatever its own interval says; one window a row.

    Raw averages are ruled by the steps of large |G|². For the scatter of a step each one is taken
    on its own level of |g|², see `Level`: then all count alike, and what was found holds after the
    noise scale has risen.

    Scatter is taken from successive differences, which a drift of the moments leaves alone. A step
    of weight w is taken to have the covariance C/w (exact for |G|² where the gradient's own spread
    rules), so that a difference has C·(1/w₁ + 1/w₂) and w₁w₂/(w₁ + w₂) times its square estimates
    C.
    """

    level: Level
    last: WeightedStep[float]
    """The latest step; its weight is 0 before the first."""
    sums: NDArray[np.float64]
    """Shape (windows, columns), for the columns see `_Sums`."""

    @classmethod
    def empty(cls, windows: int) -> Scatter:
        """Return the sums over no steps."""
        return cls(Level(), WeightedStep(0.0, 0.0, 0.0), np.zeros((windows, len(_Sums._fields))))

    @staticmethod
    def decays(decay: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return what `after` multiplies the sums by, from the decay of each window."""
        columns = np.repeat(decay[:, None], len(_Sums._fields), axis=1)
        columns[:, _Sums._fields.index("sq_level")] **= 2
        return columns

    def after(
        self, moments: GradientMoments, weight: float, decays: NDArray[np.float64]
    ) -> Scatter:
        """Add one step. The first one only sets the level."""
        weight = float(weight)  # not of numpy, as the moments
        moments = GradientMoments(*map(float, moments))
        relative, level = self.level.step(moments, weight)
        if relative is None:
            return self._replace(level=level)
        step, last = WeightedStep(weight, relative.noise_trace, relative.grad_sq_norm), self.last
        # Before there is another step the pair weighs nothing.
        pair = weight * last.weight / (weight + last.weight)
        of_noise = step.noise_trace - last.noise_trace
        of_signal = step.grad_sq_norm - last.grad_sq_norm
        added = _Sums(
            noise_trace=weight * step.noise_trace,
            grad_sq_norm=weight * step.grad_sq_norm,
            weight=weight,
            pairs=1.0 if last.weight else 0.0,
            noise_trace_squares=pair * (of_noise * of_noise),
            products=pair * (of_noise * of_signal),
            grad_sq_norm_squares=pair * (of_signal * of_signal),
            level=weight * self.level.sq_norm,
            sq_level=weight * self.level.sq_norm * self.level.sq_norm,
        )
        return Scatter(level, step, decays * self.sums + np.array(added))

    def squared_variation(self, window: int) -> float:
        """Return cv² over that window's steps, for a step of weight 1.

        cv is the standard deviation of S - R·Q over the mean of S, R being the ratio of the means.
        Infinite while the ratio is not known.
        """
        x = _Sums(*self.sums[window].tolist())
        if x.pairs < FEWEST_PAIRS or x.noise_trace <= 0 or x.grad_sq_norm <= 0:
            return math.inf
        ratio, mean_noise = x.noise_trace / x.grad_sq_norm, x.noise_trace / x.weight
        squares = x.noise_trace_squares - 2 * ratio * x.products
        variance = (squares + ratio * ratio * x.grad_sq_norm_squares) / x.pairs
        return max(variance, 0.0) / mean_noise / mean_noise

    def effective_weight(self, window: int) -> float:
        """Return the weight of all steps in a window of raw averages.

        A step of level L enters with w·L and has the variance L²/w, so the weight is
        (Σ w·L)²/Σ w·L². Where |G|² falls a window of n steps forgets late: what it has of old steps
        is larger than what has come since.
        """
        x = _Sums(*self.sums[window].tolist())
        return x.level * x.level / x.sq_level if x.sq_level > 0 else 0.0
