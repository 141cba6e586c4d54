# SPDX-License-Identifier: Apache-2.0
import math

import pytest
from courses import trial

from noisescale.history.metrics import Goal
from noisescale.lab.compare.measurements import Measurements, Trial
from noisescale.lab.compare.outcomes import best_setting, middle, outcome_of

GOAL = Goal.read("loss<=0.1")


def outcome(steps: float, rate: float, seed: float = 0, **where: float):  # type: ignore[no-untyped-def]
    hyperparameters = {"seed": seed, **where}
    return outcome_of(
        trial(steps, learning_rate=rate, hyperparameters=hyperparameters, name=f"{rate}/{seed}"),
        GOAL,
    )


def test_an_outcome_says_when_the_goal_was_reached_and_what_came_before() -> None:
    found = outcome_of(trial(100, seconds=2.0), GOAL)

    assert (found.at("steps"), found.at("seconds")) == (100, 200)
    assert (found.after("steps"), found.after("seconds")) == (90, 180)
    assert math.isnan(found.at("epochs"))
    assert (found.best, found.best_step) == (0.1, 100)


def test_a_goal_that_was_missed_is_infinitely_late_and_its_nearest_value_is_kept() -> None:
    measured = Measurements([1, 2, 3], [0.5, 0.3, math.nan], seconds=[1, 2, 3])

    found = outcome_of(Trial("t", measured), GOAL)
    rising = outcome_of(Trial("t", measured), Goal.read("accuracy>0.9"))

    assert (found.at("steps"), found.at("seconds")) == (math.inf, math.inf)
    assert (found.after("steps"), found.after("seconds"), found.after("epochs")) == (2, 2, 0)
    assert (found.best, found.best_step) == (0.3, 2)
    assert (rising.best, rising.best_step) == (0.5, 1)
    empty = outcome_of(Trial("t", Measurements([], [])), GOAL)
    assert (empty.at("steps"), empty.after("steps")) == (math.inf, 0)
    assert outcome_of(Trial("t", Measurements([1, 2], 2 * [math.nan])), GOAL).after("steps") == 0
    assert math.isnan(empty.best)
    assert math.isnan(empty.best_step)


def test_the_nearest_value_is_within_the_budget() -> None:
    found = outcome_of(trial(100), GOAL, {"steps": 55})

    assert (found.best_step, found.after("steps")) == (50, 50)
    assert found.reached is None


def test_a_clock_that_was_not_known_before_the_goal_counts_from_where_it_was() -> None:
    measured = Measurements([1, 2, 3], [0.9, 0.5, 0.1], seconds=[10, math.nan, 30])
    first = Measurements([1, 2], [0.1, 0.1], seconds=[10, 20])

    assert outcome_of(Trial("t", measured), GOAL).after("seconds") == 10
    assert outcome_of(Trial("t", first), GOAL).after("seconds") == 0


def test_of_an_even_number_the_middle_is_the_slower_one() -> None:
    outcomes = [outcome(steps, 0.1) for steps in (10, 30, 20, 40)]

    assert middle(outcomes, "steps").at("steps") == 30
    assert middle([*outcomes, outcome(math.inf, 0.1)], "steps").at("steps") == 30


@pytest.mark.parametrize("lucky", [10, 100])
def test_the_best_setting_is_that_of_the_fastest_middle_not_of_the_luckiest_seed(
    lucky: float,
) -> None:
    steady = [outcome(steps, 0.1, seed) for seed, steps in enumerate((50, 60, 70))]
    gamble = [outcome(steps, 0.2, seed) for seed, steps in enumerate((lucky, 80, 90))]

    assert best_setting([*gamble, *steady], "steps") == steady


def test_hyperparameters_other_than_seeds_make_another_setting() -> None:
    fast, slow = outcome(50, 0.1, momentum=0.9), outcome(60, 0.1, momentum=0.5)

    assert best_setting([slow, fast], "steps") == [fast]


def test_of_missed_goals_the_nearest_is_first_also_where_the_metric_is_to_rise() -> None:
    goal = Goal.read("accuracy>0.95")
    far, near, none = (
        outcome_of(Trial(str(k), Measurements(range(len(values)), values)), goal)
        for k, values in enumerate(([0.1, 0.5], [0.1, 0.9], []))
    )

    assert middle([none, far, near], "steps") is far
    assert sorted([none, far, near], key=lambda each: each.rank("steps")) == [near, far, none]


@pytest.mark.parametrize("name", ["seed", "random_seed", "rng_seed", "seed_everything"])
def test_repetitions_differ_in_their_seed_and_in_nothing_else(name: str) -> None:
    """What is not known is the same, and the order of hyperparameters does not matter."""

    def repetition(seed: float, *others: tuple[str, float]) -> tuple[object, ...]:
        given = dict([(name, seed), *others])
        unknown = float("nan")
        return outcome_of(
            trial(10, hyperparameters=given, batch_size=unknown, learning_rate=unknown), GOAL
        ).setting

    ours = repetition(1, ("a", 1.0), ("b", float("nan")))

    assert ours == repetition(2, ("b", float("nan")), ("a", 1.0))
    assert ours != repetition(1, ("a", 2.0), ("b", float("nan")))


def test_another_batch_size_or_learning_rate_is_another_setting() -> None:
    settings = {
        outcome_of(trial(10, batch_size=size, learning_rate=rate), GOAL).setting
        for size in (8.0, 16.0)
        for rate in (0.1, 0.2)
    }

    assert len(settings) == 4


def setting(optimizer: str = "", **given: float | str) -> tuple[object, ...]:
    return outcome_of(trial(10, hyperparameters=given, optimizer=optimizer), GOAL).setting


def test_words_make_settings_as_numbers_do() -> None:
    ours = setting(schedule="cosine")

    assert ours == setting(schedule="cosine")
    assert ours != setting(schedule="linear")
    assert ours != setting()
    assert setting("sgd") != setting("adam")
    assert setting(seed="a", job_id="x1") == setting(seed="b", job_id="x2")


def test_the_best_of_two_schedules_is_no_repetition_of_the_other() -> None:
    cosine = [outcome(steps, 0.1, k, schedule="cosine") for k, steps in enumerate((50, 60, 70))]
    linear = [outcome(steps, 0.1, k, schedule="linear") for k, steps in enumerate((40, 80, 90))]

    assert best_setting([*cosine, *linear], "steps") == cosine
