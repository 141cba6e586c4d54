# SPDX-License-Identifier: Apache-2.0
"""Histories of runs as columns, for tests of what is made of them."""

import numpy as np
from numpy.typing import NDArray


def history(
    *,
    rows: int = 40,
    noise_scale: float = 100.0,
    batch_size: float = 64.0,
    unresolved: int = 0,
    seconds: float = 0.5,
    devices: int = 2,
) -> dict[str, NDArray[np.float64]]:
    """A run of constant noise scale, 50 steps a row; the first rows may be unresolved."""
    step = 50.0 * np.arange(1, rows + 1)
    high = np.full(rows, 1.25 * noise_scale)
    high[:unresolved] = np.inf
    return {
        "step": step,
        "examples": batch_size * step,
        "batch_size": np.full(rows, batch_size),
        "noise_scale": np.full(rows, noise_scale),
        "low": np.full(rows, 0.8 * noise_scale),
        "high": high,
        "seconds_per_step": np.full(rows, seconds),
        "window": np.full(rows, 50.0),
        "devices": np.full(rows, float(devices)),
        "accumulation": np.ones(rows),
    }
