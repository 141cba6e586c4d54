# SPDX-License-Identifier: Apache-2.0
import itertools
import math
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from refused import refused
from scipy.optimize import brentq
from scipy.special import stdtrit
from tiers import slow_but

from noisescale.bounded import Bounded
from noisescale.tradeoff.profile import SPREAD, STEPS_SCATTER
from noisescale.tradeoff.regimes import RATE_SCATTER, RATE_TILT, Regimes, find_regimes

Array = NDArray[np.float64]

PERFECT, DIMINISHING = "perfect scaling", "diminishing returns"
MAXIMAL = "maximal data parallelism"


def law(batch_sizes: Array, alpha: float = 1.0, critical: float = 128.0) -> Array:
    return 50 * (1 + (critical / batch_sizes) ** alpha) ** (1 / alpha)


def doublings(first: float, count: int) -> Array:
    return first * 2.0 ** np.arange(count)


def of_all(found: Regimes) -> list[str]:
    return [found.regime_of(size) for size in found.batch_sizes]


def holds(border: Bounded, truth: float) -> bool:
    return border.low <= truth <= border.high


@pytest.mark.parametrize("alpha", [0.5, 1.0, 1.7, 3.0])
def test_borders_are_where_examples_and_steps_are_20_percent_above_the_fewest(alpha: float) -> None:
    sizes = doublings(2**-6, 26)

    found = find_regimes(sizes, law(sizes, alpha), scatter=0.01)

    def overhead(size: float, fewest: float, price: float) -> float:
        return found.steps(size) * price - 1.2 * fewest

    ends = 1e-9, 1e15
    examples = brentq(lambda b: overhead(b, found.min_examples.value, b), *ends, xtol=1e-12)
    steps = brentq(lambda b: overhead(b, found.min_steps.value, 1), *ends, xtol=1e-12)
    assert found.perfect_up_to.value == pytest.approx(examples, rel=1e-6)
    assert found.maximal_from.value == pytest.approx(steps, rel=1e-6)
    rel = 1e-3 if alpha == 1 else 0.02  # beforehand others are less likely
    fitted = (found.sharpness, found.critical_batch_size, found.min_steps, found.min_examples)
    truth = (alpha, 128, 50, 6400)
    assert tuple(each.value for each in fitted) == pytest.approx(truth, rel=rel)
    assert holds(found.perfect_up_to, examples)
    assert holds(found.maximal_from, steps)
    regimes = [regime for regime, _ in itertools.groupby(of_all(found)) if regime != "between"]
    assert regimes == [PERFECT, DIMINISHING, MAXIMAL]


def test_perfect_scaling_alone_leaves_its_end_open() -> None:
    sizes = doublings(8, 8)

    found = find_regimes(sizes, 1e5 / sizes)

    assert of_all(found)[:3] == [PERFECT] * 3
    assert {MAXIMAL, DIMINISHING}.isdisjoint(of_all(found))
    assert found.perfect_up_to.value == found.perfect_up_to.high == math.inf
    assert sizes[0] < found.perfect_up_to.low <= sizes[-1]
    assert sizes[-1] / 2 < found.maximal_from.low <= sizes[-1]
    assert found.maximal_from.high == math.inf
    assert found.min_steps.value == found.min_steps.low == 0
    assert found.min_examples.value == pytest.approx(1e5)
    assert found.sharpness.value == 1
    for size in sizes:
        assert found.steps(size) == pytest.approx(1e5 / size)
        band = found.steps_with_bounds(size)
        assert 0.5e5 / size < band.low < 1e5 / size < band.high < 2e5 / size


def test_steps_that_do_not_fall_leave_their_beginning_open() -> None:
    sizes = doublings(8, 8)

    found = find_regimes(sizes, np.full(8, 100.0))

    assert of_all(found)[-3:] == [MAXIMAL] * 3
    assert PERFECT not in of_all(found)
    assert found.maximal_from.value == found.maximal_from.low == found.perfect_up_to.low == 0
    assert sizes[0] <= found.maximal_from.high < sizes[-1]
    assert sizes[0] <= found.perfect_up_to.high < 2 * sizes[0]
    assert found.min_steps.value == pytest.approx(100)
    assert found.min_examples.value == found.min_examples.low == 0
    assert [found.steps(size) for size in sizes] == pytest.approx([100] * 8)


def test_a_sweep_without_one_end_leaves_the_border_there_open() -> None:
    steep, flat = doublings(1, 9), doublings(64, 9)

    falling, level = find_regimes(steep, law(steep)), find_regimes(flat, law(flat))

    assert falling.regime_of(1) == PERFECT
    assert falling.perfect_up_to.high < 256
    assert falling.maximal_from.high == math.inf
    assert level.regime_of(16384) == MAXIMAL
    assert level.perfect_up_to.low == 0
    assert holds(level.perfect_up_to, 25.6) or level.perfect_up_to.high == 64
    assert all(holds(found.maximal_from, 640) for found in (falling, level))


def test_at_a_sharp_elbow_perfect_scaling_goes_over_into_maximal_data_parallelism() -> None:
    sizes = doublings(2, 13)

    found = find_regimes(sizes, law(sizes, 12), scatter=0.01)

    assert DIMINISHING not in of_all(found)
    assert found.maximal_from.value < 128 < found.perfect_up_to.value
    assert found.regime_of(126) == PERFECT
    assert found.regime_of(130) == MAXIMAL


def test_at_a_gentle_bend_nearly_all_are_diminishing_returns() -> None:
    sizes = doublings(4, 11)

    bent = find_regimes(sizes, law(sizes, 0.5), scatter=0.03)
    straight = find_regimes(sizes, sizes**-0.5, scatter=0.03)

    assert {PERFECT, MAXIMAL}.isdisjoint(of_all(bent) + of_all(straight))
    assert of_all(bent).count(DIMINISHING) >= 5
    assert straight.sharpness.high < 0.5


@pytest.mark.parametrize("sizes", [[16.0, 256.0], [16.0, 64.0, 256.0]])
def test_two_or_three_batch_sizes_leave_most_open(sizes: list[float]) -> None:
    found = find_regimes(sizes, law(np.array(sizes)))

    assert found.perfect_up_to.low == 0
    assert found.maximal_from.high == math.inf
    assert {found.regime_of(size) for size in sizes} == {"between"}
    for size in (0, math.nan):
        with refused("batch_size", got=f"{size}"):
            found.regime_of(size)


@pytest.mark.parametrize("alpha", slow_but([0.6, 1.0, 1.8], 0.6))
def test_bounds_hold_the_truth_as_often_as_they_say(alpha: float) -> None:
    """More of this: benchmarks/prediction/regimes.py."""
    generator, sizes = np.random.default_rng(0), doublings(4, 10)
    apart = (1.2**alpha - 1) ** (1 / alpha)
    truth = law(sizes, alpha)
    held, of_law = np.zeros(3), []
    for _ in range(40):
        found = find_regimes(sizes, truth * np.exp(generator.normal(0, 0.15, 10)))
        held += [
            holds(found.perfect_up_to, 128 * apart),
            holds(found.maximal_from, 128 / apart),
            holds(found.critical_batch_size, 128),
        ]
        of_law += map(holds, map(found.steps_with_bounds, sizes), truth)

    assert (held >= 40 * 0.9).all(), held
    assert 0.91 <= np.mean(of_law) < 1, np.mean(of_law)


@pytest.mark.parametrize("alpha", [0.55, 1.5])
def test_bounds_are_ends_of_the_curves_that_fit_nearly_as_well(alpha: float) -> None:
    """A search over curves at random, without a profile. Bends other than 1 are less likely."""
    generator, sizes, scatter = np.random.default_rng(1), 4.0 ** np.arange(-3, 11), 0.1
    logs = np.log(law(sizes, alpha) * np.exp(generator.normal(0, 0.05, 14)))
    bends = alpha * np.exp(generator.uniform(-0.6, 0.6, 100_000))
    criticals = 128 * np.exp(generator.uniform(-0.4, 0.4, 100_000))
    ratios = np.log(criticals[:, None] / sizes)
    left = logs - np.logaddexp(0, bends[:, None] * ratios) / bends[:, None]
    level = left.mean(axis=1)
    squares = ((left - level[:, None]) ** 2).sum(axis=1)
    squares += (scatter / 0.35 * np.log(bends)) ** 2
    spare = squares.min() + (1.959964 * scatter) ** 2 - squares
    more = np.exp(np.sqrt(np.maximum(spare, 0) / 14))
    apart = (1.2**bends - 1) ** (1 / bends)
    steps = np.exp(level)

    found = find_regimes(sizes, np.exp(logs), scatter=scatter)

    fits = spare >= 0
    for size in (sizes[2], 200.0, sizes[-1]):
        ratios = np.log(criticals[fits] / size)
        there = steps[fits] * np.exp(np.logaddexp(0, bends[fits] * ratios) / bends[fits])
        band = found.steps_with_bounds(size)
        assert band.value == found.steps(size)
        ends = (there / more[fits]).min(), (there * more[fits]).max()
        assert (band.low, band.high) == pytest.approx(ends, rel=0.02), size
    for name, lows, highs in (
        ("perfect_up_to", criticals * apart, criticals * apart),
        ("maximal_from", criticals / apart, criticals / apart),
        ("critical_batch_size", criticals, criticals),
        ("sharpness", bends, bends),
        ("min_steps", steps / more, steps * more),
        ("min_examples", criticals * steps / more, criticals * steps * more),
    ):
        ends = lows[fits].min(), highs[fits].max()
        bound = getattr(found, name)
        assert (bound.low, bound.high) == pytest.approx(ends, rel=0.03), name


def test_more_confidence_and_more_scatter_widen_the_bounds() -> None:
    sizes = doublings(2, 12)

    def width(**how: float) -> float:
        border = find_regimes(sizes, law(sizes), **how).perfect_up_to
        return border.high / border.low

    assert width(confidence=0.8) < width(confidence=0.95)
    assert width(scatter=0.02) < width(scatter=0.05)


def test_borders_have_the_unit_of_batch_sizes_and_neither_steps_nor_the_order_matter() -> None:
    generator, sizes = np.random.default_rng(3), np.repeat(doublings(4, 8), 2)
    steps = law(sizes) * np.exp(generator.normal(0, 0.1, 16))
    order = generator.permutation(16)

    found = find_regimes(sizes, steps)
    tokens, slower = find_regimes(1024 * sizes, steps), find_regimes(sizes, 7 * steps)
    mixed = find_regimes(sizes[order], steps[order])

    for name in ("perfect_up_to", "maximal_from", "critical_batch_size"):
        border = getattr(found, name)
        ends = border.value, border.low, border.high
        for other, times in ((tokens, 1024), (slower, 1), (mixed, 1)):
            same = getattr(other, name)
            assert (same.value, same.low, same.high) == pytest.approx(
                [times * end for end in ends], rel=1e-4
            )
    assert tokens.scatter == pytest.approx(found.scatter, rel=1e-6)
    assert slower.min_steps.value == pytest.approx(7 * found.min_steps.value, rel=1e-4)


def test_batch_sizes_that_scatter_more_than_repeats_count_as_such() -> None:
    """Repeats share a learning rate, which may be tuned worse than that of other sizes."""
    sizes = np.repeat(doublings(2, 10), 4)
    seeds = np.tile(np.exp([0.01, -0.01, 0.01, -0.01]), 10)
    worse = np.repeat(np.exp(np.tile([0.2, -0.2], 5)), 4)

    even = find_regimes(sizes, law(sizes) * seeds)
    uneven = find_regimes(sizes, law(sizes) * seeds * worse)

    assert even.scatter < 0.05
    assert uneven.scatter > 0.3  # of a run, that four of them have a mean of 20 %


@pytest.mark.parametrize(
    ("sizes", "steps", "how", "arguments", "got"),
    [
        ([16, 16], [10, 11], {}, "batch_sizes", "1"),
        ([16, 32], [10], {}, "batch_sizes steps", "shapes (2,) and (1,)"),
        ([16, 32], [math.inf, 5], {}, "steps", "inf at position 0"),
        ([0, 32], [10, 5], {}, "batch_sizes", "0.0 at position 0"),
        ([16, 32], [10, 5], {"confidence": 95}, "confidence", "95"),
        ([16, 32], [10, 5], {"scatter": 0.0}, "scatter", "0.0"),
        ([16, 32], [10, 5], {"searched": [True]}, "searched", "1 for"),
    ],
)
def test_what_cannot_be_a_sweep_is_refused(
    sizes: list[float], steps: list[float], how: dict[str, Any], arguments: str, got: str
) -> None:
    with refused(*arguments.split()) as raised:
        find_regimes(sizes, steps, **how)

    assert raised.value.got.startswith(got)


def test_the_assumed_scatter_counts_three_degrees_of_freedom_beside_repeated_runs() -> None:
    steps = np.array([1000.0, 1100.0, 100.0, 120.0])

    found = find_regimes([8, 8, 512, 512], steps)

    squares = (np.log(steps[1::2] / steps[::2]) ** 2 / 2).sum()
    assert found.scatter == pytest.approx(math.sqrt((3 * STEPS_SCATTER**2 + squares) / (3 + 2)))


def test_a_batch_size_weighs_as_much_as_it_has_runs() -> None:
    """Steps that rise with the batch size are fitted best by a flat line, at their mean."""
    sizes, steps = [8, 16, 32, 32, 32, 32], [100, 110, 121, 121, 121, 121]

    found = find_regimes(sizes, steps)

    assert found.critical_batch_size.value == 0
    assert found.min_steps.value == pytest.approx(math.exp(np.log(steps).mean()))


@pytest.mark.parametrize("different", [3, 5])
def test_the_bounds_of_a_flat_line_are_those_of_a_mean(different: int) -> None:
    """Student's t: three degrees of freedom, and one for each batch size beyond three."""
    sizes, logs = [8.0, 8.0], [4.9, 5.1]
    sizes += [16.0 * 2**k for k in range(different - 1)]
    logs += [5.1 + 0.1 * k for k in range(different - 1)]

    found = find_regimes(sizes, np.exp(logs))
    # Examples against the inverse of the batch size are what steps are against the batch size.
    mirrored = find_regimes(1 / np.array(sizes), np.exp(logs) * sizes)

    mean, misfit = np.mean(logs), (np.array([5, 5, *logs[2:]]) - np.mean(logs)) ** 2
    guess = (3 * STEPS_SCATTER**2 + 2 * 0.1**2) / (3 + 1)
    free = different - 3
    scatter = math.sqrt((3 * guess + (misfit.sum() if free else 0)) / (3 + free))
    assert found.min_steps.value == pytest.approx(math.exp(mean))
    assert found.scatter == pytest.approx(scatter)
    most = mean + stdtrit(3 + free, 0.975) * scatter / math.sqrt(len(logs))
    assert found.min_steps.high == pytest.approx(math.exp(most), rel=1e-4)
    assert mirrored.min_examples.value == pytest.approx(math.exp(mean))
    assert mirrored.min_examples.high == pytest.approx(math.exp(most), rel=1e-4)


def test_bounds_beyond_the_sweep_end_with_it() -> None:
    """Scaling was seen to be perfect only as far as there are batch sizes."""
    sizes = doublings(1, 9)

    falling = find_regimes(sizes, law(sizes, critical=1e6), scatter=0.01)
    flat = find_regimes(sizes, law(sizes, critical=1e-6), scatter=0.01)

    assert (falling.perfect_up_to.low, falling.perfect_up_to.high) == (256, math.inf)
    assert (flat.maximal_from.low, flat.maximal_from.high) == (0, 1)


def least_with_errors_of_rates(steps: Array, searched: list[bool], curve: Array) -> float:
    """The least squares of a curve and its level, with each error of a rate as a number to find."""
    away = np.array([-2.0, 0.0, 1.0, 2.0, 3.0])  # doublings from 32, the size that was searched
    rows, wanted = [], []
    for k, known in enumerate(searched):
        tilts = [RATE_TILT * away[k] * (away[k] < 0), RATE_TILT * away[k] * (away[k] > 0)]
        own = [RATE_SCATTER * (k == other and not known) for other in range(len(searched))]
        rows.append(np.array([1.0, *tilts, *own]) / STEPS_SCATTER)
        wanted.append((math.log(steps[k]) - curve[k]) / STEPS_SCATTER)
    errors = len(searched) + 2
    prior = np.hstack([np.zeros((errors, 1)), np.eye(errors)])
    design, target = np.vstack([*rows, prior]), np.append(wanted, np.zeros(errors))
    solved, *_ = np.linalg.lstsq(design, target, rcond=None)
    return float(((target - design @ solved) ** 2).sum())


def test_rates_that_were_not_searched_have_a_tilt_and_a_scatter() -> None:
    """B_crit is bounded where the squares have risen, with all errors found along with the law."""
    sizes = np.array([8.0, 32.0, 64.0, 128.0, 256.0])
    steps = law(sizes, critical=60) * np.array([1.0, 1.03, 0.98, 1.02, 0.99])
    searched = [False, True, False, False, False]

    found = find_regimes(sizes, steps, scatter=STEPS_SCATTER, searched=searched)

    def least(log_critical: float) -> float:
        alphas = np.exp(np.linspace(-1.4, 1.4, 281))
        return min(
            least_with_errors_of_rates(
                steps, searched, np.log1p((math.exp(log_critical) / sizes) ** alpha) / alpha
            )
            + (math.log(alpha) / SPREAD) ** 2
            for alpha in alphas
        )

    critical = found.critical_batch_size
    best = least(math.log(critical.value))
    assert 0 < critical.low < critical.high < math.inf
    for end in (critical.low, critical.high):
        assert least(math.log(end)) - best == pytest.approx(1.96**2, rel=0.02)


def test_more_runs_at_a_rate_that_was_not_searched_do_not_narrow_its_error() -> None:
    sizes = doublings(8, 8)

    def critical(runs: int, searched: bool | None) -> Bounded:
        of_runs = None if searched is None else [searched] * runs * len(sizes)
        each, steps = np.repeat(sizes, runs), np.repeat(law(sizes), runs)
        found = find_regimes(each, steps, scatter=STEPS_SCATTER, searched=of_runs)
        return found.critical_batch_size

    def width(runs: int, *, searched: bool) -> float:
        return math.log(critical(runs, searched).high / critical(runs, searched).low)

    assert width(16, searched=True) < 0.35 * width(1, searched=True)
    assert width(1, searched=False) > 2 * width(1, searched=True)
    assert width(16, searched=False) > 0.75 * width(1, searched=False)
    assert critical(1, None) == critical(1, True)
