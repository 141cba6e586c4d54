# SPDX-License-Identifier: Apache-2.0
"""Exponentially weighted means of the two moments, and how much single steps scatter."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from noisescale.estimation.level import Level
from noisescale.estimation.moments import GradientMoments

FEWEST_PAIRS = 7.0
"""Differences, each weighted by its decay, that a scatter is taken from: 8 steps' worth."""


_OF_STEPS, _OF_LEVELS = slice(7), slice(7, 9)  # columns of Scatter.sums


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
        self, step: NDArray[np.float64], weight: float, decay: NDArray[np.float64]
    ) -> Averages:
        """Add one step. Sums stay centred on the moving mean: raw squares would cancel."""
        decay_sq, sq_weight = decay * decay, weight * weight
        total = decay * self.weight + weight
        share = weight / total
        difference = step - self.mean
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
    last: tuple[float, float, float]
    """Weight w, S and Q of the latest step, S and Q over their level L; w is 0 before the first."""
    sums: NDArray[np.float64]
    """Exponential sums, shape (windows, 9).

    Over steps w·S, w·Q and w; over differences 1 and w₁w₂/(w₁ + w₂) times their squares SS, SQ and
    QQ; over steps w·L, and w·L² with the decay squared.
    """

    @classmethod
    def empty(cls, windows: int) -> Scatter:
        """Return the sums over no steps."""
        return cls(Level(), (0.0, 0.0, 0.0), np.zeros((windows, 9)))

    @staticmethod
    def decays(decay: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return what `after` multiplies the sums by, from the decay of each window."""
        columns = np.repeat(decay[:, None], 9, axis=1)
        columns[:, -1] **= 2
        return columns

    def after(
        self, moments: GradientMoments, weight: float, decays: NDArray[np.float64]
    ) -> Scatter:
        """Add one step. The first one only sets the level."""
        moments, weight = GradientMoments(*map(float, moments)), float(weight)  # not of numpy
        relative, level = self.level.step(moments, weight)
        if relative is None:
            return self._replace(level=level)
        signal, noise = relative
        last_weight, last_noise, last_signal = self.last
        differences = [0.0] * 4
        if last_weight:
            pair = weight * last_weight / (weight + last_weight)
            of_noise, of_signal = noise - last_noise, signal - last_signal
            squares = of_noise * of_noise, of_noise * of_signal, of_signal * of_signal
            differences = [1.0, *(pair * square for square in squares)]
        share = weight * self.level.sq_norm
        levels = share, share * self.level.sq_norm
        row = [weight * noise, weight * signal, weight, *differences, *levels]
        sums = decays * self.sums + np.array(row)
        return Scatter(level, (weight, noise, signal), sums)

    def squared_variation(self, window: int) -> float:
        """Return cv² over that window's steps, for a step of weight 1.

        cv is the standard deviation of S - R·Q over the mean of S, R being the ratio of the means.
        Infinite while the ratio is not known.
        """
        of_steps: list[float] = self.sums[window, _OF_STEPS].tolist()
        noise, signal, weight, pairs, noise_sq, product, signal_sq = of_steps
        if pairs < FEWEST_PAIRS or noise <= 0 or signal <= 0:
            return math.inf
        ratio, mean_noise = noise / signal, noise / weight
        variance = (noise_sq - 2 * ratio * product + ratio * ratio * signal_sq) / pairs
        return max(variance, 0.0) / mean_noise / mean_noise

    def effective_weight(self, window: int) -> float:
        """Return the weight of all steps in a window of raw averages.

        A step of level L enters with w·L and has the variance L²/w, so the weight is
        (Σ w·L)²/Σ w·L². Where |G|² falls a window of n steps forgets late: what it has of old steps
        is larger than what has come since.
        """
        levels, sq_levels = (float(x) for x in self.sums[window, _OF_LEVELS])
        return levels * levels / sq_levels if sq_levels > 0 else 0.0
