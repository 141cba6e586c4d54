# SPDX-License-Identifier: Apache-2.0
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from optuna.distributions import BaseDistribution, FloatDistribution
from refused import refused

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


@pytest.mark.parametrize(
    ("kind", "low", "high", "basic"),
    [
        (LinearSpace, -1e6, 1e6, lambda value: value),
        (LogSpace, 1e-12, 1e12, math.log10),
        (LogitSpace, 1e-9, 1 - 1e-9, lambda value: math.log10(value / (1 - value))),
        (MomentumSpace, 0.0, 1 - 1e-6, lambda value: -math.log10(1 - value)),
    ],
)
@given(st.data(), SCALES)
@settings(max_examples=30)
def test_values_come_back(
    kind: type[Space], low: float, high: float, basic: Any, data: st.DataObject, scale: float
) -> None:
    value, space = data.draw(st.floats(low, high)), kind(scale=scale)

    assert space.to_basic(value) == pytest.approx(basic(value) / scale)
    assert space.from_basic(space.to_basic(value)) == pytest.approx(value, rel=1e-9)


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


def test_whole_numbers_and_multiples_are_rounded() -> None:
    multiples = LinearSpace(is_integer=True, rounding_factor=8)

    assert LogSpace(is_integer=True).from_basic(np.log10(12.4)) == 12
    assert multiples.from_basic(13) == 16
    assert multiples.ends(3, 20) == (8, 16)  # multiples, too
    # Powers are rounded in logs: 64·√2 = 90.5.
    assert PowerOfTwoSpace().from_basic(np.log10([90, 91])).tolist() == [64.0, 128.0]


@pytest.mark.parametrize(
    ("make", "argument", "got"),
    [
        (lambda: LinearSpace(scale=0), "scale", "0"),
        (lambda: LinearSpace(rounding_factor=8), "rounding_factor", "8"),
        (lambda: PowerOfTwoSpace(is_integer=True), "is_integer", "True"),
    ],
)
def test_arguments_that_a_space_does_not_have_are_refused(
    make: Any, argument: str, got: str
) -> None:
    with refused(argument, got=got):
        make()


def test_what_is_no_space_is_refused() -> None:
    with refused("spaces", requirement="'lr'", got="'log'", error=TypeError):
        require_spaces({"lr": "log"})
