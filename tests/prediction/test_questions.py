# SPDX-License-Identifier: Apache-2.0
"""What a reader asks first, and the front of what no other row beats."""

import math
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from reported_runs import history

from noisescale.prediction.figures.time_compute_front import pareto
from noisescale.prediction.predict import predict

PLACES = st.tuples(*[st.sampled_from([1.0, 2.0, 3.0, 4.0, math.nan, math.inf])] * 2)


@given(st.lists(PLACES, max_size=12))
def test_the_front_is_what_comparing_all_pairs_leaves(places: list[tuple[float, float]]) -> None:
    rows: list[Any] = list(places)  # any object is a row to it

    front = pareto(rows, lambda row: cast(tuple[float, float], row))

    known = [(x, y) for x, y in places if math.isfinite(x) and math.isfinite(y)]
    beaten = {(x, y) for x, y in known for u, v in known if u <= x and v <= y and (u, v) != (x, y)}
    assert list(front) == sorted(one for one in known if one not in beaten)


@pytest.mark.parametrize(
    ("of_second_half", "device_batch_size", "accumulation"),
    [
        (64.0, 32, 1),
        (60.0, 31, 1),  # a mean of 31 on each device
        (131.0, 32, 2),  # 48.75 with 32 at most
    ],
)
def test_twice_the_devices_have_whole_examples_on_each(
    of_second_half: float, device_batch_size: int, accumulation: int
) -> None:
    sizes = np.repeat([64.0, of_second_half], 20)
    run = history(batch_size=sizes, examples=np.cumsum(50 * sizes))

    row = predict(run, max_device_batch_size=32).row_on(4)

    found = (row.device_batch_size, row.accumulation, row.devices)
    assert found == (device_batch_size, accumulation, 4)
