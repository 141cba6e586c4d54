# SPDX-License-Identifier: Apache-2.0
"""S_min and E_min of a run, summed over its steps."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


class Sums(NamedTuple):
    """S_min and E_min of a run: its steps at an infinite batch size, its examples at a tiny one."""

    min_steps: float
    min_examples: float

    def steps(self, batch_size: float) -> float:
        """S(B) = S_min + E_min/B."""
        return self.min_steps + self.min_examples / batch_size

    @property
    def critical_batch_size(self) -> float:
        """E_min/S_min; infinite if S_min is 0."""
        return self.min_examples / self.min_steps if self.min_steps else math.inf


def worth(noise_scale: Any, batch_size: Any, steps: Any) -> tuple[Any, Any]:
    """Return what steps contribute to S_min and to E_min, as numbers or arrays; see `Parts`."""
    noise_free = steps / (1 + noise_scale / batch_size)
    return noise_free, noise_scale * noise_free


def gain_of(noise_scale: float, *, base_batch_size: float, batch_size: float) -> float:
    """Return AdaScale's gain: a step at B is worth (1 + b/B0)/(1 + b/B) steps at B0.

    b may be infinite.
    """
    if math.isinf(noise_scale):
        return batch_size / base_batch_size
    return (1 + noise_scale / base_batch_size) / (1 + noise_scale / batch_size)


class Parts(NamedTuple):
    """What each part of a run contributes to S_min and to E_min.

    A step at batch size B and noise scale b makes the share p = 1/(1 + b/B) of the progress of a
    noise-free step. It contributes

        p   to S_min        B·(1 - p) = b·p   to E_min

    Examples:
        >>> run = Parts.at_noise_scale(np.array([10.0, 30.0]), batch_size=30.0, steps=60.0)
        >>> run.sums
        Sums(min_steps=75.0, min_examples=1350.0)
        >>> run.sums.critical_batch_size, run.sums.steps(30.0)
        (18.0, 120.0)

    References:
        McCandlish et al. 2018, arXiv:1812.06162, appendix D.
    """

    min_steps: Array
    min_examples: Array

    @classmethod
    def at_noise_scale(
        cls, noise_scale: float | Array, batch_size: float | Array, steps: float | Array
    ) -> Parts:
        """Return the contributions of steps at a known noise scale."""
        return cls(*map(np.asarray, worth(noise_scale, batch_size, steps)))

    @classmethod
    def at_progress(cls, progress: Array, batch_size: Array, steps: Array) -> Parts:
        """Return the contributions of steps of known progress p.

        An estimate of p may lie outside of 0 to 1; no noise scale corresponds to such a p.
        """
        return cls(steps * progress, steps * batch_size * (1 - progress))

    def of_blocks(self, block: NDArray[np.intp]) -> Parts:
        """Add up the parts of each block."""
        return Parts(*(np.bincount(block, weights=x).astype(np.float64) for x in self))

    def steps(self, batch_size: float) -> Array:
        """Return what each part contributes to S(B)."""
        return self.min_steps + self.min_examples / batch_size

    @property
    def sums(self) -> Sums:
        """S_min and E_min."""
        return Sums(float(self.min_steps.sum()), float(self.min_examples.sum()))

    @property
    def gamma(self) -> float:
        """(Σ p·√b)²/(S_min·E_min), see `Tradeoff.gamma`; NaN where either is zero."""
        product = math.prod(self.sums)
        root = float(np.sqrt(self.min_steps * self.min_examples).sum())
        # At most 1, by Cauchy-Schwarz, but for rounding.
        return min(root**2 / product, 1.0) if product > 0 else math.nan


def fill_gaps(values: Array, measured: NDArray[np.bool_]) -> Array:
    """Replace NaN by the next measured value, and at the end by the last measured one.

    Here the whole run is known. `RunSoFar` cannot look ahead and takes the last value. If nothing
    is measured, all values stay NaN.
    """
    those = np.flatnonzero(measured)
    if not those.size:
        return np.full_like(values, math.nan)
    following = np.searchsorted(those, np.arange(values.size)).clip(max=those.size - 1)
    return np.asarray(values[those[following]])
