# SPDX-License-Identifier: Apache-2.0
"""Bring tags to common rows. TensorBoard may have kept different steps of each."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Scalars = Mapping[str, tuple[Array, Array]]

Points = Mapping[str, tuple[Array, Array, Array]]
"""The logged steps, times of writing and values of each tag, in the order of writing."""

LONGEST_GAP = 20
"""If fewer rows than this lie between two kept values of a tag, it was logged at these rows, too.

Suppose that a tag was logged at every row. Then the next point that TensorBoard kept is a row of
the base or a value of the tag, with nearly equal chances. So 20 rows follow each other without a
value with a chance of 2⁻²⁰.
"""


def in_rows(points: Points, base: str) -> dict[str, tuple[Array, Array]]:
    """Return the scalars by the number of their row, in the order of writing.

    Several rows may have the same logged step: the last row of a run and the row before it, and
    the steps that a resumed run trained again. The time of writing tells these rows apart. A point
    whose row TensorBoard did not keep lies between two rows.

    Args:
        points: The points of each tag.
        base: The tag whose points are the rows.

    Examples:
        >>> rows = np.array([[10.0, 19.0, 19.0, 9.0], [0.0, 1.0, 2.0, 9.0], [10.0, 15, 20, 10]])
        >>> high = np.array([[19.0, 9.0], [2.1, 9.1], [200.0, 100.0]])
        >>> in_rows({"step": tuple(rows), "high": tuple(high)}, "step")["high"]
        (array([2., 3.]), array([200., 100.]))
    """
    logged, written, _ = points[base]
    return {
        tag: (_rows_at(logged, written, steps, seconds), values)
        for tag, (steps, seconds, values) in points.items()
    }


def _rows_at(logged: Array, written: Array, steps: Array, seconds: Array) -> Array:
    """Return which row each point of a tag belongs to.

    The tags of a row are written one after another, always in the same order. So all points of a
    tag were written before the base's point of their row, or all after it.
    """
    if np.array_equal(steps, logged):
        return np.arange(len(steps), dtype=np.float64)
    written = np.maximum.accumulate(written)
    between = np.searchsorted(written, seconds)
    near = np.array([between - 1, between]).clip(0, len(logged) - 1)
    apart = np.where(logged[near] == steps, seconds - written[near], np.inf)
    nearest = np.take_along_axis(apart, np.abs(apart).argmin(axis=0)[None], axis=0)[0]
    row, sure = between, nearest[np.isfinite(nearest)]
    if sure.size and np.median(sure) >= 0:
        row = np.searchsorted(written, seconds, side="right") - 1
    kept = row.clip(0, len(logged) - 1)
    before, after = np.append(0.0, logged)[between], np.append(logged, np.inf)[between]
    share = (steps - before) / np.where(after > before, after - before, np.inf)
    lost = between - 1 + share.clip(0.001, 0.999)
    return np.where((row == kept) & (logged[kept] == steps), row, lost)


def on_common_steps(scalars: Scalars, base: str) -> dict[str, tuple[Array, Array]]:
    """Return the scalars at the steps of `base`, a tag that was logged in every row.

    TensorBoard keeps a number of points of each tag, chosen at random (1,000 by default). Tags that
    were logged equally often keep the same steps. The noise scale is not logged while it is not
    resolved, so it keeps other steps. In a long run few rows would then have a noise scale, and the
    other rows would look as if they were not resolved. So missing values are interpolated between
    their neighbours. They are not interpolated before the first value, or in gaps that are too long
    to be due to chance.

    Args:
        scalars: From a tag to its steps and its values.
        base: The tag whose steps are the rows.

    Returns:
        The scalars. A tag is unchanged if all its points were kept, or if it has all the steps of
        `base`.

    Examples:
        >>> rows = np.arange(0.0, 10.0, 2.0)
        >>> kept = np.array([3.0, 4.0, 5.0, 7.0, 9.0])
        >>> both = on_common_steps({"step": (rows, rows), "high": (kept, 10 * kept)}, "step")
        >>> both["high"]
        (array([4., 6., 8.]), array([40., 60., 80.]))
    """
    rows = np.unique(scalars[base][0])
    return {tag: _values_at(rows, *_latest(*points)) for tag, points in scalars.items()}


def _latest(steps: Array, values: Array) -> tuple[Array, Array]:
    """Sort by step. If a resumed run logged a step twice, use the later value."""
    unique, from_the_end = np.unique(steps[::-1], return_index=True)
    return unique, values[::-1][from_the_end]


def _values_at(rows: Array, steps: Array, values: Array) -> tuple[Array, Array]:
    exact = np.isin(rows, steps)
    # TensorBoard keeps as many points of each tag: one with fewer than the base has them all.
    if len(steps) < len(rows) or exact.all():
        return steps, values
    gap = np.searchsorted(steps, rows)  # which two values a row lies between
    lacking = np.bincount(gap[~exact], minlength=len(steps) + 1)
    between = (gap > 0) & (gap < len(steps)) & (lacking[gap] < LONGEST_GAP)
    known = rows[exact | between]
    return known, np.interp(known, steps, values)
