# SPDX-License-Identifier: Apache-2.0
"""Bring tags to common steps. TensorBoard may have kept different steps of each."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Scalars = Mapping[str, tuple[Array, Array]]

LONGEST_GAP = 20
"""If fewer rows than this lie between two kept values of a tag, it was logged at these rows, too.

Suppose that a tag was logged at every row. Then the next point that TensorBoard kept is a row of
the base or a value of the tag, with nearly equal chances. So 20 rows follow each other without a
value with a chance of 2⁻²⁰.
"""


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
    return {tag: _at(rows, *_latest(*points)) for tag, points in scalars.items()}


def _latest(steps: Array, values: Array) -> tuple[Array, Array]:
    """Sort by step. If a resumed run logged a step twice, use the later value."""
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
