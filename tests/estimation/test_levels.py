# SPDX-License-Identifier: Apache-2.0
import math
from typing import Any

import numpy as np
import pytest

from noisescale.bounded import Bounded
from noisescale.estimation.levels import Levels, LevelSteps
from noisescale.estimation.moments import GradientMoments

PROMPTS, ROWS = 16, 4
BETWEEN, WITHIN = 6.0, 240.0


def measured(steps: int, seed: int = 0, window: Any = 10**6) -> LevelSteps:
    """Steps of known levels at a |G|² that falls, with errors of a fifth, at a rate of 0.1."""
    rng, levels = np.random.default_rng(seed), LevelSteps(window)
    for step in range(1, steps + 1):
        signal = 3.0 / step * (1 + 0.1 * rng.standard_normal())
        of_groups, of_rows = (
            3.0 / step * b * (1 + 0.2 * rng.standard_normal()) for b in (BETWEEN, WITHIN)
        )
        variance = of_groups / PROMPTS + of_rows / (PROMPTS * ROWS)
        whole = GradientMoments(signal, variance * PROMPTS * ROWS)
        shares = 1 / (PROMPTS * ROWS), 1 / PROMPTS, 0.25
        levels.update(whole, variance, of_rows, shares, PROMPTS * ROWS, step, 0.1)
    return levels


def test_each_level_is_a_ratio_with_its_interval() -> None:
    found = measured(200).estimate(200)

    assert found is not None
    assert found.between.low < BETWEEN < found.between.high < 1.2 * BETWEEN
    assert found.within.low < WITHIN < found.within.high < 1.2 * WITHIN
    assert found.balance.low < WITHIN / BETWEEN < found.balance.high
    assert (found.groups, found.rows_per_group) == pytest.approx((PROMPTS, ROWS))
    assert found.still == pytest.approx(0.25)
    assert found.noise_scale(ROWS) == pytest.approx(BETWEEN + WITHIN / ROWS, rel=0.05)


def test_the_state_goes_on_where_it_was() -> None:
    first, second = measured(30), LevelSteps(10**6)
    assert second.estimate(0) is None
    second.load_state_dict(first.state_dict())
    assert second.estimate(30) == first.estimate(30)


def test_where_the_rate_has_fallen_both_are_less_sure_and_their_balance_is_not() -> None:
    levels = measured(200, window="auto")
    before, after = levels.estimate(200, 0.1), levels.estimate(200, 0.01)
    assert before is not None
    assert after is not None
    for name in ("between", "within"):
        assert after.bounds[name].high > 1.5 * before.bounds[name].high
        assert after.bounds[name].low < before.bounds[name].low / 1.5
    assert after.balance == before.balance


def test_columns_are_read_back() -> None:
    found = measured(50).estimate(50)
    assert found is not None
    again = Levels.from_columns(found.columns())
    assert again is not None
    assert again.bounds == found.bounds
    assert Levels.from_columns({"groups": math.nan}) is None
    row = found.columns() | {"balance_high": math.nan}
    unbounded = Levels.from_columns(row)
    assert unbounded is not None
    assert unbounded.balance.high == math.inf
    assert unbounded.share_within.high == 1.0


def test_the_best_rows_of_a_group_by_costs() -> None:
    """The least of (c_p + c_g·n)·(between + within/n), tried one by one."""
    found = measured(200).estimate(200)
    assert found is not None
    b, w = found.between.value, found.within.value
    tried = np.linspace(1, 100, 10_000)
    best = tried[np.argmin((5 + tried) * (b + w / tried))]
    assert found.best_rows_per_group(5, 1).value == pytest.approx(best, rel=0.03)
    tried = np.linspace(1.01, 100, 10_000)
    of_others = w / found.rows_per_group * (found.rows_per_group - 1)
    best = tried[np.argmin((5 + tried) * (b + of_others / (tried - 1)))]
    assert found.best_rows_per_group(5, 1, centred=True).value == pytest.approx(best, rel=0.03)
    share = found.share_within
    assert share.value == pytest.approx(found.balance.value / (found.balance.value + ROWS))
    assert isinstance(share, Bounded)
