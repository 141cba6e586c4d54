# SPDX-License-Identifier: Apache-2.0
import math
from collections.abc import Iterable

import pytest
from courses import sweep, trial

from noisescale.history.metrics import Goal
from noisescale.time_to_result.measurements import Trial
from noisescale.time_to_result.outcomes import Outcome, outcome_of
from noisescale.time_to_result.swept import swept

GOAL = Goal.read("loss<=0.1")

LAW = {size: round(100 * (1 + 64 / size), -1) for size in (8, 16, 32, 64, 128, 256, 512)}
"""Steps of the law with S_min = 100 and B_crit = 64, at an evaluation."""


def outcomes(trials: Iterable[Trial]) -> list[Outcome]:
    return [outcome_of(each, GOAL) for each in trials]


def test_the_fewest_steps_at_each_batch_size_follow_the_law() -> None:
    found = swept("sgd", "digits", outcomes(sweep(LAW)))

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

    found = swept("sgd", "digits", outcomes(at_edge))
    without = swept("sgd", "digits", outcomes(each for each in trials if each.batch_size < 512))

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

    found = swept("sgd", "", outcomes(trials))

    assert found is not None
    assert [batch.edge for batch in found.batches] == ["", ""]
    assert [batch.diverged for batch in found.batches] == [1, 1]


def test_repetitions_of_the_best_setting_are_points_of_their_own() -> None:
    trials = [
        trial(steps, batch_size=size, hyperparameters={"seed": seed}, name=f"{size}/{seed}")
        for size, both in ((8.0, (400, 440, 420)), (64.0, (100, 120, 110)))
        for seed, steps in enumerate(both)
    ]

    found = swept("sgd", "", outcomes(trials))

    assert found is not None
    assert [sorted(batch.steps) for batch in found.batches] == [[400, 420, 440], [100, 110, 120]]
    assert [batch.best.at("steps") for batch in found.batches] == [420, 110]
    assert "the learning rate was not searched" in found.warnings[0]


def test_a_batch_size_that_misses_the_goal_is_named_and_leaves_the_others() -> None:
    found = swept("sgd", "", outcomes(sweep(LAW | {1024: math.inf})))

    assert found is not None
    assert found.batches[-1].steps == ()
    assert found.regimes is not None
    assert "No run reached the goal at batch size 1,024." in found.warnings


def test_there_are_no_regimes_of_one_batch_size_that_counts() -> None:
    found = swept("sgd", "", outcomes(sweep({8: 100, 16: math.inf})))

    assert found is not None
    assert found.regimes is None
    assert not found.largest_useful_batch_size.known


def test_one_batch_size_or_unknown_ones_are_no_sweep() -> None:
    assert swept("sgd", "", outcomes(sweep({8: 100}))) is None
    assert swept("sgd", "", outcomes([trial(100), trial(200)])) is None
