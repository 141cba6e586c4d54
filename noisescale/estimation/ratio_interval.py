# SPDX-License-Identifier: Apache-2.0
"""The noise scale as a ratio of two correlated weighted means, with Fieller's interval."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

from scipy.special import stdtrit

LEAST_FREEDOM = 1e-9
"""With fewer degrees of freedom nothing is known of the covariance."""


class RatioInterval(NamedTuple):
    """The ratio of two means, within its interval."""

    value: float
    """NaN where the lower mean is not positive."""
    low: float
    high: float
    """Infinite where the lower mean may be zero."""


class WeightedMeans(NamedTuple):
    """Weighted means of S = tr(Σ) and Q = |G|² over steps, and the sums that their errors are of.

    Steps err independently, of whatever variance. With weights w, their sum W and
    r = (S - S̄, Q - Q̄) of a step, the means have the sandwich covariance

        v = Σw²·rrᵀ/W² / (1 - Σw²/W²)

    That is a sum over steps with the weights w², and by Satterthwaite has (Σw²)²/Σw⁴ - 1 degrees of
    freedom: n - 1 where all weigh alike, about half as many under exponential weights.
    """

    noise_trace: float
    """S̄."""
    grad_sq_norm: float
    """Q̄, signed."""
    weight: float
    """W; 1 where weights are shares."""
    scatter: Iterable[float]
    """Σw²·rrᵀ, its distinct entries SS, SQ and QQ."""
    sq_weight: float
    """Σw²."""
    fourth_weight: float
    """Σw⁴."""

    @property
    def sq_share(self) -> float:
        """Σw²/W², which is 1/n where n steps weigh alike."""
        return self.sq_weight / (self.weight * self.weight)

    @property
    def covariance(self) -> list[float]:
        """v_SS, v_SQ and v_QQ."""
        sq_weight, rest = self.weight * self.weight, max(1 - self.sq_share, 1e-300)
        return [entry / sq_weight / rest for entry in self.scatter]

    @property
    def freedom(self) -> float:
        """Degrees of freedom of the covariance, 0 or less where it is not known."""
        return self.sq_weight * self.sq_weight / max(self.fourth_weight, 1e-300) - 1

    def ratio_interval(self, confidence: float, freedom: float | None = None) -> RatioInterval:
        """Return S̄/Q̄ with its interval, 0 to infinity where scatter is not known.

        The interval ends at 0, where tr(Σ) does, and so does the value, which rounding alone could
        put outside of it otherwise.

        Args:
            confidence: Coverage of the interval.
            freedom: Degrees of freedom, where fewer are known to count than Satterthwaite's.
        """
        noise_trace, grad_sq_norm = self.noise_trace, self.grad_sq_norm
        freedom = self.freedom if freedom is None else freedom
        low, high = 0.0, math.inf
        if freedom > LEAST_FREEDOM:
            quantile = float(stdtrit(freedom, 0.5 + confidence / 2))
            low, high = fieller_interval(noise_trace, grad_sq_norm, self.covariance, quantile)
        value = math.nan
        if grad_sq_norm > 0:
            value = min(max(noise_trace / grad_sq_norm, low), high)
        return RatioInterval(value, low, high)


def fieller_interval(
    noise_trace: float, grad_sq_norm: float, covariance: Iterable[float], quantile: float
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
    """Return n = (4·cv/width)², the steps whose noise scale has an interval of that width.

    By the delta method a ratio b of means over n steps has the interval b·(1 ± 2·cv/√n).

    Args:
        squared_variation: cv², with cv the standard deviation of S - b·Q of single steps over
            the mean of S. Take it over more steps than those that are answered from: choosing a
            window by its own interval favours those that are narrow by luck.
        relative_width: Of the interval, (high - low)/value.

    Example:
        >>> steps_needed(squared_variation=0.25, relative_width=0.5)
        16.0
    """
    return 16 * squared_variation / relative_width**2
