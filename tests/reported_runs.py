# SPDX-License-Identifier: Apache-2.0
"""Histories of runs as columns, for tests of what is made of them."""

from typing import Any

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
    every: int = 50,
    **changed: Any,
) -> dict[str, NDArray[np.float64]]:
    """A run of constant noise scale, with a row every so many steps.

    The first rows may be unresolved, and columns may be changed to arrays or numbers.
    """
    step = 1.0 * every * np.arange(1, rows + 1)
    high = np.full(rows, 1.25 * noise_scale)
    high[:unresolved] = np.inf
    columns = {
        "step": step,
        "examples": batch_size * step,
        "batch_size": np.full(rows, batch_size),
        "noise_scale": np.full(rows, noise_scale),
        "low": np.full(rows, 0.8 * noise_scale),
        "high": high,
        "seconds_per_step": np.full(rows, seconds),
        "window": np.full(rows, 50.0),
        "devices": devices * np.ones(rows),
        "accumulation": np.ones(rows),
    }
    return columns | {name: values * np.ones(rows) for name, values in changed.items()}
