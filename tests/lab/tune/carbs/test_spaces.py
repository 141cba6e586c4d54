# SPDX-License-Identifier: Apache-2.0
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from optuna.distributions import BaseDistribution, FloatDistribution

from noisescale.lab.tune.carbs.dimensions import dimensions_of
from noisescale.lab.tune.carbs.spaces import (
    LinearSpace,
    LogitSpace,
    LogSpace,
    MomentumSpace,
    PowerOfTwoSpace,
    Space,
    require_spaces,
)

SCALES = st.floats(0.1, 100.0)


@given(st.floats(-1e6, 1e6), SCALES)
def test_linear_values_come_back(value: float, scale: float) -> None:
    space = LinearSpace(scale=scale)

    assert space.to_basic(value) == pytest.approx(value / scale)
    assert space.from_basic(space.to_basic(value)) == pytest.approx(value)


@given(st.floats(1e-12, 1e12), SCALES)
def test_log_values_come_back(value: float, scale: float) -> None:
    space = LogSpace(scale=scale)

    assert space.to_basic(value) == pytest.approx(math.log10(value) / scale)
    assert space.from_basic(space.to_basic(value)) == pytest.approx(value, rel=1e-9)


@given(st.floats(1e-9, 1 - 1e-9), SCALES)
def test_logit_values_come_back(value: float, scale: float) -> None:
    space = LogitSpace(scale=scale)

    assert space.to_basic(value) == pytest.approx(math.log10(value / (1 - value)) / scale)
    assert space.from_basic(space.to_basic(value)) == pytest.approx(value)


@given(st.floats(0.0, 1 - 1e-6), SCALES)
def test_momenta_come_back(value: float, scale: float) -> None:
    space = MomentumSpace(scale=scale)

    assert space.to_basic(value) == pytest.approx(-math.log10(1 - value) / scale)
    assert space.from_basic(space.to_basic(value)) == pytest.approx(value)


@given(st.integers(0, 40), SCALES)
def test_powers_of_two_come_back(power: int, scale: float) -> None:
    space = PowerOfTwoSpace(scale=scale)

    assert space.from_basic(space.to_basic(2**power)) == 2**power


@given(st.integers(1, 10_000), st.integers(1, 64), st.sampled_from([LinearSpace, LogSpace]))
def test_whole_values_come_back(count: int, factor: int, kind: type[Space]) -> None:
    space = kind(scale=2.0, is_integer=True, rounding_factor=factor)

    assert space.from_basic(space.to_basic(count * factor)) == count * factor


@given(st.floats(-400.0, 400.0), st.floats(1.0, 30.0), st.floats(0.0, 1000.0))
def test_every_coordinate_is_a_value_that_the_trial_may_ask_for(
    basic: float, low: float, more: float
) -> None:
    spaces = {
        "multiples": LinearSpace(is_integer=True, rounding_factor=8),
        "logs": LogSpace(),
        "odds": LogitSpace(),
        "steps": MomentumSpace(),
        "powers": PowerOfTwoSpace(),
    }
    distributions: dict[str, BaseDistribution] = {
        "multiples": FloatDistribution(low, low + 9 + more),
        "logs": FloatDistribution(low, low + more),
        "odds": FloatDistribution(0.1, 0.9),
        "steps": FloatDistribution(0.0, 0.9),
        "powers": FloatDistribution(low, 2 * low + more),
    }

    for dimension in dimensions_of(distributions, spaces):
        value = dimension.from_basic(np.array([basic]))
        assert dimension.distribution._contains(value), (dimension, value)


def test_powers_are_rounded_in_logs() -> None:
    values = PowerOfTwoSpace().from_basic(np.log10([90, 91]))

    assert values.tolist() == [64.0, 128.0]  # 64·√2 = 90.5


def test_whole_numbers_and_multiples_are_rounded() -> None:
    assert LogSpace(is_integer=True).from_basic(np.log10(12.4)) == 12
    assert LinearSpace(is_integer=True, rounding_factor=8).from_basic(13) == 16
    # The ends are multiples, too.
    assert LinearSpace(is_integer=True, rounding_factor=8).ends(3, 20) == (8, 16)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (
            lambda: LinearSpace(scale=0),
            "`scale` must be positive and finite, got 0. Pass the size of a large step.",
        ),
        (
            lambda: LinearSpace(rounding_factor=8),
            "`rounding_factor` must be 1 where values are not whole numbers, got 8."
            " Pass `is_integer=True`.",
        ),
        (
            lambda: PowerOfTwoSpace(is_integer=True),
            "`is_integer` must be left out for a PowerOfTwoSpace, got True. Take a LinearSpace or"
            " a LogSpace for whole numbers.",
        ),
    ],
)
def test_arguments_that_a_space_does_not_have_are_refused(make: Any, said: str) -> None:
    with pytest.raises(ValueError, match=r"must") as refusal:
        make()

    assert str(refusal.value) == said


def test_what_is_no_space_is_refused() -> None:
    with pytest.raises(TypeError) as refusal:
        require_spaces({"lr": "log"})

    assert str(refusal.value) == (
        "`spaces` must have a space of noisescale.lab.tune.carbs.spaces for 'lr', got 'log'."
        " Pass, for example, `LogSpace()`."
    )
