# SPDX-License-Identifier: Apache-2.0
"""Plans are within the bounds, and the nearest to what was wanted."""

import math
from typing import Any, NamedTuple

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from refused import refused

from noisescale.plan import Bounds, Plan, mean_plan, plan_for


@given(
    wanted=st.floats(0.1, 1e4),
    devices=st.integers(1, 9),
    device_batch_size=st.integers(1, 64),
    # Not within the 1e-14 of a plan that count as rounding.
    bounds=st.just([0.0, math.inf]) | st.tuples(*[st.floats(1, 2000, width=32)] * 2).map(sorted),
)
def test_counted_micro_batches_are_the_nearest_by_ratio_within_the_bounds_or_refused(
    wanted: float, devices: int, device_batch_size: int, bounds: list[float]
) -> None:
    low, high = bounds
    unit = devices * device_batch_size
    inside = [unit * n for n in range(1, 10_002) if low <= unit * n <= high]

    def plan() -> Plan:
        return plan_for(
            wanted, devices=devices, device_batch_size=device_batch_size, bounds=Bounds(low, high)
        )

    if inside:
        aim = min(max(wanted, low), high)
        nearest = min(abs(math.log(size / aim)) for size in inside)
        assert plan().batch_size in inside
        assert abs(math.log(plan().batch_size / aim)) == pytest.approx(nearest, abs=1e-9)
        assert plan() == Plan(device_batch_size, round(plan().batch_size / unit), devices)
    else:
        with refused("min_batch_size", "max_batch_size", requirement="leave room"):
            plan()


class Case(NamedTuple):
    """What a plan with free micro-batches is asked for, and by brute force what there is."""

    wanted: float
    devices: int
    largest: int
    examples_per_row: float
    bounds: Bounds

    def plan(self, wanted: float | None = None) -> Plan:
        return plan_for(
            wanted or self.wanted,
            devices=self.devices,
            max_device_batch_size=self.largest,
            examples_per_row=self.examples_per_row,
            bounds=self.bounds,
        )

    @property
    def unit(self) -> float:
        return self.devices * self.examples_per_row

    @property
    def aim(self) -> float:
        return min(max(self.wanted, self.bounds.min_batch_size), self.bounds.max_batch_size)

    def possible(self) -> list[tuple[int, int]]:
        """Rows of a device and micro-batches of all plans within the bounds, up to twice the aim.

        A sum of rows that one plan has, many have: they are compared as they are counted here.
        """
        least = self.bounds.min_accumulation
        top = min(self.bounds.max_batch_size, 2 * max(self.aim, least * self.unit)) / self.unit
        return [
            (rows * count, count)
            for rows in range(1, self.largest + 1)
            for count in range(least, math.floor((top + 1) / rows) + 1)
            if self.bounds.min_batch_size <= rows * count * self.unit
            and rows * count * self.unit <= self.bounds.max_batch_size
        ]

    def off(self, rows: int) -> float:
        return abs(math.log(rows * self.unit / self.aim))

    def is_full(self, rows: int, count: int) -> bool:
        """Whether no fewer micro-batches could hold these rows."""
        fewer = count - 1
        return fewer < self.bounds.min_accumulation or fewer * self.largest < rows


cases = st.builds(
    lambda low, width, least, **case: Case(bounds=Bounds(low, low + width, least), **case),
    wanted=st.floats(0.1, 600),
    devices=st.integers(1, 9),
    largest=st.integers(1, 40),
    # In binary fractions that no product rounds.
    examples_per_row=st.sampled_from([1.0, 0.5, 13.75, 100.125]),
    low=st.one_of(st.just(0.0), st.floats(1, 400, width=32)),
    # From so narrow that one plan or none is left to none at all.
    width=st.one_of(st.integers(1, 400).map(lambda n: n / 8), st.just(math.inf)),
    least=st.integers(1, 4),
)


@settings(max_examples=300)
@given(cases)
def test_free_micro_batches_are_full_within_ten_percent_and_the_nearest_at_a_bound(
    case: Case,
) -> None:
    possible = case.possible()
    if not possible:
        with refused("min_batch_size", "max_batch_size", requirement="leave room"):
            case.plan()
        return

    plan = case.plan()

    rows, count = round(plan.batch_size / case.unit), plan.accumulation
    assert (rows, count) in possible
    assert plan.device_batch_size == rows / count * case.examples_per_row
    nearest = min({rows for rows, _ in possible}, key=case.off)
    low = case.bounds.min_batch_size > 0 and (nearest - 1) * case.unit < case.bounds.min_batch_size
    high = (nearest + 1) * case.unit > case.bounds.max_batch_size
    most = 1.0 if low or high else 1.1
    full = {
        rows
        for rows, count in possible
        if case.is_full(rows, count) and 1 / most <= rows / nearest <= most
    }
    if full:
        assert case.is_full(rows, count)
        assert case.off(rows) == pytest.approx(min(map(case.off, full)), abs=1e-9)
    else:
        assert case.off(rows) == pytest.approx(case.off(nearest), abs=1e-9)
        assert count == min(those for sum_of_rows, those in possible if sum_of_rows == rows)


@given(cases)
def test_the_batch_size_of_a_plan_gives_the_same_plan(case: Case) -> None:
    assume(case.possible())

    assert case.plan(case.plan().batch_size) == case.plan()


@pytest.mark.parametrize(
    ("wanted", "devices", "largest", "bounds", "expected"),
    [
        # Huge ones without counting up to them.
        (1e15, 1, 7, Bounds(), Plan(7, 10**15 // 7 + 1, 1)),
        (1e300, 1, 7, Bounds(0, 1e12), Plan(5, 10**12 // 5, 1)),
        # A prime, which bounds leave no way around, and one more than it, which they exclude.
        (1e9, 1, 7, Bounds(1e9 + 7, 1e9 + 7), Plan(1, 10**9 + 7, 1)),
        (1.0, 1, 7, Bounds(1e12, math.inf), Plan(5, 10**12 // 5, 1)),
        (100, 2, 32, Bounds(), Plan(25, 2, 2)),
        (1000, 13, 2, Bounds(0, 100), Plan(1, 7, 13)),
        (1e6, 1, 1, Bounds(0, 3975.99), Plan(1, 3975, 1)),
        (1e6, 1, 32, Bounds(0, 100), Plan(25, 4, 1)),
        (1e6, 1, 32, Bounds(0, 101), Plan(1, 101, 1)),
        (1, 1, 32, Bounds(101), Plan(1, 101, 1)),
        (98, 1, 32, Bounds(0, 101), Plan(25, 4, 1)),
        (1, 1, 32, Bounds(101, 101), Plan(1, 101, 1)),
        (61, 1, 16, Bounds(), Plan(15, 4, 1)),
        (3, 1, 64, Bounds(min_accumulation=4), Plan(1, 4, 1)),
    ],
)
def test_plans_by_hand(
    wanted: float, devices: int, largest: int, bounds: Bounds, expected: Plan
) -> None:
    plan = plan_for(wanted, devices=devices, max_device_batch_size=largest, bounds=bounds)

    assert plan == expected


@pytest.mark.parametrize("wanted", [0.0, math.nan, math.inf])
def test_a_batch_that_no_step_can_have_is_refused(wanted: float) -> None:
    with refused("wanted", got=repr(wanted)):
        plan_for(wanted, devices=1, max_device_batch_size=8)


@given(rows=st.integers(1, 500), devices=st.integers(1, 9), largest=st.integers(1, 64))
def test_a_mean_plan_of_whole_micro_batches_is_the_one_that_steps_are_given(
    rows: int, devices: int, largest: int
) -> None:
    plan = mean_plan(rows * devices, devices=devices, max_device_batch_size=largest)

    assert plan.batch_size == pytest.approx(rows * devices)
    assert plan.device_batch_size <= largest
    assert (plan.accumulation - 1) * largest < rows  # no fewer hold them
    if rows % plan.accumulation == 0:
        assert plan == plan_for(rows * devices, devices=devices, max_device_batch_size=largest)


def test_a_largest_micro_batch_that_is_a_mean_gives_its_own_plan_again() -> None:
    mean = 4053.7 / 3

    assert mean_plan(mean * 7 * 8, devices=8, max_device_batch_size=mean).accumulation == 7


@pytest.mark.parametrize("options", [{"device_batch_size": 8}, {"max_device_batch_size": 64}])
def test_nodes_stay_what_they_are(options: dict[str, Any]) -> None:
    plan = plan_for(512, devices=16, nodes=2, **options)

    assert plan.nodes == 2
    assert str(plan).endswith(" x 16 devices on 2 nodes")


def test_impossible_bounds_are_told_with_the_units_they_were_tried_in() -> None:
    tried = "65 to 95 for 2 devices and at least 1 micro-batch of 16 examples each"

    with refused(
        "min_batch_size", "max_batch_size", got=tried, remedy="the batch size of the loader"
    ):
        plan_for(80, devices=2, device_batch_size=16, bounds=Bounds(65, 95))


@pytest.mark.parametrize(
    ("numbers", "argument", "got"),
    [
        ((0.0, 1), "device_batch_size", "0.0"),
        ((math.nan, 1), "device_batch_size", "nan"),
        ((8, 0), "accumulation", "0"),
        ((8, 1, 0), "devices", "0"),
        ((8, 1, 1, 1.5), "nodes", "1.5"),
        ((8, 1, 2, 3), "nodes", "3 > 2"),
    ],
)
def test_what_no_step_can_have_is_refused(numbers: Any, argument: str, got: str) -> None:
    with refused(argument, got=got):
        Plan(*numbers)
