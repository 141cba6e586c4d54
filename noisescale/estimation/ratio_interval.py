# SPDX-License-Identifier: Apache-2.0
"""Fieller's confidence interval for a ratio of two correlated means."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray


def fieller_interval(
    noise_trace: float, grad_sq_norm: float, covariance: NDArray[np.float64], quantile: float
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
