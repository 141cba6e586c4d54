# SPDX-License-Identifier: Apache-2.0
import math

import numpy as np
import pytest

from noisescale import Tradeoff
from noisescale.bounded import Bounded
from noisescale.history.run_law import RunLaw
from noisescale.history.segments import Array, Segments

ONE = Bounded(1.0, 1.0, 1.0)


def segments(
    steps: Array, batch_size: Array, value: Array, low: Array, high: Array, block: Array
) -> Segments:
    """Segments whose noise scale is known within bounds."""
    one = np.ones(steps.size)
    return Segments(
        steps=steps,
        batch_size=batch_size,
        noise_scale=value,
        low=low,
        high=high,
        resolved=1.0 * np.isfinite(high),
        block=block.astype(np.intp),
        progress=batch_size / (batch_size + value),
        progress_low=batch_size / (batch_size + high),
        progress_high=batch_size / (batch_size + low),
        progress_error=0 * one,
        measured=one,
        weight=one,
    )


def run(
    value: list[float], low: list[float], high: list[float], *, independent: bool = False
) -> Segments:
    count = len(value)
    steps = np.arange(1.0, count + 1) * 100
    block = np.arange(1.0 * count) if independent else np.zeros(count)
    bands = (np.array(x) for x in (value, low, high))
    return segments(steps, np.full(count, 64.0), *bands, block)


def test_the_middle_is_the_tradeoff_of_the_run_at_the_calibrated_noise_scale() -> None:
    kappa, one = 3.0, run([10, 40, 90], [8, 30, 70], [14, 60, 130])

    law = RunLaw.of(one, Bounded(kappa, 0.7 * kappa, 1.3 * kappa))

    expected = Tradeoff.from_run(kappa * one.noise_scale, one.batch_size, one.steps)
    assert law.gamma == pytest.approx(expected.gamma, rel=1e-12)
    assert law.middle.min_steps == pytest.approx(expected.min_steps, rel=1e-12)
    assert law.critical_batch_size.value == pytest.approx(expected.critical_batch_size)


def test_every_noise_scale_within_the_interval_gives_steps_within_the_bounds() -> None:
    low, high = np.array([8.0, 30, 70]), np.array([14.0, 60, 130])
    bounds = RunLaw.of(run([10, 40, 90], low.tolist(), high.tolist()), ONE)
    steps, critical = {b: bounds.steps(b) for b in (4, 64, 2000)}, bounds.critical_batch_size

    for b in np.random.default_rng(0).uniform(low, high, (200, 3)):
        truth = Tradeoff.from_run(b, [64] * 3, [100, 200, 300])
        slack = 1 + 1e-12  # all noise scales meet in one point at the run's own batch size
        for size, within in steps.items():
            assert within.low / slack <= truth.steps(size) <= within.high * slack
        assert critical.low <= truth.critical_batch_size <= critical.high


def test_segments_without_an_upper_end_are_bounded_by_perfect_scaling() -> None:
    """100 steps at b = 20 and 200 at b >= 30: at best the latter scale perfectly."""
    law = RunLaw.of(run([20, 35], [20, 30], [20, math.inf], independent=True), ONE)

    perfect = 200 * 64 / 640
    others = 100 * (1 + 20 / 640) / (1 + 20 / 64)
    assert law.steps(640).low == pytest.approx(others + perfect)
    assert law.critical_batch_size.high == pytest.approx(
        (100 * 20 / (1 + 20 / 64) + 200 * 64) / (100 / (1 + 20 / 64))
    )


def test_what_is_resolved_nowhere_stays_so() -> None:
    nan = math.nan
    law = RunLaw.of(run([nan, nan], [20, 30], [math.inf, math.inf]), ONE)

    critical = law.critical_batch_size
    assert math.isnan(law.gamma)
    assert math.isnan(critical.value)
    assert 20 < critical.low < 30
    assert critical.high == math.inf
    assert law.steps(640).low == pytest.approx(300 * 64 / 640)
    assert math.isnan(law.steps(640).value)
    more = 100 * (1 + 20 / 16) / (1 + 20 / 64) + 200 * (1 + 30 / 16) / (1 + 30 / 64)
    assert (law.steps(16).low, law.steps(16).high) == pytest.approx((more, 300 * 64 / 16))
    own = law.steps(64)  # what the run took, whatever its noise scale
    assert (own.value, own.low, own.high) == pytest.approx((300, 300, 300))
    assert law.best_known == law.low
    without_noise = RunLaw.of(run([0.0, 0.0], [0.0, 0.0], [5.0, 5.0]), ONE)
    assert math.isnan(without_noise.gamma)
    assert without_noise.critical_batch_size.value == 0
    assert without_noise.steps(640).value == pytest.approx(300)


def test_a_calibration_widens_the_bounds() -> None:
    law = RunLaw.of(run([10, 40], [8, 30], [14, 60]), Bounded(3.0, 2.0, 4.0))

    low, high = ([16, 60], [16, 60], [1e9, 1e9]), ([56, 240], [1, 1], [56, 240])
    assert law.low == pytest.approx(RunLaw.of(run(*low), ONE).low, rel=1e-12)
    assert law.high == pytest.approx(RunLaw.of(run(*high), ONE).high, rel=1e-12)


def test_the_error_of_a_calibration_is_common_to_all_segments() -> None:
    """Twelve exact segments of b = 50: B_crit is kappa·b, whatever kappa is within its bounds."""
    law = RunLaw.of(run([50.0] * 12, [50.0] * 12, [50.0] * 12, independent=True), Bounded(2, 1, 4))

    critical, steps = law.critical_batch_size, law.steps(640)
    assert (critical.value, critical.low, critical.high) == pytest.approx((100, 50, 200))
    ends = [7800 * (1 + kappa * 50 / 640) / (1 + kappa * 50 / 64) for kappa in (2, 4, 1)]
    assert (steps.value, steps.low, steps.high) == pytest.approx(ends)


def test_a_calibration_without_bounds_leaves_none() -> None:
    """As of a sweep of two batch sizes: the run's own steps are certain, nothing else is."""
    one = run([50.0] * 3, [40.0] * 3, [60.0] * 3, independent=True)

    law = RunLaw.of(one, Bounded(2, 0, math.inf))

    critical = law.critical_batch_size
    assert (critical.value, critical.low, critical.high) == (pytest.approx(100), 0, math.inf)
    own, tenfold = law.steps(64), law.steps(640)
    assert (own.low, own.high) == pytest.approx((600, 600))
    assert tenfold.low <= 60 < 600 <= tenfold.high


def test_errors_of_the_calibration_and_of_the_noise_scale_add_as_independent_ones_do() -> None:
    """By drawing kappa and two segments' noise scales, all log-normal, 20,000 times."""
    rng = np.random.default_rng(0)
    spread, middle, quantile = 0.15, np.array([40.0, 90.0]), 1.96
    kappas = 2 * np.exp(spread * rng.standard_normal((20_000, 1)))
    drawn = kappas * middle * np.exp(spread * rng.standard_normal((20_000, 2)))
    steps = (np.array([100.0, 200.0]) * (1 + drawn / 640) / (1 + drawn / 64)).sum(axis=1)
    factor = math.exp(quantile * spread)
    ends = (middle / factor).tolist(), (middle * factor).tolist()

    one = run(middle.tolist(), *ends, independent=True)
    band = RunLaw.of(one, Bounded(2, 2 / factor, 2 * factor)).steps(640)

    assert [band.low, band.high] == pytest.approx(np.quantile(steps, [0.025, 0.975]), rel=0.03)
    assert 0.94 < np.mean((band.low <= steps) & (steps <= band.high)) < 0.96


def test_errors_of_independent_segments_partly_cancel() -> None:
    """Two alike segments: half-widths of their sum are √2, not 2, times those of one."""

    def alike(count: int) -> Bounded:
        columns = (np.full(count, x) for x in (100.0, 64.0, 40.0, 30.0, 60.0))
        return RunLaw.of(segments(*columns, np.arange(1.0 * count)), ONE).steps(640)

    two, single = alike(2), alike(1)

    assert two.value == pytest.approx(2 * single.value)
    assert two.value - two.low == pytest.approx(math.sqrt(2) * (single.value - single.low))
    assert two.high - two.value == pytest.approx(math.sqrt(2) * (single.high - single.value))


@pytest.mark.parametrize("seed", range(8))
def test_values_lie_within_their_bounds_where_the_batch_size_changes(seed: int) -> None:
    """Of segments of unlike batches some gain and some lose steps at a batch size between."""
    rng = np.random.default_rng(seed)
    count = int(rng.integers(2, 9))
    size = rng.choice([32.0, 512.0, 4096.0], count)
    value = rng.uniform(5, 900, count)
    spread = rng.uniform(1.05, 3, count)
    steps = rng.uniform(10, 500, count)
    bands = (value, value / spread, value * spread)
    law = RunLaw.of(segments(steps, size, *bands, np.arange(1.0 * count)), ONE)

    for batch_size in (16, 64, 200, 1024, 9999):
        truth = (steps * (1 + value / batch_size) / (1 + value / size)).sum()
        band = law.steps(batch_size)
        assert band.value == pytest.approx(truth)
        assert band.low <= truth * (1 + 1e-9)
        assert truth <= band.high * (1 + 1e-9)
    critical = law.critical_batch_size
    assert critical.low <= critical.value <= critical.high
