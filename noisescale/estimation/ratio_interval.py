# SPDX-License-Identifier: Apache-2.0
"""The ratio of two correlated weighted means, with Fieller's interval."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

from scipy.special import stdtrit

LEAST_FREEDOM = 1e-9
"""The covariance is not known with fewer degrees of freedom."""


class RatioInterval(NamedTuple):
    """The ratio of two means, with its interval."""

    value: float
    """The ratio; NaN if the mean in the denominator is not positive."""
    low: float
    high: float
    """The upper end; infinite if the mean in the denominator may be zero."""


class WeightedMeans(NamedTuple):
    """Weighted means of S = tr(Σ) and Q = |G|² over steps, with the sums for their errors.

    The errors of steps are independent; their variances may differ. Let w be the weight of a step,
    W the sum of the weights, and r = (S - S̄, Q - Q̄) the residual of a step. The means have the
    sandwich covariance

        v = Σw²·rrᵀ/W² / (1 - Σw²/W²)

    This is a sum over steps with the weights w². By Satterthwaite's formula it has
    (Σw²)²/Σw⁴ - 1 degrees of freedom: n - 1 for equal weights, about half for exponential weights.
    """

    noise_trace: float
    """S̄."""
    grad_sq_norm: float
    """Q̄, signed."""
    weight: float
    """W; it is 1 if the weights are shares."""
    scatter: Iterable[float]
    """Σw²·rrᵀ, its distinct entries SS, SQ and QQ."""
    sq_weight: float
    """Σw²."""
    fourth_weight: float
    """Σw⁴."""

    @property
    def sq_share(self) -> float:
        """Σw²/W²; for n equal weights it is 1/n."""
        return self.sq_weight / (self.weight * self.weight)

    @property
    def covariance(self) -> list[float]:
        """v_SS, v_SQ and v_QQ."""
        sq_weight, rest = self.weight * self.weight, max(1 - self.sq_share, 1e-300)
        return [entry / sq_weight / rest for entry in self.scatter]

    @property
    def freedom(self) -> float:
        """Degrees of freedom of the covariance; 0 or less if the covariance is not known."""
        return self.sq_weight * self.sq_weight / max(self.fourth_weight, 1e-300) - 1

    def ratio_interval(self, confidence: float, freedom: float | None = None) -> RatioInterval:
        """Return S̄/Q̄ with its interval: 0 to infinity while the scatter is not known.

        tr(Σ) is never negative, so neither end of the interval is. The value is clamped to the
        interval, because rounding could put the value outside.

        Args:
            confidence: Coverage of the interval.
            freedom: Degrees of freedom, if they are known to be fewer than by Satterthwaite.
        """
        noise_trace, grad_sq_norm = self.noise_trace, self.grad_sq_norm
        freedom = self.freedom if freedom is None else freedom
        low, high = 0.0, math.inf
        if freedom > LEAST_FREEDOM:
            quantile = float(stdtrit(freedom, 0.5 + confidence / 2))
            not_negative = max(noise_trace, 0.0)  # else the interval may be that of zero alone
            low, high = fieller_interval(not_negative, grad_sq_norm, self.covariance, quantile)
        value = math.nan
        if grad_sq_norm > 0:
            value = min(max(noise_trace / grad_sq_norm, low), high)
        return RatioInterval(value, low, high)


def fieller_interval(
    noise_trace: float, grad_sq_norm: float, covariance: Iterable[float], quantile: float
) -> tuple[float, float]:
    """Return the confidence interval for the ratio S/Q of two correlated means.

    The interval contains every ratio r for which a test does not reject "S - r·Q has mean zero":

        (S - rQ)² <= t²·(v_SS - 2r·v_SQ + r²·v_QQ)      or      A·r² - 2B·r + C <= 0
        A = Q² - t²·v_QQ      B = S·Q - t²·v_SQ      C = S² - t²·v_SS

    The true ratio is not negative. The result depends on which means the test distinguishes from
    zero, that is, on the signs of A and C:

    - Q is distinguished from zero and positive (A > 0): the interval between the two roots
      (B ∓ √D)/A, with D = B² - AC. Both ends are at least 0, because tr(Σ) is.
    - Q is not distinguished from zero (A <= 0); S is, and is positive (C > 0): no ratio is too
      large. The smallest ratio that passes is the root C/(B + √D); at A = 0 it is C/2B. At A = 0
      and B <= 0 no finite ratio passes, and the interval has no bounds. This takes a Q that is zero
      at every step.
    - Otherwise nothing is known: neither mean is distinguished from zero, or one is negative.

    Args:
        noise_trace: S, the averaged tr(Σ).
        grad_sq_norm: Q, the averaged |G|².
        covariance: v_SS, v_SQ and v_QQ of the two averages.
        quantile: t, the two-sided quantile, in standard errors.

    Returns:
        The low end, at least 0, and the high end, infinite if the ratio is not resolved.

    Examples:
        >>> fieller_interval(30.0, 1.0, [4.0, 0.0, 0.01], quantile=2.0)
        (23.78..., 38.71...)
        >>> fieller_interval(30.0, 0.1, [4.0, 0.0, 0.01], quantile=2.0)
        (98.66..., inf)

    References:
        Fieller 1954, "Some problems in interval estimation".
    """
    # In units of their own, or products of four would leave the range of floats.
    ss, sq, qq = (quantile * quantile * v for v in covariance)
    noise_unit = max(abs(noise_trace), math.sqrt(ss)) or 1.0
    signal_unit = max(abs(grad_sq_norm), math.sqrt(qq)) or 1.0
    s, q = noise_trace / noise_unit, grad_sq_norm / signal_unit
    a = q * q - qq / signal_unit / signal_unit
    b = s * q - sq / noise_unit / signal_unit
    c = s * s - ss / noise_unit / noise_unit
    root = math.sqrt(max(b * b - a * c, 0.0))
    low, high = 0.0, math.inf
    # C = A·low·high: of the two roots, the one whose sum cancels comes from the other, so that
    # the low end is continuous at A = 0.
    if a > 0 and q > 0:
        if b > 0:
            low, high = max(c / (b + root), 0.0), (b + root) / a
        else:
            high = max(c / (b - root), 0.0) if root > b else 0.0
    elif a <= 0 < c and s > 0:
        if b > 0:
            low = c / (b + root)
        elif a < 0:
            low = (b - root) / a
    return low / signal_unit * noise_unit, high / signal_unit * noise_unit


def steps_needed(squared_variation: float, relative_width: float) -> float:
    """Return n = (4·cv/width)², the number of steps that give an interval of a given width.

    By the delta method, a ratio b of means over n steps has the interval b·(1 ± 2·cv/√n).

    Args:
        squared_variation: cv². cv is the standard deviation of S - b·Q of single steps, divided by
            the mean of S. Measure cv over more steps than the window has: to choose a window by
            its own interval favours windows that are narrow by luck.
        relative_width: The wanted width of the interval, (high - low)/value.

    Examples:
        >>> steps_needed(squared_variation=0.25, relative_width=0.5)
        16.0
    """
    return 16 * squared_variation / relative_width**2
