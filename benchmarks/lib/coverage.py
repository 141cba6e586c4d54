# SPDX-License-Identifier: Apache-2.0
"""How often intervals hold the truth: what the benchmarks of coverage have in common."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def coverage(truth: Array, low: Array, high: Array, *, width_over: Array) -> dict[str, float]:
    """Return the shares of all runs, and the median width of those with an upper end.

    Args:
        truth: Of each run.
        low: Lower ends.
        high: Upper ends, infinite where there is none.
        width_over: What widths are relative to.
    """
    resolved = np.isfinite(high)
    width = (high - low)[resolved] / width_over[resolved]
    return {
        "runs": len(truth),
        "coverage": float(np.mean((low <= truth) & (truth <= high))),
        "truth_below": float(np.mean(truth < low)),
        "truth_above": float(np.mean(truth > high)),
        "resolved": float(resolved.mean()),
        "median_relative_width": float(np.median(width)) if resolved.any() else math.nan,
    }


def heading(name: str, width: int) -> str:
    return f"{name:{width}} coverage  below  above  resolved  width  median/truth"


def line(name: str, width: int, row: dict[str, float]) -> str:
    """A row under `heading`."""
    return (
        f"{name:{width}} {row['coverage']:8.1%} {row['truth_below']:6.1%} {row['truth_above']:6.1%}"
        f" {row['resolved']:9.1%} {row['median_relative_width']:6.2f}"
        f" {row['median_value_over_truth']:13.2f}"
    )
