# SPDX-License-Identifier: Apache-2.0
import math
from collections.abc import Iterable

import pytest
from courses import sweep, trial

from noisescale.history.metrics import Goal
from noisescale.lab.compare.measurements import Measurements, Trial
from noisescale.lab.compare.outcomes import Outcome, outcome_of
from noisescale.lab.compare.swept import sweep_of

GOAL = Goal.read("loss<=0.1")

LAW = {size: round(100 * (1 + 64 / size), -1) for size in (8, 16, 32, 64, 128, 256, 512)}
"""Steps of the law with S_min = 100 and B_crit = 64, at an evaluation."""


def outcomes(trials: Iterable[Trial]) -> list[Outcome]:
    return [outcome_of(each, GOAL) for each in trials]


def test_the_fewest_steps_at_each_batch_size_follow_the_law() -> None:
    found = sweep_of("sgd", "digits", outcomes(sweep(LAW)))

    assert found is not None
    assert [batch.steps for batch in found.batches] == [(steps,) for steps in LAW.values()]
    assert [batch.best.trial.learning_rate for batch in found.batches] == [0.1] * 7
    assert {batch.tried for batch in found.batches} == {3}
    assert found.regimes is not None
    assert found.regimes.critical_batch_size.value == pytest.approx(64, rel=0.1)
    assert found.largest_useful_batch_size == found.regimes.maximal_from
    assert found.warnings == ()


def test_a_best_learning_rate_at_the_edge_does_not_count() -> None:
    trials = sweep(LAW)
    at_edge = [each for each in trials if (each.batch_size, each.learning_rate) != (512.0, 0.2)]

    found = sweep_of("sgd", "digits", outcomes(at_edge))
    without = sweep_of("sgd", "digits", outcomes(each for each in trials if each.batch_size < 512))

    assert found is not None
    assert without is not None
    assert [batch.edge for batch in found.batches] == [*6 * [""], "high"]
    assert not found.batches[-1].counts
    assert found.regimes == without.regimes
    assert found.warnings[0].startswith("At batch size 512 the best learning rate is at the edge")


def test_a_diverged_trial_beyond_the_best_learning_rate_shows_that_the_search_went_there() -> None:
    """It never reached the goal, but it was tried."""
    trials = [
        trial(100, batch_size=size, learning_rate=rate, name="t")
        if rate < 1
        else trial(math.inf, batch_size=size, learning_rate=rate, name="d", feasible=False)
        for size in (8.0, 16.0)
        for rate in (0.1, 0.2, 1.0)
    ]
    trials = [each for each in trials if each.learning_rate != 0.2]
    trials += [trial(50, batch_size=size, learning_rate=0.2, name="b") for size in (8.0, 16.0)]

    found = sweep_of("sgd", "", outcomes(trials))

    assert found is not None
    assert [batch.edge for batch in found.batches] == ["", ""]
    assert [batch.diverged for batch in found.batches] == [1, 1]


def test_repetitions_of_the_best_setting_are_points_of_their_own() -> None:
    trials = [
        trial(steps, batch_size=size, hyperparameters={"seed": seed}, name=f"{size}/{seed}")
        for size, both in ((8.0, (400, 440, 420)), (64.0, (100, 120, 110)))
        for seed, steps in enumerate(both)
    ]

    found = sweep_of("sgd", "", outcomes(trials))

    assert found is not None
    assert [sorted(batch.steps) for batch in found.batches] == [[400, 420, 440], [100, 110, 120]]
    assert [batch.best.at("steps") for batch in found.batches] == [420, 110]
    (told,) = found.warnings
    assert told.startswith("At 2 of 2 batch sizes the learning rate was not searched.")
    assert found.regimes is not None
    assert sorted(found.regimes.measured_steps) == [100, 110, 120, 400, 420, 440]


def test_a_batch_size_that_misses_the_goal_is_named_and_leaves_the_others() -> None:
    found = sweep_of("sgd", "", outcomes(sweep(LAW | {1024: math.inf})))

    assert found is not None
    assert found.batches[-1].steps == ()
    assert found.batches[-1].edge == ""
    assert not found.batches[-1].counts
    assert found.batches[-1].diverged == 0
    assert found.regimes is not None
    assert found.warnings == ("No run reached the goal at batch size 1,024.",)


def test_a_batch_size_that_was_at_the_goal_before_the_first_step_does_not_count() -> None:
    at_once = Trial("0", Measurements([0, 10], [0.1, 0.1]), "sgd", batch_size=4.0)

    found = sweep_of("sgd", "", outcomes([at_once, *sweep(LAW)]))
    without = sweep_of("sgd", "", outcomes(sweep(LAW)))

    assert found is not None
    assert without is not None
    assert [batch.counts for batch in found.batches] == [False, *7 * [True]]
    assert (found.batches[0].steps, found.batches[0].reached) == ((), 1)
    assert found.regimes == without.regimes


def test_there_are_no_regimes_of_one_batch_size_that_counts() -> None:
    found = sweep_of("sgd", "", outcomes(sweep({8: 100, 16: math.inf})))

    assert found is not None
    assert found.regimes is None
    assert found.warnings == ("No run reached the goal at batch size 16.",)
    assert not found.largest_useful_batch_size.known


def test_one_batch_size_or_unknown_ones_are_no_sweep() -> None:
    assert sweep_of("sgd", "", outcomes(sweep({8: 100}))) is None
    assert sweep_of("sgd", "", outcomes([trial(100), trial(200)])) is None
    assert sweep_of("sgd", "", outcomes([*sweep({8: 100}), trial(200)])) is None


def test_the_lowest_learning_rate_is_an_edge() -> None:
    trials = [t for t in sweep(LAW) if (t.batch_size, t.learning_rate) != (8.0, 0.05)]

    found = sweep_of("sgd", "", outcomes(trials))

    assert found is not None
    assert [batch.edge for batch in found.batches] == ["low", *6 * [""]]
    assert found.warnings[0].startswith("At batch size 8 the best learning rate is at the edge")


def test_batch_sizes_without_regimes_or_without_the_goal_need_no_search_of_learning_rates() -> None:
    one = [trial(100, batch_size=8.0), trial(math.inf, batch_size=16.0)]
    missed = [*sweep(LAW), trial(math.inf, batch_size=1024.0, learning_rate=0.1)]

    for trials, size in ((one, "16"), (missed, "1,024")):
        found = sweep_of("sgd", "", outcomes(trials))
        assert found is not None
        assert found.warnings == (f"No run reached the goal at batch size {size}.",)


@pytest.mark.parametrize(
    ("repeats", "steps"), [((50, 60, math.inf), (50, 60)), ((50, math.inf, math.inf), ())]
)
def test_a_batch_size_counts_if_its_middle_repetition_reached_the_goal(
    repeats: tuple[float, ...], steps: tuple[float, ...]
) -> None:
    trials = [
        trial(each, batch_size=16.0, hyperparameters={"seed": seed}, name=str(seed))
        for seed, each in enumerate(repeats)
    ]

    found = sweep_of("sgd", "", outcomes([*trials, trial(100, batch_size=8.0)]))

    assert found is not None
    assert found.batches[1].steps == steps
    assert found.batches[1].counts is bool(steps)
    assert found.batches[1].reached == sum(math.isfinite(each) for each in repeats)


@pytest.mark.parametrize(
    ("repeats", "steps"), [((0, 100, 110), (100, 110)), ((0, 0, 100), ()), ((0, 100), (100,))]
)
def test_repetitions_that_were_at_the_goal_at_step_0_are_no_points(
    repeats: tuple[float, ...], steps: tuple[float, ...]
) -> None:
    trials = [
        Trial(
            str(seed),
            Measurements([0, 100, 110], [0.1 if at >= each else 0.9 for at in (0, 100, 110)]),
            batch_size=16.0,
            hyperparameters={"seed": seed},
        )
        for seed, each in enumerate(repeats)
    ]

    found = sweep_of("sgd", "", outcomes([*trials, trial(200, batch_size=8.0)]))

    assert found is not None
    assert found.batches[1].steps == steps


RULES = {
    "constant": dict.fromkeys(LAW, 0.1),
    "square root": {size: 0.01 * size**0.5 for size in LAW},
    "of a loss that is summed over the batch": {size: 1 / size for size in LAW},
    "constant, but the largest diverged": dict.fromkeys(LAW, 0.1) | {512: 0.02},
    "searched elsewhere, by factors of ten": dict(
        zip(LAW, (0.01, 0.01, 0.1, 0.01, 0.1, 0.1, 1.0), strict=True)
    ),
    "searched elsewhere, by factors of four": dict(
        zip(LAW, (0.1, 0.4, 0.1, 0.4, 0.1, 0.4, 0.1), strict=True)
    ),
}


@pytest.mark.parametrize("searched", [False, True], ids=["", "one searched"])
@pytest.mark.parametrize("rule", RULES)
def test_batch_sizes_with_one_learning_rate_each_by_a_rule_count(rule: str, searched: bool) -> None:
    rates = RULES[rule]
    trials = [trial(s, batch_size=b, learning_rate=rates[b]) for b, s in LAW.items()]
    if searched:
        trials += [
            trial(9999, batch_size=64, learning_rate=factor * rates[64]) for factor in (0.5, 2)
        ]

    found = sweep_of("sgd", "", outcomes(trials))

    assert found is not None
    assert all(batch.counts for batch in found.batches)


def test_batch_sizes_that_were_drawn_along_with_learning_rates_are_no_sweep() -> None:
    """Of a random search over both, nothing is known of the best learning rate at a batch size."""
    rates = [0.4, 1.0, 0.2, 3.0, 0.1, 0.3, 2.0]
    drawn = [
        trial(steps, batch_size=size, learning_rate=rate)
        for (size, steps), rate in zip(LAW.items(), rates, strict=True)
    ]

    assert sweep_of("sgd", "", outcomes(drawn)) is None


@pytest.mark.parametrize("searched", [2, 7])
@pytest.mark.parametrize(
    "rates",
    [(0.5, 0.1, 0.8), (0.1, 0.2, 0.4), (0.1, 0.4, 1.6, 6.4), (0.8, 0.4, 0.2, 0.1)],
    ids=["drawn", "too few", "too steep", "falling"],
)
def test_a_batch_size_with_one_learning_rate_beside_searched_ones_does_not_count(
    rates: tuple[float, ...], searched: int
) -> None:
    law = dict([*LAW.items()][:searched])
    single = [
        trial(60 - k, batch_size=1024.0 * 2**k, learning_rate=rate) for k, rate in enumerate(rates)
    ]

    found = sweep_of("sgd", "", outcomes([*sweep(law), *single]))
    without = sweep_of("sgd", "", outcomes(sweep(law)))

    assert found is not None
    assert without is not None
    expected = [*searched * [True], *len(rates) * [False]]
    assert [batch.counts for batch in found.batches] == expected
    assert found.regimes == without.regimes
    (told,) = found.warnings
    assert told.startswith(f"At {len(rates)} of {len(expected)} batch sizes at most one learning")


def test_batch_sizes_without_a_learning_rate_beside_searched_ones_do_not_count() -> None:
    trials = [*sweep(LAW), *(trial(50, batch_size=size) for size in (1024.0, 2048.0))]

    found = sweep_of("sgd", "", outcomes(trials))

    assert found is not None
    assert [batch.counts for batch in found.batches] == [*7 * [True], *2 * [False]]
    assert found.warnings[0].startswith("At 2 of 9 batch sizes at most one learning rate is known")


SCALED = {
    "constant": lambda size: 0.1,
    "square root": lambda size: round(0.1 * (size / 64) ** 0.5, 3),
    "linear": lambda size: 0.1 * size / 64,
    "linear, rounded": lambda size: round(0.1 * size / 60, 3),
    "AdaScale's, for a noise scale of 100": lambda size: 0.1 * 1.64 / (1 + 100 / size),
}


@pytest.mark.parametrize("rule", SCALED)
@pytest.mark.parametrize("searched", [(64,), (64, 512), (8, 64, 512)], ids=str)
def test_a_learning_rate_searched_at_some_batch_sizes_and_scaled_to_others_counts(
    searched: tuple[int, ...], rule: str
) -> None:
    """The usual way: the base batch size is tuned, and a rule gives the others their rate.

    A search at further ones, even if it ends at the edge, takes nothing from those of the rule.
    """
    rate = SCALED[rule]
    by_rule = [trial(s, batch_size=b, learning_rate=rate(b)) for b, s in LAW.items()]
    also = [
        trial(2 * LAW[size], batch_size=size, learning_rate=factor * rate(size))
        for size in searched
        for factor in ((0.5, 2) if size == 64 else (0.5,))
    ]

    found = sweep_of("sgd", "", outcomes([*by_rule, *also]))

    assert found is not None
    assert [batch.counts for batch in found.batches] == [
        size == 64 or size not in searched for size in LAW
    ]
    assert found.regimes is not None
    single = len(LAW) - len(searched)
    assert any(
        told.startswith(f"At {single} of 7 batch sizes the learning rate was not searched.")
        for told in found.warnings
    )


def searched_around(best: dict[int, float], factors: tuple[float, ...]) -> list[Trial]:
    return [
        trial(LAW[size] * (1 if f == 1 else 1.6), batch_size=size, learning_rate=f * rate)
        for size, rate in best.items()
        for f in factors
    ]


def counted(trials: list[Trial]) -> list[float]:
    found = sweep_of("sgd", "", outcomes(trials))
    assert found is not None
    return [batch.batch_size for batch in found.batches if batch.counts]


@pytest.mark.parametrize(
    ("searched", "single"),
    [
        ({8: 0.1, 16: 0.2}, dict.fromkeys((32, 64, 128, 256, 512), 0.1)),
        ({128: 0.7, 256: 1.0, 512: 1.4}, dict.fromkeys((8, 16, 32, 64), 0.1)),
    ],
    ids=["before", "after"],
)
def test_a_learning_rate_that_was_never_scaled_does_not_count_against_the_searches(
    searched: dict[int, float], single: dict[int, float]
) -> None:
    """At 16 a rate of 0.2 was found, so 0.1 is too low at larger batch sizes."""
    trials = searched_around(searched, (0.5, 1, 2))
    trials += [trial(3 * LAW[b], batch_size=b, learning_rate=rate) for b, rate in single.items()]

    assert counted(trials) == [*searched]


@pytest.mark.parametrize(
    ("best", "factors", "rate", "count"),
    [
        ({8: 0.1, 512: 0.35}, (0.5, 1, 2), 0.35, False),  # at 8 it would be above 0.14
        ({8: 0.1, 512: 0.35}, (0.5, 1, 2), 0.27, True),
        ({8: 0.1, 512: 0.1}, (1, 2), 0.05, True),  # the best may be lower
        ({8: 0.1, 512: 0.1}, (1, 2), 0.3, False),
        ({8: 0.1, 512: 0.1}, (0.5, 1), 0.2, True),  # the best may be higher
        ({8: 0.1, 512: 0.1}, (0.5, 1), 0.05, False),
    ],
)
def test_single_learning_rates_count_if_searches_leave_room_for_them(
    best: dict[int, float], factors: tuple[float, ...], rate: float, count: bool
) -> None:
    single = [trial(s, batch_size=b, learning_rate=rate) for b, s in LAW.items() if b not in best]
    found = counted([*searched_around(best, factors), *single])

    assert set(found) - best.keys() == ({16, 32, 64, 128, 256} if count else set())


def test_a_missed_goal_says_nothing_of_the_rule() -> None:
    single = [trial(LAW[b], batch_size=b, learning_rate=0.1) for b in (32, 64, 128, 256)]
    missed = [trial(math.inf, batch_size=512, learning_rate=0.001)]

    found = counted([*searched_around({8: 0.1, 16: 0.1}, (0.5, 1, 2)), *single, *missed])

    assert found == [8, 16, 32, 64, 128, 256]


def test_a_batch_size_without_a_learning_rate_does_not_count_beside_a_rule() -> None:
    known = [trial(s, batch_size=b, learning_rate=0.1 * b / 8) for b, s in LAW.items() if b <= 256]
    edges = [trial(9999, batch_size=b, learning_rate=0.05) for b in (8, 16)]
    unknown = [trial(500, batch_size=512)]

    found = sweep_of("sgd", "", outcomes([*known, *edges, *unknown]))

    assert found is not None
    assert [b.batch_size for b in found.batches if b.counts] == [32, 64, 128, 256]
    assert found.batches[-1].unsearched


def test_drawn_learning_rates_around_one_searched_do_not_count() -> None:
    rates = [0.4, 1.0, 0.2, 3.0, 0.1, 0.3, 2.0]
    drawn = [
        trial(steps, batch_size=size, learning_rate=rate)
        for (size, steps), rate in zip(LAW.items(), rates, strict=True)
    ]
    searched = [
        trial(9999, batch_size=drawn[3].batch_size, learning_rate=rate) for rate in (0.5, 9.0)
    ]

    found = sweep_of("sgd", "", outcomes([*drawn, *searched]))

    assert found is not None
    assert [batch.counts for batch in found.batches] == [*3 * [False], True, *3 * [False]]
    assert found.regimes is None


def test_drawn_batch_sizes_leave_the_advice_on_searched_ones() -> None:
    """Of two sizes with three rates each the best is at the edge; one more may help."""
    at_edge = [
        trial(100 if rate == 0.4 else 200, batch_size=size, learning_rate=rate, name=f"{rate}")
        for size in (8.0, 16.0)
        for rate in (0.1, 0.2, 0.4)
    ]
    drawn = [
        trial(90, batch_size=size, learning_rate=rate)
        for size, rate in ((64.0, 0.4), (128.0, 0.05), (256.0, 0.5))
    ]

    found = sweep_of("sgd", "", outcomes([*at_edge, *drawn]))

    assert found is not None
    assert found.regimes is None
    assert found.warnings[0].startswith("At batch size 8, 16 the best learning rate is at the edge")


def test_learning_rates_of_another_optimizer_are_no_search() -> None:
    """The best rate of the faster optimizer is its highest, though the other had higher ones."""
    trials = [
        trial(
            at * factor,
            batch_size=size,
            learning_rate=rate,
            hyperparameters={"optim/name": name},
            name=f"{size}/{name}/{rate}",
        )
        for size, at in LAW.items()
        for name, rate, factor in (
            ("adam", 0.001, 2),
            ("adam", 0.002, 1),
            ("sgd", 0.1, 2),
            ("sgd", 0.2, 3),
        )
    ]

    found = sweep_of("", "", outcomes(trials))

    assert found is not None
    assert {batch.learning_rates for batch in found.batches} == {(0.001, 0.002)}
    assert {batch.edge for batch in found.batches} == {"high"}
    assert found.regimes is None


def test_single_learning_rates_widen_the_bounds_and_searches_do_not() -> None:
    single = [trial(steps, batch_size=size, learning_rate=0.1) for size, steps in LAW.items()]
    searched = [t for t in sweep(LAW) if t.batch_size == 64]

    def bounds(trials: list[Trial]) -> tuple[float, float]:
        found = sweep_of("", "", outcomes(trials))
        assert found is not None
        assert found.regimes is not None
        critical = found.regimes.critical_batch_size
        return critical.low, critical.high

    low, high = bounds(single)
    assert low < 0.5 * bounds(sweep(LAW))[0]
    assert high > 1.5 * bounds(sweep(LAW))[1]
    by_rule = [t for t in single if t.batch_size != 64]
    assert low < bounds([*by_rule, *searched])[0] < bounds(sweep(LAW))[0]
