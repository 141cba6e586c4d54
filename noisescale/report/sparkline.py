# SPDX-License-Identifier: Apache-2.0
"""A course of positive numbers in one line of characters."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

BARS = "▁▂▃▄▅▆▇█"

UNKNOWN = "·"

ROUNDING = 1e-9
"""A tolerance with which equal steps of a factor are drawn alike, whatever the last bit is."""

LEAST_SPAN = 2.0
"""Largest over smallest value that the height of the line stands for, at least."""


def sparkline(places: NDArray[np.float64], values: NDArray[np.float64], width: int) -> str:
    """Draw values over their places, in logarithms: each character is the median of its part.

    Args:
        places: Where the values are, rising, for instance steps.
        values: Positive ones; others are drawn as unknown.
        width: In characters.

    Examples:
        >>> sparkline(np.arange(5.0), np.array([math.nan, 1.0, 10.0, 100.0, 1000.0]), 5)
        '·▁▃▆█'
    """
    width = min(width, len(values))
    known = np.isfinite(values) & (values > 0)
    if not known.any():
        return UNKNOWN * width
    edges = np.linspace(places[0], places[-1], width + 1)[1:-1]
    part = np.searchsorted(edges, places, side="right")
    medians = [
        float(np.median(np.log(inside))) if (inside := values[known & (part == k)]).size else None
        for k in range(width)
    ]
    drawn = [value for value in medians if value is not None]
    low, high = min(drawn), max(drawn)
    margin = max(math.log(LEAST_SPAN) - (high - low), 0) / 2
    low, high = low - margin, high + margin
    return "".join(
        UNKNOWN
        if value is None
        else BARS[min(int((value - low) / (high - low) * len(BARS) + ROUNDING), len(BARS) - 1)]
        for value in medians
    )
