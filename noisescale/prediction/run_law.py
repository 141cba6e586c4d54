# SPDX-License-Identifier: Apache-2.0
"""Steps against examples for what one run reached, with bounds."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from scipy.optimize import brentq

from noisescale.band import Band
from noisescale.prediction.stretches import Array, Stretches
from noisescale.tradeoff import Tradeoff


class Sums(NamedTuple):
    """S_min and E_min of a run, at one of the ends of its noise scale."""

    min_steps: float
    min_examples: float

    def steps(self, batch_size: float) -> float:
        """S(B) = S_min + E_min/B."""
        return self.min_steps + self.min_examples / batch_size

    @property
    def critical_batch_size(self) -> float:
        """E_min/S_min; infinite where no step makes progress of its own."""
        return self.min_examples / self.min_steps if self.min_steps else math.inf


class _Parts(NamedTuple):
    """What the blocks of a run contribute to S_min and to E_min, at one end of their interval."""

    min_steps: Array
    min_examples: Array

    @property
    def sums(self) -> Sums:
        return Sums(float(self.min_steps.sum()), float(self.min_examples.sum()))


@dataclass(frozen=True)
class RunLaw:
    """S(B) = S_min + E_min/B of one run, with bounds from the intervals of its noise scale.

    The run's blocks have independent estimates, each with its interval. A sum over blocks
    t = Σ t_k, each monotone in its block's noise scale and so within l_k to u_k, has the bounds

        t - √(Σ (t_k - l_k)²)   to   t + √(Σ (u_k - t_k)²)

    (Zou & Donner's recovery of variance estimates, which keeps lopsided intervals lopsided). The
    error of kappa is common to all blocks: the sum with kappa at its ends adds one term to each
    root. A block that is not resolved has no upper end: there its examples are all that is known,
    and at that end it counts nothing for S_min. Where nothing is resolved the bounds are simply
    the sums at both ends.

    References:
        Zou & Donner 2008, "Construction of confidence limits about effect measures", Statistics
        in Medicine 27.
    """

    _middle: _Parts
    _low: _Parts
    _high: _Parts
    _noise_scale_ends: tuple[_Parts, _Parts]
    """With the noise scale at its ends, and kappa at its value."""
    _kappa_ends: tuple[_Parts, _Parts]
    """With kappa at its ends, and the noise scale at its value."""
    gamma: float
    """See `Tradeoff.gamma`; NaN where nothing is resolved."""

    @classmethod
    def of(cls, run: Stretches, kappa: Band) -> RunLaw:
        """Sum over the stretches of a run whose noise scale is multiplied by kappa.

        d(progress) = 1/(1 + b/B) a step at noise scale b and batch size B, so that

            S_min = Σ steps·B/(B + b)        E_min = Σ steps·B·b/(B + b)

        References:
            McCandlish et al. 2018, arXiv:1812.06162, appendix D.
        """
        middle = kappa.value * run.noise_scale
        gamma = math.nan
        if not np.isnan(middle).any() and middle.any():
            gamma = Tradeoff.from_run(middle, run.batch_size, run.steps).gamma

        value = _parts(run, middle)
        low, high = _parts(run, kappa.low * run.low), _parts(run, kappa.high * run.high)
        if kappa.low == kappa.high:
            return cls(value, low, high, (low, high), (value, value), gamma)
        of_b = _parts(run, kappa.value * run.low), _parts(run, kappa.value * run.high)
        of_kappa = (
            _parts(run, kappa.low * run.noise_scale),
            _parts(run, kappa.high * run.noise_scale),
        )
        return cls(value, low, high, of_b, of_kappa, gamma)

    @property
    def middle(self) -> Sums:
        """S_min and E_min at the value of the noise scale; NaN where nothing is resolved."""
        return self._middle.sums

    @property
    def low(self) -> Sums:
        """S_min and E_min with kappa and all noise scales at the lower ends of their bounds."""
        return self._low.sums

    @property
    def high(self) -> Sums:
        """Likewise at the upper ends."""
        return self._high.sums

    @property
    def known(self) -> Sums:
        """At the value of the noise scale; where that is not resolved, at its lower end."""
        return self.middle if math.isfinite(self.middle.critical_batch_size) else self.low

    @property
    def tradeoff(self) -> Tradeoff | None:
        """The law at the value of the noise scale; None where it is not resolved at all."""
        return None if math.isnan(self.gamma) else Tradeoff(*self.middle, self.gamma)

    @cached_property
    def critical_batch_size(self) -> Band:
        """B_crit = E_min/S_min, in examples; without upper end where nothing is resolved.

        B_crit is where E_min - β·S_min is zero: its bounds are where the bounds of that are.
        """
        value = self.middle.critical_batch_size
        if math.isnan(value):
            return Band(value, self.low.critical_batch_size, self.high.critical_batch_size)

        def excess(batch_size: float) -> Band:
            return self._band(lambda part: part.min_examples - batch_size * part.min_steps)

        return Band(
            value,
            _zero(lambda b: excess(b).low, value, 0.5),
            _zero(lambda b: excess(b).high, value, 2.0),
        )

    def steps(self, batch_size: float) -> Band:
        """Optimizer steps at a global batch of `batch_size` examples."""
        return self._band(lambda part: part.min_steps + part.min_examples / batch_size)

    def examples(self, batch_size: float) -> Band:
        """Examples processed at a global batch of `batch_size` examples."""
        return self.steps(batch_size) * batch_size

    def _band(self, of: Callable[[_Parts], Array]) -> Band:
        middle = of(self._middle)
        value = float(middle.sum())
        if math.isnan(value):
            ends = of(self._low), of(self._high)
            low, high = float(np.minimum(*ends).sum()), float(np.maximum(*ends).sum())
            # All noise scales agree about the batch size that the run itself was trained at.
            return Band(low if math.isclose(low, high, rel_tol=1e-9) else value, low, high)
        of_each = [of(part) - middle for part in self._noise_scale_ends]
        of_all = [float(of(part).sum()) - value for part in self._kappa_ends]
        down = np.append(np.minimum(*of_each), min(of_all)).clip(max=0)
        up = np.append(np.maximum(*of_each), max(of_all)).clip(min=0)
        return Band(value, value - math.sqrt(down @ down), value + math.sqrt(up @ up))


def _parts(run: Stretches, noise_scale: Array) -> _Parts:
    unbounded = np.isinf(noise_scale)
    finite = np.where(unbounded, 0.0, noise_scale)
    progress = np.where(unbounded, 0.0, run.batch_size / (run.batch_size + finite))
    processed = run.steps * run.batch_size
    contributed = (run.steps * progress, processed * (1 - progress))
    return _Parts(*(np.bincount(run.block, weights=x).astype(np.float64) for x in contributed))


def _zero(falling: Callable[[float], float], start: float, factor: float) -> float:
    """Where a function that falls from positive to negative is zero, sought from `start` on.

    0 where it is negative down to a millionth of it, infinite where positive up to a million.
    """
    sign = 1 if factor > 1 else -1
    if sign * falling(start) <= 0:  # no wider than rounding
        return start
    end = start
    for _ in range(20):
        end *= factor
        if sign * falling(end) <= 0:
            return float(brentq(falling, *sorted((start, end)), rtol=1e-12))
    return 0.0 if factor < 1 else math.inf
