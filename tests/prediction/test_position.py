# SPDX-License-Identifier: Apache-2.0
"""Where a batch size stands against the critical one, by the law written out."""

import math
from dataclasses import replace

import numpy as np
import pytest
from reported_runs import history

from noisescale import History, predict
from noisescale.bounded import UNKNOWN, Bounded
from noisescale.history.looks import Look
from noisescale.history.optimizers import OptimizerKind, OptimizerMix
from noisescale.prediction.position import Position


def position(batch_size: float, *critical: float) -> Position:
    return Position(batch_size, Bounded(*critical), at_end=False, rough=False)


@pytest.mark.parametrize(("batch_size", "other"), [(20, 64), (300, 5), (300, 4096), (2048, 64)])
def test_ratios_are_those_of_the_law_at_each_end(batch_size: float, other: float) -> None:
    """S(B) = S_min·(1 + c/B) with any S_min; without an upper bound scaling may be perfect."""
    found = position(batch_size, 340.0, 190.0, 700.0)
    steps = found.steps(other)

    middle, *ends = ((1 + c / other) / (1 + c / batch_size) for c in (340.0, 190.0, 700.0))
    assert (steps.value, steps.low, steps.high) == pytest.approx((middle, min(ends), max(ends)))
    assert found.examples(other).value == pytest.approx(middle * other / batch_size)
    perfect = position(64, math.nan, 102, math.inf).steps(128.0)
    assert math.isnan(perfect.value)
    assert (perfect.low, perfect.high) == (0.5, pytest.approx((1 + 102 / 128) / (1 + 102 / 64)))


def test_up_to_the_cheap_batch_size_the_examples_are_at_most_a_fifth_more() -> None:
    up_to = position(20, 229, 94, 778).cheap_up_to

    assert (up_to.value, up_to.low, up_to.high) == pytest.approx((69.8, 42.8, 179.6))
    for critical, size in [(229, up_to.value), (94, up_to.low), (778, up_to.high)]:
        assert (critical + size) / (critical + 20) == pytest.approx(1.2)


@pytest.mark.parametrize("last_rate", [1.0, 0.0])
def test_the_end_stands_in_where_the_whole_is_not_resolved_unless_the_rate_fell(
    last_rate: float,
) -> None:
    """Where the rate fell the noise scale is largest at the end."""
    columns = history(unresolved=40, learning_rate=np.linspace(1.0, last_rate, 40))
    p = predict(History.from_columns(columns, optimizer=OptimizerMix(OptimizerKind.SGD)))
    high = np.append(np.full(39, math.inf), 130.0)

    end = History.from_columns({**p.history, "high": high})

    found = replace(p, history=end).position

    assert not p.resolved
    assert found.at_end == (last_rate == 1)
    if found.at_end:
        # The interval, widened by the theory's error for SGD: 0.2 to 3.3.
        assert found.critical == Bounded(100.0, pytest.approx(0.2 * 80), pytest.approx(3.3 * 130))
    else:
        assert math.isnan(found.critical.value)


def test_what_was_measured_at_a_checkpoint_comes_before_the_end_of_the_run() -> None:
    run = History.from_columns(history(unresolved=40), optimizer=OptimizerMix(OptimizerKind.SGD))
    run.looks = (Look(20.0, 50.0, 40.0, 60.0, 0.95, "examples", 30, "a.ckpt", 7, 1.0),)

    p = predict(run)

    assert p.look == run.looks[0]
    assert p.position.critical == Bounded(50.0, pytest.approx(0.2 * 40), pytest.approx(3.3 * 60))
    assert "Noise scale measured at step 20" in p.to_text(details=True)


def test_bounds_a_hundred_times_apart_are_a_rough_range() -> None:
    untried, sgd = (
        History.from_columns(history(high=160), optimizer=OptimizerMix(kind))
        for kind in (OptimizerKind.OTHER, OptimizerKind.SGD)
    )

    assert predict(untried).position.rough
    assert not predict(sgd).position.rough
    assert not predict(untried, calibration=1.0).position.rough


def test_the_noise_scale_now_is_the_last_that_was_shown() -> None:
    columns = history()
    columns["noise_scale"][-1] = 130.0

    assert predict(columns).noise_scale_now == Bounded(130.0, 80.0, 125.0)
    open_ended = predict(history(unresolved=40)).noise_scale_now
    assert (open_ended.low, open_ended.high) == (80.0, math.inf)
    assert math.isnan(open_ended.value)
    unknown = dict.fromkeys(("noise_scale", "low", "high"), math.nan)
    p = predict(history())
    assert replace(p, history=history(**unknown)).noise_scale_now is UNKNOWN
