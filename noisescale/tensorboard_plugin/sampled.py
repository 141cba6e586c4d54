# SPDX-License-Identifier: Apache-2.0
"""Tags of which TensorBoard kept different steps -> tags on the steps of one of them."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Scalars = Mapping[str, tuple[Array, Array]]

LONGEST_GAP = 20
"""Rows without a value between two values of a tag: with fewer, it was logged at them.

Where a tag was logged at every row, TensorBoard kept a row of the base or a value of the tag with
nearly equal chance, so that so many rows come in a row with a chance of 2⁻²⁰.
"""


def on_common_steps(scalars: Scalars, base: str) -> dict[str, tuple[Array, Array]]:
    """Return the scalars at the steps of `base`, a tag that is in every row that was logged.

    Of each tag TensorBoard keeps a number of points at random (1,000 unless told otherwise). Tags
    that were logged equally often keep the same steps. One that was left out now and then, as the
    noise scale is where it is not resolved, keeps others: of a long run few rows would have it,
    and the rest would pass for not resolved. It is interpolated between its neighbours, except in
    gaps that are too long to be due to chance, and before its first value.

    Args:
        scalars: From tag to the steps it was logged at, and its values.
        base: Rows are the steps of this tag.

    Returns:
        Tags that keep all they were logged at, or the steps of `base`, are as they were.

    Example:
        >>> rows = np.arange(0.0, 10.0, 2.0)
        >>> kept = np.array([3.0, 4.0, 5.0, 7.0, 9.0])
        >>> both = on_common_steps({"step": (rows, rows), "high": (kept, 10 * kept)}, "step")
        >>> both["high"]
        (array([4., 6., 8.]), array([40., 60., 80.]))
    """
    rows = np.unique(scalars[base][0])
    return {tag: _at(rows, *_latest(*points)) for tag, points in scalars.items()}


def _latest(steps: Array, values: Array) -> tuple[Array, Array]:
    """By rising step; of a step that was logged twice, by a run that was resumed, the later."""
    unique, from_the_end = np.unique(steps[::-1], return_index=True)
    return unique, values[::-1][from_the_end]


def _at(rows: Array, steps: Array, values: Array) -> tuple[Array, Array]:
    exact = np.isin(rows, steps)
    # TensorBoard keeps as many points of each tag: one with fewer than the base has them all.
    if len(steps) < len(rows) or exact.all():
        return steps, values
    gap = np.searchsorted(steps, rows)  # which two values a row lies between
    lacking = np.bincount(gap[~exact], minlength=len(steps) + 1)
    between = (gap > 0) & (gap < len(steps)) & (lacking[gap] < LONGEST_GAP)
    known = rows[exact | between]
    return known, np.interp(known, steps, values)
