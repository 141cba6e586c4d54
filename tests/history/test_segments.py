# SPDX-License-Identifier: Apache-2.0
import math
from collections.abc import Collection
from itertools import product
from typing import Any

import numpy as np
import pytest
from refused import refused
from scipy.stats import t as students_t
from tiers import slow, slow_after

from noisescale import GradientMoments, History, Tradeoff
from noisescale.bounded import Bounded
from noisescale.history.increments import INCREMENTS, SQUARES, SUMS, Increments
from noisescale.history.rows import Rows
from noisescale.history.run_law import RunLaw
from noisescale.history.segments import Segments, noise_scale_at

ONE = Bounded(1.0, 1.0, 1.0)
Moments = tuple[np.ndarray, np.ndarray]


def columns(step: list[float], **others: list[float]) -> dict[str, np.ndarray]:
    rows = {"step": step, **others}
    rows.setdefault("examples", [32 * s for s in step])
    rows.setdefault("low", [0.8 * b for b in rows["noise_scale"]])
    rows.setdefault("high", [1.3 * b for b in rows["noise_scale"]])
    return {name: np.array(values, dtype=float) for name, values in rows.items()}


def steps_of(
    rng: np.random.Generator,
    noise_scale: np.ndarray,
    signal: np.ndarray | float = 1.0,
    *,
    batch_size: float = 32.0,
    ranks: int = 4,
    directions: int = 100,
) -> Moments:
    """|G|² and tr(Σ) as one step of each of `ranks` ranks estimates them.

    The noise has as much in each of some directions, |G|² is `signal`.
    """
    count = len(noise_scale)
    variance = noise_scale * signal / directions
    along = np.sqrt(signal) + rng.normal(size=count) * np.sqrt(variance / batch_size)
    across = rng.chisquare(directions - 1, count) * variance / batch_size
    spread = rng.chisquare((ranks - 1) * directions, count) * variance * ranks / batch_size
    big, small_over_big = along**2 + across, spread / ranks
    trace = small_over_big / (ranks / batch_size - 1 / batch_size)
    return big - trace / batch_size, trace


def rows_of(
    moments: Moments,
    every: int,
    *,
    batch_size: float = 32.0,
    measured: Collection[int] | None = None,
) -> dict[str, np.ndarray]:
    """A history with a row every so many steps that holds what was measured since the last.

    Of the steps `measured`, or all. As in a run, a row is of its last measured step.
    """
    increments, history, last, of_row = Increments(), History(), 0, 0
    for step, (q, s) in enumerate(zip(*moments, strict=True), start=1):
        if measured is None or step in measured:
            increments.add(GradientMoments(q, s), batch_size, step - last)
            last = step
        if (step % every == 0 or step == len(moments[0])) and last > of_row:
            sizes = {"examples": last * batch_size, "batch_size": batch_size}
            history.append(step=last, **sizes, **increments.take())
            of_row = last
    return dict(history)


def critical_batch_size_of(history: dict[str, np.ndarray], kappa: float = 1.0) -> Bounded:
    return RunLaw.of(Segments.of(history), Bounded(kappa, kappa, kappa)).critical_batch_size


def drawn(seed: int, noise_scale: Any, signal: Any = 1.0, **options: Any) -> Moments:
    return steps_of(np.random.default_rng(seed), np.asarray(noise_scale), signal, **options)


def assert_held(found: list[Bounded], truth: float) -> None:
    """As many 95 % intervals hold the truth as must, within three standard errors."""
    held = np.mean([one.low <= truth <= one.high for one in found])
    assert held >= 0.95 - 3 * math.sqrt(0.95 * 0.05 / len(found)), held


def median(found: list[Bounded]) -> float:
    return float(np.median([math.inf if math.isnan(x.value) else x.value for x in found]))


def critical_of(noise_scale: np.ndarray) -> float:
    """Of a run of one step at each noise scale, with batches of 32."""
    ones = np.ones(len(noise_scale))
    return Tradeoff.from_run(noise_scale, 32 * ones, ones).critical_batch_size


def rising(steps: int) -> Moments:
    """From 20 to 200 batches of 32 examples, while |G|² falls a hundredfold."""
    progress = np.arange(steps) / steps
    return 640 * 10**progress, 100**-progress


@pytest.mark.parametrize(
    ("every", "workload"), slow_after(1, [*product((10, 1), ("rising", "constant"))])
)
def test_the_bounds_hold_where_single_blocks_are_hard_to_resolve(every: int, workload: str) -> None:
    """Choosing blocks by which of them resolve held 84 and 81 %, at medians of 0.92 and 0.73."""
    constant = np.full(1000, 640.0), np.ones(1000)
    noise_scale, signal = constant if workload == "constant" else rising(1000)
    truth = critical_of(noise_scale)

    rows = (rows_of(drawn(seed, noise_scale, signal), every) for seed in range(60))
    found = [critical_batch_size_of(history) for history in rows]

    assert_held(found, truth)
    assert 0.85 < median(found) / truth < 1.15, median(found) / truth


def test_a_run_tells_the_same_whatever_its_rows_are() -> None:
    moments = drawn(0, *rising(400), batch_size=512)
    each, tenth, rare = (rows_of(moments, every, batch_size=512) for every in (1, 10, 50))

    first, *others = map(critical_batch_size_of, (each, tenth, rare))

    for other in others:
        bounds = (other.value, other.low, other.high)
        assert bounds == pytest.approx((first.value, first.low, first.high), rel=0.02)


@pytest.mark.parametrize("kappa", [0.125, slow(4.0)])
def test_the_bounds_hold_for_other_factors_between_noise_scale_and_critical_batch_size(
    kappa: float,
) -> None:
    """Progress is calibrated block by block, where some come out negative by chance."""
    noise_scale = 64 * 100 ** (np.arange(1000) / 1000)
    truth = critical_of(kappa * noise_scale)

    moments = (drawn(seed, noise_scale) for seed in range(60))
    found = [critical_batch_size_of(rows_of(each, 10), kappa) for each in moments]

    assert_held(found, truth)
    assert 0.95 < median(found) / truth < 1.05, median(found) / truth


def test_a_factor_that_leaves_nothing_resolved_leaves_bounds() -> None:
    """At kappa = 1/1000 all depends on whether late blocks made any progress. It read -110."""
    moments = drawn(0, 64 * 100 ** (np.arange(2000) / 2000))

    critical = critical_batch_size_of(rows_of(moments, 10), 1e-3)

    assert math.isnan(critical.value)
    assert 0 < critical.low < 1.3  # which is true
    assert critical.high == math.inf


@pytest.mark.parametrize("size", [30.0, slow(1e4)])
def test_the_bounds_hold_after_a_step_of_a_huge_gradient(size: float) -> None:
    """The level remembered it for tens of steps: 69 % of 60 steps' intervals held the truth."""
    signal = np.ones(60)
    signal[30] = size

    moments = (drawn(seed, np.full(60, 64.0), signal) for seed in range(100))

    assert_held([critical_batch_size_of(rows_of(each, 1)) for each in moments], 64)


def test_one_row_is_enough_and_one_with_steps_of_the_row_before_counts_its_own() -> None:
    """As after a resume with other log steps."""
    moments = drawn(0, np.full(200, 64.0))
    found, history = critical_batch_size_of(rows_of(moments, 200)), rows_of(moments, 50)
    steps = np.array([50.0, 100, 150, 160])

    run = Rows.of({**history, "step": steps})

    assert found.low < 64 < found.high < 1.3 * found.low
    assert run is not None
    assert run.units.tolist() == [49, 50, 50, 10]
    assert run.means[0] == pytest.approx(history["increment_noise_trace"] / (32 * np.array(
        [49, 50, 50, 50])))  # fmt: skip


def test_what_no_block_resolves_is_not_resolved() -> None:
    """The logged average, which lags, read "9.5 (8.2 to 15.3)" where 539 was true."""
    signal = 100.0 ** -np.linspace(0, 1, 60)
    columns = rows_of(drawn(1, np.full(60, 539.0), signal, batch_size=8), 10, batch_size=8)
    averages = {"noise_scale": 9.5, "low": 8.2, "high": 15.3}
    logged = {name: np.full(len(columns["step"]), value) for name, value in averages.items()}

    critical = critical_batch_size_of(columns | logged)

    assert math.isnan(critical.value)
    assert 15.3 < critical.low < 539
    assert critical.high == math.inf
    assert not Segments.of(columns | logged).as_logged


def test_the_noise_scale_of_each_time_is_found_where_windows_lag() -> None:
    """It rises from 20 to 2,000 in 1,000 steps, while |G|² falls a hundredfold."""
    truth = 20 * 100 ** (np.arange(1000) / 1000)

    run = Segments.of(rows_of(drawn(0, truth, 1 / truth, batch_size=512), 10, batch_size=512))

    local = truth.reshape(100, 10).mean(axis=1)
    assert np.abs(np.log(run.noise_scale / local)).mean() < 0.25
    mean_of_all = 1000 / (1 / truth).sum()
    assert np.abs(np.log(mean_of_all / local)).mean() > 1


def test_a_run_is_cut_into_as_few_blocks_as_its_noise_demands() -> None:
    """By the noise of single steps: never by which blocks come out resolved."""
    rng = np.random.default_rng(0)

    def blocks(moments: Moments, every: int = 10) -> int:
        return len(set(Segments.of(rows_of(moments, every)).block.tolist()))

    numbers = [blocks(steps_of(rng, np.full(2000, b))) for b in (64.0, 640.0, 6400.0)]

    # A block of n steps has the relative width 4·cv/√n, with cv² = 8/3·(b/B)²/100 or so.
    assert numbers[0] == 32
    assert numbers[1] == pytest.approx(2000 / (16 * 8 / 3 * 20**2 / 100), rel=0.3)
    assert numbers[2] == 2  # or the first steps could not be told from few late ones
    assert blocks(drawn(1, np.full(2000, 640.0)), 1) == pytest.approx(numbers[1], rel=0.3)
    assert blocks(drawn(0, np.full(103, 640.0)), 100) == 1  # the last row is short
    norms, traces = drawn(0, np.full(2000, 64.0))
    assert blocks((norms, -traces / 4)) == blocks((-norms, traces)) == 2  # no noise, or no signal


def test_the_bounds_hold_and_say_something_where_few_late_units_rule_the_run() -> None:
    """Student's t with the one degree of freedom that was left gave 0 to infinity.

    Of 1,500 steps 54 were measured: 26 in the first 99, the others 50 to 150 apart. |G|² and
    tr(Σ) of a step are larger or smaller together, by a log-normal factor: late in a training few
    examples have most of the gradient.
    """
    measured = set(np.exp(np.linspace(0, math.log(1500), 90)).astype(int).tolist())
    found = []
    for seed in range(100):
        rng = np.random.default_rng(seed)
        q, s = steps_of(rng, np.full(1500, 64.0), directions=30, ranks=2)
        factor = np.exp(rng.normal(0, 1.2, 1500))
        rows = rows_of((factor * q, factor * s), 50, measured=measured)
        found.append(critical_batch_size_of(rows))

    assert_held(found, 64)
    assert all(one.low > 0 for one in found)
    assert np.median([one.low for one in found]) > 16


def test_a_unit_that_rules_its_block_leaves_the_bounds_of_the_others() -> None:
    """99 steps that say b = 64, and one that says nothing about the 900 for which it stands."""
    q, s = drawn(0, np.full(1000, 64.0))
    q[990:], s[990:] = 1e4 * q[990:], 1e4 * s[990:]
    measured = {*range(1, 100), *range(101, 990, 100), 999}

    run = Segments.of(rows_of((q, s), 100, measured=measured))
    critical = RunLaw.of(run, ONE).critical_batch_size

    assert math.isnan(critical.value)
    # 99 of 1,000 steps make a third of the progress without noise, within a third or so.
    noise, most = 32 * 99 * (2 / 3), 900 + 99 / 3
    assert noise / most / 1.5 < critical.low < 64
    assert 64 < critical.high < 1.5 * (noise + 32 * 900) / (99 / 3)


def test_progress_is_the_share_of_the_signal_in_the_squared_norm() -> None:
    """Row by row: |G|² over |g|² of the block, with the bias of second order taken off."""
    rng = np.random.default_rng(0)
    q, s = rng.normal(0.5, 0.1, 40), rng.normal(16.0, 2.0, 40)
    history = rows_of((q, s), 8)

    run = Segments.of(history)

    level, relative = q[0] + s[0] / 32, []
    for x, y in zip(q[1:], s[1:], strict=True):
        relative.append((y / level, x / level))
        level = (7 * level + 2 * (x + y / 32)) / 9
    drawn = np.array(relative)
    assert set(run.block.tolist()) == set(range(run.block.max() + 1))
    start = 0
    for block in range(run.block.max() + 1):
        count = int(history["increment_measured_steps"][run.block == block].sum())
        of_block = drawn[start : start + count]
        start += count
        s_mean, q_mean = of_block.mean(axis=0)
        plain = 32 * q_mean / (32 * q_mean + s_mean)
        others = (np.delete(of_block, k, axis=0).mean(axis=0) for k in range(count))
        left_out = [32 * q / (32 * q + s) for s, q in others]
        jackknife = count * plain - (count - 1) * np.mean(left_out)
        error = math.sqrt((count - 1) / count * ((left_out - np.mean(left_out)) ** 2).sum())
        rows = run.block == block
        assert run.progress[rows] == pytest.approx(jackknife, abs=0.02 * error)
        halves = (run.progress_high - run.progress_low)[rows] / 2
        assert halves / error == pytest.approx(2.12, rel=0.05)  # x√((n-1)/(n-x²)), n = 35 or so
        assert run.noise_scale[rows] == pytest.approx(s_mean / q_mean)
        assert run.measured.all()
    assert start == 39  # the first step only sets the level


def test_the_interval_of_a_block_is_fiellers_of_its_weighted_rows() -> None:
    """Both ends r of nine unequal rows solve (S - r·Q)² = t²·var(S - r·Q), row by row.

    Rows weigh as their steps, of which one was measured in each.
    """
    rng = np.random.default_rng(0)
    weight = np.array([1.0, 2, 2, 4, 1, 3, 2, 2, 1])
    q, s = rng.normal(1, 0.3, 9), rng.normal(50, 6, 9) + 10 * rng.normal(0, 1, 9)
    s += 20 * (q - 1)  # they err together
    rows = columns(weight.cumsum().tolist(), noise_scale=[math.nan] * 9)
    zero, once = np.zeros(9), np.full(9, 32.0)  # whatever the increments weigh
    sums = (np.ones(9), once, once**2, once * s, once * q, zero, zero, zero)
    history = History.from_columns(
        rows | dict(zip((*SUMS, *SQUARES), sums, strict=True)), confidence=0.9
    )

    run = Segments.of(history)

    share = weight / weight.sum()
    mean_s, mean_q = (share * s).sum(), (share * q).sum()
    influence = share * (q + s / 32)
    units = influence.sum() ** 2 / (influence**2).sum()
    x = students_t.ppf(0.95, 8)
    assert set(run.block.tolist()) == {0}
    assert run.noise_scale == pytest.approx(mean_s / mean_q)
    for end in (run.low[0], run.high[0]):
        residuals = share * ((s - mean_s) - end * (q - mean_q))
        variance = (residuals**2).sum() / (1 - 1 / units)
        t = (mean_s - end * mean_q) / math.sqrt(variance)
        assert abs(t) == pytest.approx(x * math.sqrt((units - 1) / (units - x**2)))


@pytest.mark.parametrize("every", [250, slow(10)])
def test_a_run_that_was_measured_more_often_early_counts_by_its_steps(every: int) -> None:
    """Weights by measured steps held 70 %, all misses below, at a median of 0.75."""
    progress = np.arange(2000) / 2000
    noise_scale, signal = 16 * 10**progress, 10**-progress
    measured = {1, 2, *(8 * 1.08 ** np.arange(80)).astype(int).tolist(), *range(60, 2001, 60)}

    moments = (drawn(seed, noise_scale, signal) for seed in range(60))
    found = [critical_batch_size_of(rows_of(x, every, measured=measured)) for x in moments]

    truth = critical_of(noise_scale)
    assert np.mean([one.low <= truth <= one.high for one in found]) > 0.9
    assert median(found) / truth == pytest.approx(1, abs=0.15)


def test_rows_without_a_measured_step_count_as_their_neighbours() -> None:
    history = rows_of(drawn(0, np.full(200, 64.0)), 10)
    empty = {name: np.where(np.arange(20) % 4 == 1, 0.0, history[name]) for name in INCREMENTS}

    run = Segments.of(history | empty)

    assert run.measured.tolist() == [1, 0, 1, 1] * 5
    assert np.isfinite(run.progress).all()
    assert run.steps.tolist() == [10] * 20


def test_where_nothing_else_was_recorded_the_estimates_that_were_logged_are_taken() -> None:
    row = np.arange(1.0, 11)
    logged = columns(row.tolist(), noise_scale=(50 + row).tolist())

    for sums in ({}, dict.fromkeys(INCREMENTS, 0 * row)):
        run = Segments.of(logged | sums)
        assert run.as_logged
        assert run.noise_scale.tolist() == (50 + row).tolist()
        assert set(run.block.tolist()) == {0}


def test_the_noise_scale_at_a_step_is_that_of_the_row_it_belongs_to() -> None:
    history = columns([10, 20, 30], noise_scale=[5, 6, 7])

    found = [noise_scale_at(history, step) for step in (0, 10, 11, 20, 30)]

    assert [band.value for band in found] == [5, 5, 6, 6, 7]
    assert (found[2].low, found[2].high) == pytest.approx((0.8 * 6, 1.3 * 6))
    with refused("step", got="31"):
        noise_scale_at(history, 31)


def test_what_is_not_resolved_takes_the_next_value_and_keeps_its_own_bounds() -> None:
    nan, inf = math.nan, math.inf
    known, low = [nan, 12, nan, 13, nan, nan], [9.0, 10, 11, 10, 11, 14]
    high = [inf, 20, inf, 20, inf, inf]

    run = Segments.of(columns([10, 20, 30, 40, 50, 60], noise_scale=known, low=low, high=high))

    # The last one is known to be above 14.
    assert run.noise_scale.tolist() == [12, 12, 13, 13, 13, 14]
    assert (run.low.tolist(), run.high.tolist()) == (low, high)
    assert run.resolved.tolist() == [0, 1, 0, 1, 0, 0]
    nowhere = Segments.of(columns([10, 20], noise_scale=[nan, nan], low=[nan, 7], high=[nan, inf]))
    assert np.isnan(nowhere.noise_scale).all()
    assert (nowhere.low.tolist(), nowhere.high.tolist()) == ([0, 7], [inf, inf])


def test_a_history_that_is_no_run_is_refused() -> None:
    for step, got in (([], "0 rows"), ([10.0, 20, 20], "3 rows with step 20 out of order")):
        with refused("history", got=got):
            Segments.of(columns(step, noise_scale=[5.0] * len(step)))


FALLING = {
    "noise_scale": [10.0, 20.0, 40.0, 200.0],
    "batch_size": [32.0] * 4,
    "learning_rate": [1.0, 0.7, 0.4, 0.1],
}


def falling(**changed: list[float]) -> Segments:
    return Segments.of(columns([10, 30, 60, 100], **{**FALLING, **changed}))


def test_a_step_counts_by_its_learning_rate_where_that_fell() -> None:
    """The law written out: a step at rate r makes r times the progress."""
    history = columns([10, 30, 60, 100], **FALLING)
    steps = np.array([10, 20, 30, 40])
    rate = np.array([1.0, 0.85, 0.55, 0.25])  # means of the rates at both ends
    weight = rate * 100 / (rate @ steps)

    run = Segments.of(history)
    law = RunLaw.of(run, ONE)

    assert run.weight == pytest.approx(weight)
    share = 1 / (1 + run.noise_scale / 32)
    assert law.middle == pytest.approx(
        (weight * steps @ share, 32 * (weight * steps @ (1 - share)))
    )
    assert law.steps(32).value == pytest.approx(100)  # at the run's own batch size, its steps
    del history["learning_rate"]
    plain = RunLaw.of(Segments.of(history), ONE)
    assert law.critical_batch_size.value < 0.8 * plain.critical_batch_size.value


@pytest.mark.parametrize(
    "changed",
    [
        {"learning_rate": [1.0, 0.9, 0.8, 0.7]},  # hardly fell
        {"batch_size": [32.0, 32.0, 64.0, 64.0]},  # the scheduler's rates go with its sizes
        {"learning_rate": [1.0, 0.8, 0.6]},  # of other rows
        {"learning_rate": [math.nan] * 4},
    ],
)
def test_else_all_steps_count_the_same(changed: dict[str, list[float]]) -> None:
    assert (falling(**changed).weight == 1).all()


def test_a_rate_that_was_not_logged_is_the_next_and_a_small_last_batch_no_other_size() -> None:
    missing = falling(learning_rate=[1.0, math.nan, 0.4, 0.1])
    assert missing.weight.tolist() == falling(learning_rate=[1.0, 0.4, 0.4, 0.1]).weight.tolist()

    many = {name: values[:1] * 7 + values for name, values in FALLING.items()}
    many["batch_size"] = [32.0] * 5 + [29.0, 12.0] + [32.0] * 4

    run = Segments.of(columns([10.0 * k for k in range(1, 12)], **many))

    assert run.weight[-1] < 0.5 < run.weight[0]
