# SPDX-License-Identifier: Apache-2.0
"""Exponentially weighted means of the two moments, and how much single steps scatter."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

# The three distinct entries (SS, SQ, QQ) of a symmetric 2x2 matrix over S = tr(Σ), Q = |G|².
_ROW = [0, 0, 1]
_COL = [0, 1, 1]


class Averages(NamedTuple):
    """Exponentially weighted sums over one window a row; column 0 is S = tr(Σ), 1 is Q = |G|²."""

    weight: NDArray[np.float64]
    """Σw, shape (windows,)."""
    sq_weight: NDArray[np.float64]
    """Σw², shape (windows,)."""
    fourth_weight: NDArray[np.float64]
    """Σw⁴, shape (windows,)."""
    length: NDArray[np.float64]
    """Σ of the decays alone, shape (windows,): Σw of steps of weight 1."""
    mean: NDArray[np.float64]
    """Σwx/Σw, shape (windows, 2)."""
    offset: NDArray[np.float64]
    """Σw²(x - mean), shape (windows, 2)."""
    scatter: NDArray[np.float64]
    """Σw²(x - mean)(x - mean)ᵀ, shape (windows, 3)."""

    @classmethod
    def empty(cls, windows: int) -> Averages:
        """Return the sums over no steps."""
        zero, two, three = np.zeros(windows), np.zeros((windows, 2)), np.zeros((windows, 3))
        return cls(zero, zero, zero, zero, two, two, three)

    def after(
        self, step: NDArray[np.float64], weight: float, decay: NDArray[np.float64]
    ) -> Averages:
        """Add one step. Sums stay centred on the moving mean: raw squares would cancel."""
        decay_sq = decay**2
        total = decay * self.weight + weight
        shift = (step - self.mean) * (weight / total)[:, None]
        mean = self.mean + shift
        residual = step - mean
        earlier = (decay_sq * self.sq_weight)[:, None]
        offset = decay_sq[:, None] * self.offset
        scatter = (
            decay_sq[:, None] * self.scatter
            - offset[:, _ROW] * shift[:, _COL]
            - shift[:, _ROW] * offset[:, _COL]
            + earlier * shift[:, _ROW] * shift[:, _COL]
            + weight**2 * residual[:, _ROW] * residual[:, _COL]
        )
        return Averages(
            weight=total,
            sq_weight=earlier[:, 0] + weight**2,
            fourth_weight=decay_sq**2 * self.fourth_weight + weight**4,
            length=decay * self.length + 1,
            mean=mean,
            offset=offset - earlier * shift + weight**2 * residual,
            scatter=scatter,
        )


class Scatter(NamedTuple):
    """Scatter of single steps from successive differences, over the longest window.

    A step of weight w is taken to have the covariance C/w (exact for |G|² where the gradient's
    own spread rules), so that a difference has C·(1/w₁ + 1/w₂) and w₁w₂/(w₁ + w₂) times its
    square estimates C.
    """

    last: NDArray[np.float64]
    last_weight: float
    pairs: float
    squares: NDArray[np.float64]

    @classmethod
    def empty(cls) -> Scatter:
        """Return the scatter of no steps."""
        return cls(np.zeros(2), 0.0, 0.0, np.zeros(3))

    def after(self, step: NDArray[np.float64], weight: float, decay: float) -> Scatter:
        """Add one step."""
        if self.last_weight == 0:
            return self._replace(last=step, last_weight=weight)
        difference = step - self.last
        pair_weight = weight * self.last_weight / (weight + self.last_weight)
        squares = decay * self.squares + pair_weight * difference[_ROW] * difference[_COL]
        return Scatter(step, weight, decay * self.pairs + 1, squares)

    def covariance(self, weight: float) -> tuple[float, float, float]:
        """Covariance (SS, SQ, QQ) of one step of this weight."""
        ss, sq, qq = (self.squares / (self.pairs * weight)).tolist()
        return ss, sq, qq
