# SPDX-License-Identifier: Apache-2.0
import math
from collections.abc import Iterable
from typing import Any

import pytest
from courses import GOAL, SIZES, law, seeds, sweep, trial
from tiers import slow

from noisescale.lab.compare.measurements import Measurements, Trial
from noisescale.lab.compare.outcomes import outcome_of
from noisescale.lab.compare.swept import Swept, sweep_of

LAW = law(64, sizes=SIZES[:7])
"""Steps of the law with S_min = 100 and B_crit = 64, at an evaluation."""


def swept(trials: Iterable[Trial]) -> Any:
    return sweep_of("sgd", "digits", [outcome_of(each, GOAL) for each in trials])


def counting(found: Swept) -> list[float]:
    return [batch.batch_size for batch in found.batches if batch.counts]


def single(steps: dict[float, float], rates: dict[float, float] | float = 0.1) -> list[Trial]:
    """One learning rate at each batch size."""
    return [
        trial(at, batch_size=size, learning_rate=rates[size] if isinstance(rates, dict) else rates)
        for size, at in steps.items()
    ]


def test_the_fewest_steps_at_each_batch_size_follow_the_law() -> None:
    found = swept(sweep(LAW))

    assert [batch.steps for batch in found.batches] == [(steps,) for steps in LAW.values()]
    assert [batch.best.trial.learning_rate for batch in found.batches] == [0.1] * 7
    assert {batch.tried for batch in found.batches} == {3}
    assert found.regimes.critical_batch_size.value == pytest.approx(64, rel=0.1)
    assert found.warnings == ()


@pytest.mark.parametrize(
    ("size", "rate", "edges"),
    [(512, 0.2, [*6 * [""], "high"]), (8, 0.05, ["low", *6 * [""]])],
)
def test_a_best_rate_at_the_edge_does_not_count(size: int, rate: float, edges: list[str]) -> None:
    trials = sweep(LAW)

    found = swept(t for t in trials if (t.batch_size, t.learning_rate) != (size, rate))
    without = swept(t for t in trials if t.batch_size != size)

    assert [batch.edge for batch in found.batches] == edges
    assert counting(found) == [each for each in LAW if each != size]
    assert found.regimes == without.regimes
    assert found.warnings[0].startswith(f"At batch size {size} ")
    assert "edge" in found.warnings[0]


def test_a_diverged_trial_beyond_the_best_learning_rate_shows_that_the_search_went_there() -> None:
    """It never reached the goal, but it was tried."""
    trials = [
        trial(steps, batch_size=size, learning_rate=rate, name=f"{rate}", feasible=rate < 1)
        for size in (8.0, 16.0)
        for rate, steps in ((0.1, 100), (0.2, 50), (1.0, math.inf))
    ]

    found = swept(trials)

    assert [batch.edge for batch in found.batches] == ["", ""]
    assert [batch.diverged for batch in found.batches] == [1, 1]


def test_repetitions_of_the_best_setting_are_points_of_their_own() -> None:
    found = swept(
        [*seeds((400, 440, 420), batch_size=8.0), *seeds((100, 120, 110), batch_size=64.0)]
    )

    assert [sorted(batch.steps) for batch in found.batches] == [[400, 420, 440], [100, 110, 120]]
    assert [batch.best.at("steps") for batch in found.batches] == [420, 110]
    (told,) = found.warnings
    assert told.startswith("At 2 of 2 batch sizes")
    assert sorted(found.regimes.measured_steps) == [100, 110, 120, 400, 420, 440]


def test_a_batch_size_that_misses_the_goal_is_named_and_leaves_the_others() -> None:
    """It needs no search of learning rates."""
    found = swept(sweep(LAW | {1024: math.inf}))
    alone = swept([*sweep(LAW), trial(math.inf, batch_size=1024.0, learning_rate=0.1)])

    last = found.batches[-1]
    assert (last.steps, last.edge, last.counts, last.diverged) == ((), "", False, 0)
    assert found.regimes is not None
    for each in (found, alone):
        assert each.warnings == ("No run reached the goal at batch size 1,024.",)


def test_a_batch_size_that_was_at_the_goal_before_the_first_step_does_not_count() -> None:
    at_once = Trial("0", Measurements([0, 10], [0.1, 0.1]), "sgd", batch_size=4.0)

    found = swept([at_once, *sweep(LAW)])

    assert counting(found) == [*LAW]
    assert (found.batches[0].steps, found.batches[0].reached) == ((), 1)
    assert found.regimes == swept(sweep(LAW)).regimes


@pytest.mark.parametrize("searched", [False, True])
def test_there_are_no_regimes_of_one_batch_size_that_counts(searched: bool) -> None:
    """Nor is a search of learning rates then missed."""
    found = swept((sweep if searched else single)({8: 100, 16: math.inf}))

    assert found.regimes is None
    assert found.warnings == ("No run reached the goal at batch size 16.",)


def test_one_batch_size_and_unknown_ones_are_no_sweep() -> None:
    assert swept(sweep({8: 100})) is None
    assert swept([trial(100), trial(200)]) is None
    assert swept([*sweep({8: 100}), trial(200)]) is None


@pytest.mark.parametrize(
    ("repeats", "steps"), [((50, 60, math.inf), (50, 60)), ((50, math.inf, math.inf), ())]
)
def test_a_size_counts_by_its_middle_repetition(repeats: list[float], steps: list[float]) -> None:
    found = swept([*seeds(repeats, batch_size=16.0), trial(100, batch_size=8.0)]).batches[1]

    assert found.steps == steps
    assert found.counts is bool(steps)
    assert found.reached == sum(math.isfinite(each) for each in repeats)


@pytest.mark.parametrize(
    ("repeats", "steps"), [((0, 100, 110), (100, 110)), ((0, 0, 100), ()), ((0, 100), (100,))]
)
def test_repetitions_done_at_step_0_are_no_points(repeats: list[float], steps: list[float]) -> None:
    trials = [
        Trial(
            str(seed),
            Measurements([0, 100, 110], [0.1 if at >= each else 0.9 for at in (0, 100, 110)]),
            batch_size=16.0,
            hyperparameters={"seed": seed},
        )
        for seed, each in enumerate(repeats)
    ]

    assert swept([*trials, trial(200, batch_size=8.0)]).batches[1].steps == steps


RULES = {
    "constant": [0.1] * 7,
    "square root": [0.01 * size**0.5 for size in LAW],
    "of a loss that is summed over the batch": [1 / size for size in LAW],
    "constant, but the largest diverged": [*[0.1] * 6, 0.02],
    "searched elsewhere, by factors of ten": [0.01, 0.01, 0.1, 0.01, 0.1, 0.1, 1.0],
    "searched elsewhere, by factors of four": [0.1, 0.4, 0.1, 0.4, 0.1, 0.4, 0.1],
}


@pytest.mark.parametrize("searched", [False, slow(True)], ids=["", "one searched"])
@pytest.mark.parametrize("rule", RULES)
def test_batch_sizes_with_one_learning_rate_each_by_a_rule_count(rule: str, searched: bool) -> None:
    rates = dict(zip(LAW, RULES[rule], strict=True))
    trials = single(LAW, rates)
    if searched:
        trials += [t for factor in (0.5, 2) for t in single({64: 9999}, factor * rates[64])]

    assert counting(swept(trials)) == [*LAW]


@pytest.mark.parametrize(
    ("rates", "searched"),
    [
        ((0.5, 0.1, 0.8), 2),
        ((0.1, 0.2, 0.4, 0.8), 7),
        ((), 7),
        *(slow((0.5, 0.1, 0.8), 7), slow((0.1, 0.2, 0.4, 0.8), 2)),
    ],
)
def test_a_single_rate_beside_searches_does_not_count(rates: list[float], searched: int) -> None:
    """Drawn rates, those of a rule, or none."""
    some = dict([*LAW.items()][:searched])
    others = [
        trial(60 - k, batch_size=1024.0 * 2**k, learning_rate=rate)
        for k, rate in enumerate(rates or (math.nan, math.nan))
    ]

    found = swept([*sweep(some), *others])

    assert counting(found) == [*some]
    assert found.regimes == swept(sweep(some)).regimes
    (told,) = found.warnings
    assert told.startswith(f"At {len(others)} of {len(some) + len(others)} batch sizes at most one")


SCALED = {
    "constant": lambda size: 0.1,
    "square root": lambda size: round(0.1 * (size / 64) ** 0.5, 3),
    "linear": lambda size: 0.1 * size / 64,
    "linear, rounded": lambda size: round(0.1 * size / 60, 3),
    "AdaScale's, for a noise scale of 100": lambda size: 0.1 * 1.64 / (1 + 100 / size),
}


@pytest.mark.parametrize("rule", SCALED)
def test_a_rate_searched_once_and_scaled_by_a_rule_counts(rule: str) -> None:
    """The usual way: the base batch size is tuned, and a rule gives the others their rate."""
    rates = {size: SCALED[rule](size) for size in LAW}
    also = [t for factor in (0.5, 2) for t in single({64: 2 * LAW[64]}, factor * rates[64])]

    found = swept([*single(LAW, rates), *also])

    assert counting(found) == [*LAW]
    assert found.regimes is not None
    said = "At 6 of 7 batch sizes the learning rate was not searched"
    assert any(told.startswith(said) for told in found.warnings)


def searched_around(best: dict[float, float], factors: tuple[float, ...]) -> list[Trial]:
    return [
        trial(LAW[size] * (1 if f == 1 else 1.6), batch_size=size, learning_rate=f * rate)
        for size, rate in best.items()
        for f in factors
    ]


def scaled(searched: dict[float, float]) -> list[Trial]:
    """Searches whose rates rise with the batch size, and 0.1 at all other batch sizes."""
    others = {size: 3 * at for size, at in LAW.items() if size not in searched}
    return [*searched_around(searched, (0.5, 1, 2)), *single(others)]


DRAWN = single(LAW, dict(zip(LAW, (0.4, 1.0, 0.2, 3.0, 0.1, 0.3, 2.0), strict=True)))
"""Of a random search over learning rates and batch sizes."""


@pytest.mark.parametrize(
    ("trials", "counts"),
    [
        (scaled({8: 0.1, 16: 0.2}), [8, 16]),
        (scaled({128: 0.7, 256: 1.0, 512: 1.4}), [128, 256, 512]),
        (DRAWN, []),
        ([*DRAWN, *single({64: 9999}, 0.5), *single({64: 9999}, 9.0)], [64]),
    ],
    ids=["never scaled after searches", "never scaled before searches", "drawn", "one searched"],
)
def test_single_learning_rates_do_not_count_against_the_searches(
    trials: list[Trial], counts: list[float]
) -> None:
    found = swept(trials)

    assert counting(found) == counts
    assert (found.regimes is None) is (len(counts) < 2)


def test_drawn_batch_sizes_leave_the_advice_on_searched_ones() -> None:
    """Of two sizes with three rates each the best is at the edge; one more may help."""
    at_edge = [
        trial(100 if rate == 0.4 else 200, batch_size=size, learning_rate=rate, name=f"{rate}")
        for size in (8.0, 16.0)
        for rate in (0.1, 0.2, 0.4)
    ]
    drawn = single(dict.fromkeys((64, 128, 256), 90), {64: 0.4, 128: 0.05, 256: 0.5})

    found = swept([*at_edge, *drawn])

    assert found.regimes is None
    assert found.warnings[0].startswith("At batch size 8, 16 ")
    assert "edge" in found.warnings[0]


def test_learning_rates_of_another_optimizer_are_no_search() -> None:
    """The best rate of the faster optimizer is its highest, though the other had higher ones."""
    tried = (("adam", 0.001, 2), ("adam", 0.002, 1), ("sgd", 0.1, 2), ("sgd", 0.2, 3))
    trials = [
        trial(
            at * factor,
            batch_size=size,
            learning_rate=rate,
            hyperparameters={"optim/name": name},
            name=f"{size}/{name}/{rate}",
        )
        for size, at in LAW.items()
        for name, rate, factor in tried
    ]

    found = swept(trials)

    assert {batch.learning_rates for batch in found.batches} == {(0.001, 0.002)}
    assert {batch.edge for batch in found.batches} == {"high"}
    assert found.regimes is None


def test_single_learning_rates_widen_the_bounds_and_searches_do_not() -> None:
    searched = [t for t in sweep(LAW) if t.batch_size == 64]
    by_rule = [t for t in single(LAW) if t.batch_size != 64]

    def bounds(trials: list[Trial]) -> tuple[float, float]:
        critical = swept(trials).regimes.critical_batch_size
        return critical.low, critical.high

    low, high = bounds(single(LAW))
    narrow = bounds(sweep(LAW))
    assert low < 0.5 * narrow[0]
    assert high > 1.5 * narrow[1]
    assert low < bounds([*by_rule, *searched])[0] < narrow[0]
