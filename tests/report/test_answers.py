# SPDX-License-Identifier: Apache-2.0
"""The front of what no other row beats."""

import math
from typing import Any, cast

from hypothesis import given
from hypothesis import strategies as st

from noisescale.report.answers import pareto

PLACES = st.tuples(*[st.sampled_from([1.0, 2.0, 3.0, 4.0, math.nan, math.inf])] * 2)


@given(st.lists(PLACES, max_size=12))
def test_the_front_is_what_comparing_all_pairs_leaves(places: list[tuple[float, float]]) -> None:
    rows: list[Any] = list(places)  # any object is a row to it

    front = pareto(rows, lambda row: cast(tuple[float, float], row))

    known = [(x, y) for x, y in places if math.isfinite(x) and math.isfinite(y)]
    left = [
        (x, y)
        for x, y in known
        if not any(u <= x and v <= y and (u, v) != (x, y) for u, v in known)
    ]
    assert list(front) == sorted(left)
