# SPDX-License-Identifier: Apache-2.0
"""Exponentially weighted means of the two moments, and the scatter of single steps."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from noisescale.estimation.level import Level
from noisescale.estimation.moments import GradientMoments
from noisescale.estimation.ratio_interval import WeightedMeans

FEWEST_PAIRS = 7.0
"""A scatter needs at least this many differences of steps, weighted by their decay: 8 steps."""


class Average(NamedTuple):
    """Exponentially weighted sums over one window; x is a step's S = tr(Σ) and Q = |G|²."""

    weight: float = 0.0
    """Σw."""
    sq_weight: float = 0.0
    """Σw²."""
    fourth_weight: float = 0.0
    """Σw⁴."""
    mean: tuple[float, float] = (0.0, 0.0)
    """Σwx/Σw."""
    offset: tuple[float, float] = (0.0, 0.0)
    """Σw²(x - mean)."""
    scatter: tuple[float, float, float] = (0.0, 0.0, 0.0)
    """Σw²(x - mean)(x - mean)ᵀ, its distinct entries SS, SQ and QQ."""

    def after(self, moments: GradientMoments, weight: float, decay: float) -> Average:
        """Add one step. Sums stay centred on the moving mean: raw squares would cancel."""
        (mean_noise, mean_signal), (noise, signal), (ss, sq, qq) = self[3:]
        decay_sq, sq_weight = decay * decay, weight * weight
        total = decay * self.weight + weight
        share = weight / total
        of_noise, of_signal = moments.noise_trace - mean_noise, moments.grad_sq_norm - mean_signal
        shift_noise, shift_signal = of_noise * share, of_signal * share
        earlier = decay_sq * self.sq_weight
        noise, signal = decay_sq * noise, decay_sq * signal
        # The step's own square and what earlier steps add as the mean moves away from them.
        squared = earlier * share * share + sq_weight * (1 - share) * (1 - share)
        crossed = share * (noise * of_signal + of_noise * signal)
        return Average(
            total,
            earlier + sq_weight,
            decay_sq * decay_sq * self.fourth_weight + sq_weight * sq_weight,
            (mean_noise + shift_noise, mean_signal + shift_signal),
            (
                noise - earlier * shift_noise + sq_weight * (of_noise - shift_noise),
                signal - earlier * shift_signal + sq_weight * (of_signal - shift_signal),
            ),
            (
                decay_sq * ss + of_noise * (squared * of_noise - 2 * share * noise),
                decay_sq * sq + squared * of_noise * of_signal - crossed,
                decay_sq * qq + of_signal * (squared * of_signal - 2 * share * signal),
            ),
        )

    @property
    def means(self) -> WeightedMeans:
        """The averages, with the sums that their errors are computed from."""
        noise_trace, grad_sq_norm = self.mean
        return WeightedMeans(
            noise_trace=noise_trace,
            grad_sq_norm=grad_sq_norm,
            weight=self.weight,
            scatter=self.scatter,
            sq_weight=self.sq_weight,
            fourth_weight=self.fourth_weight,
        )


class Scatter(NamedTuple):
    """Predict the precision of each window without looking at its own interval.

    Steps of large |G|² dominate raw averages. So the moments of each step are divided by a trailing
    average of |g|², see `Level`: all steps count the same, and the scatter remains valid after the
    noise scale has risen.

    The scatter comes from differences of successive steps. A slow drift of the moments hardly
    changes them. The covariance of a step of weight w is assumed to be C/w. (This is exact for |G|²
    where the gradient's own spread dominates.) The covariance of a difference is then
    C·(1/w₁ + 1/w₂), and w₁w₂/(w₁ + w₂) times the squared difference estimates C.
    """

    level: Level
    last: tuple[float, float, float]
    """Weight w, S/L and Q/L of the latest step, L being its level; w is 0 before the first step."""
    sums: NDArray[np.float64]
    """Exponential sums, one row for each window: shape (windows, 9).

    Columns 0 to 2 sum w·S, w·Q and w over steps. Columns 3 to 6 sum over differences: 1, and
    w₁w₂/(w₁ + w₂) times their squares SS, SQ and QQ. Columns 7 and 8 sum w·L and w·L² over steps;
    the last one decays with the squared factor.
    """

    @classmethod
    def empty(cls, windows: int) -> Scatter:
        """Return the sums over no steps."""
        return cls(Level(), (0.0, 0.0, 0.0), np.zeros((windows, 9)))

    @staticmethod
    def decays(decay: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the factors by which `after` multiplies the sums, from each window's decay."""
        columns = np.repeat(decay[:, None], 9, axis=1)
        columns[:, -1] **= 2
        return columns

    def after(
        self, moments: GradientMoments, weight: float, decays: NDArray[np.float64]
    ) -> Scatter:
        """Add one step. The first one only sets the level."""
        relative, level = self.level.step(moments, weight)
        if relative is None:
            return self._replace(level=level)
        noise, signal = relative.noise_trace, relative.grad_sq_norm
        last_weight, last_noise, last_signal = self.last
        # Before there is another step the pair weighs nothing.
        pair = weight * last_weight / (weight + last_weight)
        of_noise, of_signal = noise - last_noise, signal - last_signal
        of_level = weight * self.level.sq_norm
        added = (
            *(weight * noise, weight * signal, weight),
            1.0 if last_weight else 0.0,
            pair * (of_noise * of_noise),
            pair * (of_noise * of_signal),
            pair * (of_signal * of_signal),
            *(of_level, of_level * self.level.sq_norm),
        )
        return Scatter(level, (weight, noise, signal), decays * self.sums + np.array(added))

    def squared_variation(self, window: int) -> float:
        """Return cv² of a step of weight 1, over the steps of a window.

        cv is the standard deviation of S - R·Q divided by the mean of S. R is the ratio of the
        means. The result is infinite while the ratio is not known.
        """
        of_steps: list[float] = self.sums[window, :7].tolist()
        noise, signal, weight, pairs, ss, sq, qq = of_steps
        if pairs < FEWEST_PAIRS or noise <= 0 or signal <= 0:
            return math.inf
        ratio, mean_noise = noise / signal, noise / weight
        variance = (ss - 2 * ratio * sq + ratio * ratio * qq) / pairs
        return max(variance, 0.0) / mean_noise / mean_noise

    def effective_weight(self, window: int) -> float:
        """Return the effective weight of all steps in a window of raw averages.

        A step of level L enters a raw average with w·L and has the variance L²/w. So the effective
        weight is (Σ w·L)²/Σ w·L². While |G|² falls, a window of n steps forgets late: old steps
        contribute more than new ones.
        """
        level, sq_level = map(float, self.sums[window, 7:])
        return level * level / sq_level if sq_level > 0 else 0.0
