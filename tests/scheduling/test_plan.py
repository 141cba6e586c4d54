# SPDX-License-Identifier: Apache-2.0
"""Plans are within the bounds, and the nearest to what was wanted."""

import math
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from noisescale.scheduling.plan import Bounds, Plan, plan_for


@given(
    wanted=st.floats(0.5, 1e5),
    devices=st.integers(1, 9),
    device_batch_size=st.integers(1, 64),
)
def test_counted_micro_batches_come_nearest_by_ratio(
    wanted: float, devices: int, device_batch_size: int
) -> None:
    plan = plan_for(wanted, devices=devices, device_batch_size=device_batch_size)

    unit = devices * device_batch_size
    possible = [unit * n for n in range(1, math.ceil(wanted / unit) + 2)]
    nearest = min(abs(math.log(size / wanted)) for size in possible)
    assert abs(math.log(plan.batch_size / wanted)) == pytest.approx(nearest, abs=1e-9)
    assert plan == Plan(device_batch_size, round(plan.batch_size / unit), devices)


@given(
    wanted=st.floats(1, 1e5),
    devices=st.integers(1, 9),
    largest=st.integers(1, 64),
    least=st.integers(1, 3),
)
def test_free_micro_batches_are_few_and_as_near_as_whole_examples_allow(
    wanted: float, devices: int, largest: int, least: int
) -> None:
    bounds = Bounds(min_accumulation=least)

    plan = plan_for(wanted, devices=devices, max_device_batch_size=largest, bounds=bounds)

    assert plan.device_batch_size <= largest
    assert plan.accumulation == max(math.ceil(wanted / devices / largest - 1e-9), least)
    step = plan.accumulation * devices
    assert abs(plan.batch_size - wanted) <= max(step, step * least)


@given(
    wanted=st.floats(0.1, 1e4),
    devices=st.integers(1, 4),
    device_batch_size=st.integers(1, 16),
    # Not within the 1e-9 of a plan that count as rounding.
    bounds=st.tuples(*[st.floats(1, 2000, width=32)] * 2).map(sorted),
)
def test_bounds_are_kept_or_refused(
    wanted: float, devices: int, device_batch_size: int, bounds: list[float]
) -> None:
    low, high = bounds
    unit = devices * device_batch_size
    inside = [unit * n for n in range(1, 2001) if low <= unit * n <= high]

    def plan() -> Plan:
        return plan_for(
            wanted, devices=devices, device_batch_size=device_batch_size, bounds=Bounds(low, high)
        )

    if inside:
        assert plan().batch_size in inside
    else:
        with pytest.raises(ValueError, match=r"^`min_batch_size` and `max_batch_size` must leave"):
            plan()


@given(
    wanted=st.floats(0.1, 1e3),
    devices=st.integers(1, 4),
    largest=st.integers(1, 16),
    # Narrow, so that many a number of micro-batches has no multiple inside.
    low=st.floats(1, 200, width=32),
    eighths=st.integers(0, 40),
)
def test_bounds_are_kept_or_refused_where_micro_batches_are_free(
    wanted: float, devices: int, largest: int, low: float, eighths: int
) -> None:
    high = low + eighths / 8
    inside = {
        Plan(rows, count, devices)
        for rows in range(1, largest + 1)
        for count in range(1, math.floor(high) + 1)
        if low <= rows * count * devices <= high
    }

    def plan() -> Plan:
        return plan_for(
            wanted, devices=devices, max_device_batch_size=largest, bounds=Bounds(low, high)
        )

    if inside:
        assert plan() in inside
    else:
        with pytest.raises(ValueError, match=r"^`min_batch_size` and `max_batch_size` must leave"):
            plan()


def test_impossible_bounds_are_told_with_the_units_they_were_tried_in() -> None:
    message = (
        "`min_batch_size` and `max_batch_size` must leave room for a plan, got 65 to 95 for 2"
        " devices and at least 1 micro-batch of 16 examples each. Widen them, or change the batch"
        " size of the loader."
    )

    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        plan_for(80, devices=2, device_batch_size=16, bounds=Bounds(65, 95))


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ((0.0, 1), "`device_batch_size` must be positive and finite, got 0.0."),
        ((math.nan, 1), "`device_batch_size` must be positive and finite, got nan."),
        ((8, 0), "`accumulation` must be a positive whole number, got 0."),
        ((8, 1.5), "`accumulation` must be a positive whole number, got 1.5."),
        ((8, 1, 0), "`devices` must be a positive whole number, got 0."),
    ],
)
def test_what_no_step_can_have_is_refused(numbers: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        Plan(*numbers)
