# SPDX-License-Identifier: Apache-2.0
import math

import pytest
from courses import GOAL, trial

from noisescale.history.metrics import Goal
from noisescale.lab.compare.measurements import Measurements, Trial
from noisescale.lab.compare.outcomes import Outcome, best_setting, middle, outcome_of


def outcome(steps: float, rate: float = 0.1, seed: float = 0, **others: float | str) -> Outcome:
    given = {"seed": seed, **others}
    return outcome_of(
        trial(steps, learning_rate=rate, hyperparameters=given, name=f"{rate}/{seed}"), GOAL
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
    empty = outcome_of(Trial("t", Measurements([], [])), GOAL)
    unknown = outcome_of(Trial("t", Measurements([1, 2], 2 * [math.nan])), GOAL)

    assert (found.at("steps"), found.at("seconds")) == (math.inf, math.inf)
    assert (found.after("steps"), found.after("seconds"), found.after("epochs")) == (2, 2, 0)
    assert (found.best, found.best_step) == (0.3, 2)
    assert (rising.best, rising.best_step) == (0.5, 1)
    assert (empty.at("steps"), empty.after("steps")) == (math.inf, 0)
    assert unknown.after("steps") == 0
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
    outcomes = [outcome(steps) for steps in (10, 30, 20, 40)]

    assert middle(outcomes, "steps").at("steps") == 30
    assert middle([*outcomes, outcome(math.inf)], "steps").at("steps") == 30


@pytest.mark.parametrize("lucky", [10, 100])
@pytest.mark.parametrize("others", [({}, {}), ({"schedule": "cosine"}, {"schedule": "linear"})])
def test_the_best_setting_is_that_of_the_fastest_middle_not_of_the_luckiest_seed(
    lucky: float, others: tuple[dict[str, str], dict[str, str]]
) -> None:
    """Settings may differ in a number or in a word alone."""
    ours, theirs = others
    steady = [outcome(steps, 0.1, seed, **ours) for seed, steps in enumerate((50, 60, 70))]
    rate = 0.1 if theirs else 0.2
    gamble = [outcome(steps, rate, seed, **theirs) for seed, steps in enumerate((lucky, 80, 90))]

    assert best_setting([*gamble, *steady], "steps") == steady


def test_of_missed_goals_the_nearest_is_first_also_where_the_metric_is_to_rise() -> None:
    goal = Goal.read("accuracy>0.95")
    far, near, none = (
        outcome_of(Trial(str(k), Measurements(range(len(values)), values)), goal)
        for k, values in enumerate(([0.1, 0.5], [0.1, 0.9], []))
    )

    assert middle([none, far, near], "steps") is far
    assert sorted([none, far, near], key=lambda each: each.rank("steps")) == [near, far, none]


def setting(optimizer: str = "", **given: float | str) -> tuple[object, ...]:
    sizes = {name: float(given.pop(name, math.nan)) for name in ("batch_size", "learning_rate")}
    return outcome_of(trial(10, hyperparameters=given, optimizer=optimizer, **sizes), GOAL).setting


@pytest.mark.parametrize(
    "name", ["seed", "train/seed", "manual_seed", "rng_seed", "seed_everything"]
)
def test_repetitions_differ_in_their_seed_and_in_nothing_else(name: str) -> None:
    """What is not known is the same, and the order of hyperparameters does not matter."""
    ours = setting(**{name: 1}, a=1.0, b=math.nan)

    assert ours == setting(**{name: 2}, b=math.nan, a=1.0)
    assert ours != setting(**{name: 1}, a=2.0, b=math.nan)


def test_another_batch_size_learning_rate_word_or_optimizer_is_another_setting() -> None:
    different = [
        *(setting(batch_size=size, learning_rate=rate) for size in (8, 16) for rate in (0.1, 0.2)),
        *(setting(schedule=word) for word in ("cosine", "linear")),
        *(setting(optimizer) for optimizer in ("", "sgd", "adam")),
    ]

    assert len({*different}) == len(different)
    assert setting(schedule="cosine") == setting(schedule="cosine")
    assert setting(seed="a", job_id="x1") == setting(seed="b", job_id="x2")
    assert setting(job_id=1, **{"trainer/version": 1}) == setting(
        job_id=2, **{"trainer/version": 2}
    )


PLACES = (
    *("name", "run_name", "logger/name", "output_dir", "ckpt_path", "tags", "start_time"),
    *("host", "status", "ended", "experiment", "git-commit", "wandb/group-name", "trial.notes"),
)
WORDS = ("schedule", "optim/name", "optimizer_name", "model/kind", "precision", "scheduler.name")


def test_names_places_and_remarks_of_runs_are_no_settings_and_other_words_are() -> None:
    """Each repetition would be a setting of its own, and the luckiest would count."""
    for name in (*PLACES, *WORDS):
        differ = setting(**{name: "one"}) != setting(**{name: "other"})
        assert (name, differ) == (name, name in WORDS)


@pytest.mark.parametrize("name", ["drop_path", "devices", "max_time"])
def test_numbers_by_such_names_are_settings(name: str) -> None:
    """As repetitions they would count by their middle, and the best would be none."""
    assert setting(**{name: 0.1}) != setting(**{name: 0.2})
