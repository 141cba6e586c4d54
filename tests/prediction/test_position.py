# SPDX-License-Identifier: Apache-2.0
"""Where a batch size stands against the critical one, by the law and by draws written out."""

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

NAN, INF = math.nan, math.inf


def position(batch_size: float, *critical: float, **more: object) -> Position:
    return Position(batch_size, Bounded(*critical), **more)  # type: ignore[arg-type]  # as named


@pytest.mark.parametrize(("batch_size", "other"), [(20, 64), (300, 5), (300, 4096), (2048, 64)])
def test_ratios_are_those_of_the_law_at_each_end(batch_size: float, other: float) -> None:
    """S(B) = S_min·(1 + c/B) with any S_min; without an upper bound scaling may be perfect."""
    found = position(batch_size, 340.0, 190.0, 700.0)
    steps = found.steps(other)

    middle, *ends = ((1 + c / other) / (1 + c / batch_size) for c in (340.0, 190.0, 700.0))
    assert (steps.value, steps.low, steps.high) == pytest.approx((middle, min(ends), max(ends)))
    assert found.examples(other).value == pytest.approx(middle * other / batch_size)
    perfect = position(64, NAN, 102, INF).steps(128.0)
    assert math.isnan(perfect.value)
    assert (perfect.low, perfect.high) == (0.5, pytest.approx((1 + 102 / 128) / (1 + 102 / 64)))


def test_ratios_of_a_run_that_changed_its_batch_size_are_to_all_its_steps() -> None:
    """300 steps at 20 and 100 at 160 make the progress of so many noise-free ones at c = 400."""
    found = position(160, 400.0, 300.0, 500.0, course=((20.0, 300.0), (160.0, 100.0)))

    progress = 300 / (1 + 400 / 20) + 100 / (1 + 400 / 160)
    steps = progress * (1 + 400 / 320)
    assert found.steps(320).value == pytest.approx(steps / 400)
    examples = steps * 320 / (300 * 20 + 100 * 160)
    assert found.examples(320).value == pytest.approx(examples)
    mean = (300 * 20 + 100 * 160) / 400
    boundless = replace(found, critical=Bounded(NAN, 300.0, INF))
    assert boundless.steps(320).low == pytest.approx(mean / 320)


@pytest.mark.parametrize(
    "critical", [(229, 94, 778), (60, 12, 300), (340, 190, 590), (100, 100, 400), (100, 100, 100)]
)
@pytest.mark.parametrize("batch_size", [10.0, 80.0, 300.0, 2048.0])
def test_the_chance_is_that_of_two_halves_of_log_normals(
    critical: tuple[float, float, float], batch_size: float
) -> None:
    value, low, high = critical
    z = np.random.default_rng(0).standard_normal(200_000)
    draws = value * np.exp(
        z * np.where(z < 0, math.log(value / low), math.log(high / value)) / 1.96
    )

    found = position(batch_size, *critical)

    assert found.chance_above(batch_size) == pytest.approx((draws > batch_size).mean(), abs=0.004)


@pytest.mark.parametrize(
    ("batch_size", "critical", "verdict"),
    [
        (20, (229, 94, 778), "larger"),
        (300, (340, 190, 590), "keep"),
        (2048, (340, 190, 700), "smaller"),
        (20, (115, 20, 1000), "larger"),
        (20, (100, 20, 1000), "keep_or_larger"),  # 0.73 above 60
        (64, (180, 30, 3000), "keep_or_larger"),  # 0.48 above 192, 0.99 above 21
        (64, (21, 3, 120), "keep_or_smaller"),
        (64, (64, 0.01, 4e5), "unknown"),
        (20, (229, 94, INF), "larger"),  # 0.998 above 60
        (20, (70, 5, INF), "keep_or_larger"),  # 0.55 above 60, 0.96 above 7
        (20, (NAN, 61, INF), "larger"),  # no value: the lower end alone
        (20, (INF, 59, INF), "keep_or_larger"),
        (64, (NAN, 21, INF), "unknown"),
        (64, (0, 0, 20), "smaller"),
        (64, (0, 0, 80), "keep_or_smaller"),
        (64, (NAN, 30, 150), "keep"),
        (64, (NAN, 10, 150), "keep_or_smaller"),
        (64, (NAN, 1, 20), "smaller"),
        (64, (NAN, NAN, NAN), "unknown"),
    ],
)
def test_a_verdict_is_as_sure_as_the_bounds(
    batch_size: float, critical: tuple[float, float, float], verdict: str
) -> None:
    assert position(batch_size, *critical).verdict == verdict


def test_a_young_run_says_of_no_smaller_batch_that_it_is_cheaper() -> None:
    assert position(2048, 340, 190, 700, young=True).verdict == "keep_or_smaller"
    assert position(20, 229, 94, 778, young=True).verdict == "larger"


@pytest.mark.parametrize(
    ("batch_size", "critical", "suggested"),
    [
        (20, (229, 94, 778), 80),  # (80 + 229)/(20 + 229) = 1.24, and 1.56 at 160
        (20, (5000, 3000, 9000), 160),  # at most eight times
        (300, (340, 190, 590), 300),
        (2048, (340, 190, 700), 1024),  # (1 + 340/1024)/(1 + 340/2048) = 1.14, and 1.43 at 512
        (2048, (3, 2, 5), 256),
        (20, (NAN, 102, INF), 40),
        (64, (NAN, 1, 20), 32),
    ],
)
def test_the_suggested_size_costs_at_most_a_quarter_more(
    batch_size: float, critical: tuple[float, float, float], suggested: float
) -> None:
    assert position(batch_size, *critical).suggested_size == suggested


def test_likely_is_narrower_by_what_errors_were_found() -> None:
    """Four of five of a normal distribution lie within 1.2816 standard deviations."""
    nominal = position(20, 100.0, 25.0, 1600.0).likely
    found = position(20, 100.0, 25.0, 1600.0, scatter=0.5).likely

    share = 1.2815516 / 1.9599640
    ends = (100 * 0.25**share, 100 * 16**share)
    assert (nominal.low, nominal.high) == pytest.approx(ends)
    assert found.low == pytest.approx(100 * (ends[0] / 100) ** 0.5)
    assert found.high == pytest.approx(100 * (ends[1] / 100) ** 0.5)
    assert position(20, NAN, 25.0, INF).likely.low == 25


@pytest.mark.parametrize("last_rate", [1.0, 0.0])
def test_the_end_stands_in_where_the_whole_is_not_resolved_unless_the_rate_fell(
    last_rate: float,
) -> None:
    """Where the rate fell the noise scale is largest at the end."""
    columns = history(unresolved=40, learning_rate=np.linspace(1.0, last_rate, 40))
    p = predict(History.from_columns(columns, optimizer=OptimizerMix(OptimizerKind.SGD)))
    high = np.append(np.full(39, math.inf), 130.0)

    end = History.from_columns(columns | {"high": high}, optimizer=p.history.optimizer)
    decided = replace(p, history=end)
    found = decided.position

    assert not p.resolved
    assert found.at_end == (last_rate == 1)
    if found.at_end:
        # The interval, widened by the theory's error for SGD: 0.2 to 3.3.
        assert found.critical == Bounded(100.0, pytest.approx(0.2 * 80), pytest.approx(3.3 * 130))
        end = "100 examples (with the theory's error 16.0 to 429), at the end of all 2,000 steps"
        assert end in decided.model_card
        assert "; at its end, which decides, 100 examples" in decided.to_text(1000)
    else:
        assert math.isnan(found.critical.value)


def test_what_was_measured_at_a_checkpoint_comes_before_the_end_of_the_run() -> None:
    run = History.from_columns(history(unresolved=40), optimizer=OptimizerMix(OptimizerKind.SGD))
    run.looks = (Look(20.0, 50.0, 40.0, 60.0, 0.95, "examples", 30, "a.ckpt", 7, 1.0),)

    p = predict(run)

    assert p.look == run.looks[0]
    assert p.position.critical == Bounded(50.0, pytest.approx(0.2 * 40), pytest.approx(3.3 * 60))
    assert "Noise scale measured at step 20" in p.to_text(details=True)


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
