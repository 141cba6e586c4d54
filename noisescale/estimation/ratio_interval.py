# SPDX-License-Identifier: Apache-2.0
"""The noise scale as a ratio of two correlated weighted means, with Fieller's interval."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtrit

Array = NDArray[np.float64]
Amount = TypeVar("Amount", float, Array)

LEAST_FREEDOM = 1e-9
"""With fewer degrees of freedom nothing is known of the covariance."""


class RatioInterval(NamedTuple):
    """The ratio of two means, within its interval."""

    value: float
    """NaN where the lower mean is not positive."""
    low: float
    high: float
    """Infinite where the lower mean may be zero."""


@dataclass(frozen=True)
class WeightedMeans(Generic[Amount]):
    """Weighted means of S = tr(Σ) and Q = |G|² over steps, and the sums that their errors are of.

    Of one average, or in arrays of several. Steps err independently, of whatever variance. With
    weights w, their sum W and r = (S - S̄, Q - Q̄) of a step, the means have the sandwich covariance

        v = Σw²·rrᵀ/W² / (1 - Σw²/W²)

    That is a sum over steps with the weights w², and by Satterthwaite has (Σw²)²/Σw⁴ - 1 degrees of
    freedom: n - 1 where all weigh alike, about half as many under exponential weights.
    """

    noise_trace: Amount
    """S̄."""
    grad_sq_norm: Amount
    """Q̄, signed."""
    weight: Amount
    """W; 1 where weights are shares."""
    scatter: Array
    """Σw²·rrᵀ, its distinct entries SS, SQ and QQ in the last dimension."""
    sq_weight: Amount
    """Σw²."""
    fourth_weight: Amount
    """Σw⁴."""

    def at(self: WeightedMeans[Array], k: int) -> WeightedMeans[float]:
        """Return one of several averages."""
        return WeightedMeans(**{name: values[k] for name, values in vars(self).items()})

    @property
    def sq_share(self) -> Amount:
        """Σw²/W², which is 1/n where n steps weigh alike."""
        return self.sq_weight / self.weight**2

    @property
    def covariance(self) -> Array:
        """v_SS, v_SQ and v_QQ, in the last dimension."""
        divisors = self.weight**2, np.maximum(1 - self.sq_share, 1e-300)
        sq_weight, rest = (np.asarray(x)[..., None] for x in divisors)
        return np.asarray(self.scatter / sq_weight / rest)

    @property
    def freedom(self) -> Amount:
        """Degrees of freedom of the covariance, 0 or less where it is not known."""
        fourth_weight: Amount = np.maximum(self.fourth_weight, 1e-300)
        return self.sq_weight**2 / fourth_weight - 1

    def ratio_interval(self, confidence: float, freedom: float | None = None) -> RatioInterval:
        """Return S̄/Q̄ of one average with its interval, 0 to infinity where scatter is not known.

        The interval ends at 0, where tr(Σ) does, and so does the value, which rounding alone could
        put outside of it otherwise.

        Args:
            confidence: Coverage of the interval.
            freedom: Degrees of freedom, where fewer are known to count than Satterthwaite's.
        """
        noise_trace, grad_sq_norm = float(self.noise_trace), float(self.grad_sq_norm)
        freedom = float(self.freedom if freedom is None else freedom)
        low, high = 0.0, math.inf
        if freedom > LEAST_FREEDOM:
            quantile = float(stdtrit(freedom, 0.5 + confidence / 2))
            low, high = fieller_interval(noise_trace, grad_sq_norm, self.covariance, quantile)
        value = math.nan
        if grad_sq_norm > 0:
            value = min(max(noise_trace / grad_sq_norm, low), high)
        return RatioInterval(value, low, high)


def fieller_interval(
    noise_trace: float, grad_sq_norm: float, covariance: Array, quantile: float
) -> tuple[float, float]:
    """Return the confidence interval for the ratio S/Q of two correlated means.

    It holds every ratio r that a test of "S - r·Q has mean zero" does not reject:

        (S - rQ)² <= t²·(v_SS - 2r·v_SQ + r²·v_QQ)      or      A·r² - 2B·r + C <= 0
        A = Q² - t²·v_QQ      B = S·Q - t²·v_SQ      C = S² - t²·v_SS

    The ratio sought is not negative. By the signs of A and C, "differs" being what the test says:

    - Q differs from zero and is positive (A > 0): the interval between the roots (B ∓ √D)/A, with
      D = B² - AC. Both ends are floored at 0, where tr(Σ) ends.
    - Q does not differ (A <= 0), S does and is positive (C > 0): no ratio is too large, and the
      root C/(B + √D) is the smallest that passes; at A = 0 it is C/2B. At A = 0 and B <= 0, which
      takes a Q that is zero at every step, no finite ratio passes. That bounds nothing.
    - Else nothing is known: neither differs, or one of them is negative.

    Args:
        noise_trace: S, the averaged tr(Σ).
        grad_sq_norm: Q, the averaged |G|².
        covariance: v_SS, v_SQ and v_QQ of the two averages.
        quantile: t, the two-sided quantile, in standard errors.

    Returns:
        The low end, floored at 0, and the high end, infinite where not resolved.

    Example:
        >>> fieller_interval(30.0, 1.0, np.array([4.0, 0.0, 0.01]), quantile=2.0)
        (23.78..., 38.71...)
        >>> fieller_interval(30.0, 0.1, np.array([4.0, 0.0, 0.01]), quantile=2.0)
        (98.66..., inf)

    References:
        Fieller 1954, "Some problems in interval estimation".
    """
    # In units of their own, or products of four would leave the range of floats.
    ss, sq, qq = (quantile * quantile * float(v) for v in covariance)
    noise_unit = max(abs(noise_trace), math.sqrt(ss)) or 1.0
    signal_unit = max(abs(grad_sq_norm), math.sqrt(qq)) or 1.0
    low, high = _interval(
        noise_trace / noise_unit,
        grad_sq_norm / signal_unit,
        ss / noise_unit / noise_unit,
        sq / noise_unit / signal_unit,
        qq / signal_unit / signal_unit,
    )
    return low / signal_unit * noise_unit, high / signal_unit * noise_unit


def _interval(
    noise_trace: float, grad_sq_norm: float, ss: float, sq: float, qq: float
) -> tuple[float, float]:
    """Return the interval, the quantile being in the covariance."""
    a, b, c = grad_sq_norm**2 - qq, noise_trace * grad_sq_norm - sq, noise_trace**2 - ss
    root = math.sqrt(max(b * b - a * c, 0.0))
    # C = A·low·high: of the two roots, the one whose sum cancels comes from the other, so that
    # the low end is continuous at A = 0.
    if a > 0 and grad_sq_norm > 0:
        if b > 0:
            return max(c / (b + root), 0.0), (b + root) / a
        return 0.0, max(c / (b - root), 0.0) if root > b else 0.0
    if a <= 0 < c and noise_trace > 0:
        if b > 0:
            return c / (b + root), math.inf
        if a < 0:
            return (b - root) / a, math.inf
    return 0.0, math.inf
