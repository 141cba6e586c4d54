# SPDX-License-Identifier: Apache-2.0
"""Intervals that hold where tr(Σ) is known within a factor only, however many steps are averaged.

The estimates share their error: what tr(Σ) is too large by, |G|² is too small by, as the two make
up the mean |g|² = |G|² + tr(Σ)/B, which is measured without such an error. With the noise scale
b = tr(Σ)/|G|² that reads 1/b + 1/B = |g|²/tr(Σ). So a factor k on tr(Σ) divides 1/b + 1/B: an error
of few percent is one of few percent where b is below B, and has no bound where b is far above it.
"""

from __future__ import annotations

import math


def widened(low: float, high: float, factor: float, batch_size: float) -> tuple[float, float]:
    """Return the interval of the noise scale where tr(Σ) may be off by a factor besides.

    Args:
        low: Lower end of the interval without that error, in examples.
        high: Upper end; infinite where it is not resolved.
        factor: At least 1: tr(Σ) is at least 1/factor times and at most factor times the estimate.
        batch_size: Of the steps; the harmonic mean over their weights where it changed.

    Example:
        >>> widened(40.6, 46.0, factor=1.5, batch_size=128)
        (24.4..., 83.6...)
        >>> widened(1195, 1662, factor=1.5, batch_size=128)
        (194.0..., inf)
    """
    if factor == 1 or not batch_size > 0:
        return low, high
    if low > 0:
        low = 1 / ((1 / low + 1 / batch_size) * factor - 1 / batch_size)
    inverse = (1 / high + 1 / batch_size) / factor - 1 / batch_size if high > 0 else math.inf
    return low, 1 / inverse if inverse > 0 else math.inf
