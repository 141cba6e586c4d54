# SPDX-License-Identifier: Apache-2.0
"""Adasum in numpy, in float64 and by recursion; it imports nothing of the package."""

from __future__ import annotations

from typing import Any

import numpy as np

Vector = np.ndarray[Any, np.dtype[np.float64]]


def expected(vectors: list[Vector]) -> Vector:
    """Adasum of any number of vectors: remainder first, then halves by recursion."""
    core = max(2**k for k in range(20) if 2**k <= len(vectors))
    leaves = [(vector, 1) for vector in vectors[:core]]
    for i, vector in enumerate(vectors[core:]):
        leaves[i] = _pair(leaves[i], (vector, 1))
    return _tree(leaves)[0]


def _tree(leaves: list[tuple[Vector, int]]) -> tuple[Vector, int]:
    if len(leaves) == 1:
        return leaves[0]
    half = len(leaves) // 2
    return _pair(_tree(leaves[:half]), _tree(leaves[half:]))


def _pair(a: tuple[Vector, int], b: tuple[Vector, int]) -> tuple[Vector, int]:
    (x, m), (y, n) = a, b
    dot, xx, yy = float(np.sum(x * y)), float(np.sum(x * x)), float(np.sum(y * y))
    of_x = 1.0 if xx < 1.5e-154 else 1 - m / (m + n) * dot / xx
    of_y = 1.0 if yy < 1.5e-154 else 1 - n / (m + n) * dot / yy
    return of_x * x + of_y * y, m + n
