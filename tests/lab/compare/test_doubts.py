# SPDX-License-Identifier: Apache-2.0
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from courses import trial

from noisescale.history.metrics import Goal
from noisescale.lab.compare.compare_trials import compare_trials
from noisescale.lab.compare.measurements import Measurements, Trial

GOAL = Goal.read("loss<=0.1")


def warnings_of(
    *trials: Trial, clock: str | None = None, budget: Mapping[str, float] | None = None
) -> str:
    return " ".join(compare_trials(trials, GOAL, clock=clock, budget=budget).warnings)


def seeded(steps: float, name: str = "seed", seed: float = 0, **where: Any) -> Trial:
    return trial(steps, hyperparameters={name: seed}, name=f"{steps}/{seed}", **where)


@pytest.mark.parametrize("name", ["seed", "train/seed", "manual_seed", "seed_everything"])
def test_repetitions_with_different_seeds_are_no_matter(name: str) -> None:
    assert warnings_of(seeded(100, name, 0), seeded(120, name, 1)) == ""


def test_runs_that_nothing_tells_apart_are_named() -> None:
    """They may have had different learning rates that nobody logged."""
    said = (
        "2 runs have the same hyperparameters as others and no different seeds in their logs, for"
        " example {} and {}. They count as repetitions"
    )

    assert said.format("run/100", "run/120") in warnings_of(trial(100), trial(120))
    assert said.format("100/3", "120/3") in warnings_of(seeded(100, seed=3), seeded(120, seed=3))
    assert warnings_of(trial(100, learning_rate=0.1), trial(120, learning_rate=0.2)) == ""
    assert warnings_of(seeded(100, study="a"), seeded(120, study="b")) == ""


def test_names_of_runs_do_not_make_settings() -> None:
    """Each seed would be a setting, and the luckiest would count."""
    runs = [
        trial(
            steps,
            hyperparameters={"seed": k, "job_id": 70 + k, "trainer/version": k},
            name=str(k),
        )
        for k, steps in enumerate((100, 200, 300))
    ]

    assert compare_trials(runs, GOAL).standings[0].best.at("steps") == 200


def test_words_that_differ_in_each_run_may_be_names() -> None:
    def said(*words: str) -> str:
        return warnings_of(
            *(
                trial(100 + k, submission="sgd", hyperparameters={"seed": k, "mark": word})
                for k, word in enumerate(words)
            )
        )

    assert "Each of 3 runs of sgd has another `mark`, so each is a setting, and" in said(*"abc")
    for words in ("aab", "ab", "aaaa"):
        assert "another `mark`" not in said(*words)


def test_what_was_not_run_is_named() -> None:
    trials = [trial(100, submission=s, workload=w) for s, w in (("a", "x"), ("a", "y"), ("b", "x"))]

    assert "Not run: b on y. In profiles and scores that counts as missed." in warnings_of(*trials)
    assert "Not run" not in warnings_of(*trials[:2])


def test_clocks_that_loggers_keep_in_their_own_way_are_named_where_they_count() -> None:
    calls = replace(trial(100, submission="a", seconds=1.0), doubtful_clocks=frozenset({"steps"}))
    logged = replace(
        trial(100, submission="b", seconds=1.0), doubtful_clocks=frozenset({"seconds"})
    )

    by_steps, by_time = (warnings_of(calls, logged, clock=c) for c in ("steps", "seconds"))

    assert "The steps of 1 of 2 runs are calls of wandb.log." in by_steps
    assert "seconds" not in by_steps
    assert "The seconds of 1 of 2 runs are those of the logs, with validations" in by_time
    assert "wandb" not in by_time
    assert "The steps of all runs are calls" in warnings_of(calls, clock="steps")


def test_steps_of_different_batch_sizes_are_named_unless_examples_count() -> None:
    small = trial(200, submission="a", batch_size=32.0)
    large = trial(100, submission="b", batch_size=64.0)
    said = "b has 64 examples in a step, a 32. A larger batch takes fewer steps."

    assert said in warnings_of(small, large)
    assert warnings_of(small, trial(100, submission="b", batch_size=32.0)) == ""
    assert warnings_of(small, trial(100, submission="b")) == ""
    timed = [replace(each, measurements=with_examples(each)) for each in (small, large)]
    assert "in a step" not in warnings_of(*timed, clock="examples")


@pytest.mark.parametrize("clock", ["steps", "seconds", "examples"])
def test_a_budget_in_steps_at_different_batch_sizes_is_named_by_any_clock(clock: str) -> None:
    small, large, alike = (
        replace(each, measurements=replace_clocks(each))
        for each in (
            trial(math.inf, until=2000, submission="sgd", batch_size=32.0),
            trial(500, submission="adam", batch_size=256.0),
            trial(500, submission="lion", batch_size=32.0),
        )
    )
    said = (
        "1,000 steps are different numbers of examples: 256,000 at batch size 256 (adam), 32,000 at"
        " batch size 32 (sgd). A smaller batch may miss the goal, or seem slower, for that alone."
        " Train all with one budget of examples, epochs or device-time, and compare by it, for"
        " example with --by examples and --budget examples=100000."
    )

    assert said in warnings_of(small, large, clock=clock, budget={"steps": 1000})
    for trials, budget in (((small, alike), {"steps": 1000}), ((small, large), {"seconds": 900})):
        assert "numbers of examples" not in warnings_of(*trials, clock=clock, budget=budget)


def test_runs_of_as_many_steps_at_different_batch_sizes_are_named_if_the_smaller_missed() -> None:
    """The length of the runs is their budget. Where all reached the goal it took nothing.

    The run of the larger batch may have ended when it reached the goal.
    """

    def said(steps: float, *, until: float = 1000, size: float = 256.0) -> str:
        small = trial(steps, until=until, submission="sgd", batch_size=32.0)
        large = trial(500, until=1000, submission="adam", batch_size=size)
        return warnings_of(
            *(replace(each, measurements=replace_clocks(each)) for each in (small, large)),
            clock="seconds",
        )

    for length in (400, 1000, 3000):
        steps = f"{length:,} steps are different numbers of examples: {256 * length:,} at batch"
        assert steps in said(math.inf, until=length)
    enough = said(math.inf, size=64.0)  # the larger batch needed no more examples
    for other in (said(900), said(math.inf, until=8000), said(math.inf, size=32.0), enough):
        assert "numbers of examples" not in other


def test_the_smaller_batch_that_missed_need_not_be_the_smallest() -> None:
    sizes = {"sgd": (16.0, 900.0), "adam": (32.0, math.inf), "lion": (256.0, 500.0)}
    trials = [
        trial(steps, until=1000, submission=name, batch_size=size)
        for name, (size, steps) in sizes.items()
    ]

    said = warnings_of(*trials)

    assert "256,000 at batch size 256 (lion), 32,000 at batch size 32 (adam)." in said


@pytest.mark.parametrize("budget", [None, {"steps": 600.0}])
def test_batch_sizes_of_one_submission_that_missed_for_their_examples_are_named(
    budget: dict[str, float] | None,
) -> None:
    trials = [
        trial(steps, until=600, submission="sgd", batch_size=size, name=f"{size}")
        for size, steps in ((32.0, math.inf), (64.0, math.inf), (128.0, 550.0), (256.0, 400.0))
    ]

    assert (
        "600 steps are different numbers of examples: 153,600 at batch size 256 (sgd), 19,200 at"
        " batch size 32 (sgd)." in warnings_of(*trials, budget=budget)
    )


@pytest.mark.parametrize("budget", [{"steps": 1e5}, {"steps": 400.0, "examples": 9000.0}])
def test_a_budget_in_steps_that_ends_no_run_is_no_matter(budget: dict[str, float]) -> None:
    trials = [
        replace(each, measurements=replace_clocks(each))
        for each in (
            trial(250, until=600, submission="sgd", batch_size=32.0),
            trial(30, until=600, submission="adam", batch_size=256.0),
        )
    ]

    assert "numbers of examples" not in warnings_of(*trials, clock="examples", budget=budget)


def test_examples_of_another_unit_are_named_where_they_count() -> None:
    """A batch size that changed is no other unit."""

    def said(factor: float, clock: str = "examples") -> str:
        trials = [
            trial(200, submission=name, batch_size=32.0, name=name) for name in ("sgd", "adam")
        ]
        sgd, adam = (replace(each, measurements=replace_clocks(each)) for each in trials)
        examples = adam.measurements.examples
        assert examples is not None
        steps, values = adam.measurements.steps, adam.measurements.values
        adam = replace(adam, measurements=Measurements(steps, values, factor * examples))
        return warnings_of(sgd, adam, clock=clock)

    assert "adam counts 6.4 examples where its steps times the batch size are 6,400." in said(1e-3)
    for other in (said(20.0), said(1e-3, "steps")):
        assert "times the batch size" not in other


def replace_clocks(of: Trial) -> Measurements:
    """With the examples of the batch size, and a second for each step."""
    measured = of.measurements
    examples = of.batch_size * measured.steps
    return Measurements(measured.steps, measured.values, examples, seconds=measured.steps)


def with_examples(of: Trial, *, epochs: float = math.nan) -> Measurements:
    """With the examples of the batch size, and epochs of so many steps."""
    measured, examples = of.measurements, of.batch_size * of.measurements.steps
    along = None if math.isnan(epochs) else measured.steps / epochs
    return Measurements(measured.steps, measured.values, examples=examples, epochs=along)


def test_epochs_with_different_numbers_of_examples_are_named() -> None:
    """Four micro-batches a step, and the logged batch size is of one of them."""
    whole = trial(400, submission="a", batch_size=64.0)
    quarter = trial(400, submission="b", batch_size=64.0)
    whole = replace(whole, measurements=with_examples(whole, epochs=40))
    accumulated = replace(quarter, measurements=with_examples(quarter, epochs=10))
    alike = replace(quarter, measurements=with_examples(quarter, epochs=40))

    said = warnings_of(whole, accumulated)

    assert f"an epoch has 2,560 examples in {whole.name} and 640 in {quarter.name}." in said
    assert "an epoch has" not in warnings_of(whole, alike)


def test_a_log_that_begins_late_may_be_the_rest_of_another() -> None:
    steps = np.arange(400, 600, 20)
    resumed = Trial("version_1", Measurements(steps, np.linspace(0.5, 0.05, 10)), "b")
    whole = Trial("version_0", Measurements(steps - 380, np.linspace(0.5, 0.05, 10)), "a")

    assert (
        "version_1 was first measured at step 400, and then at least every 20 steps. If it goes on"
        in warnings_of(whole, resumed)
    )
    assert "first measured" not in warnings_of(whole)


def test_batch_sizes_that_were_drawn_are_named_once() -> None:
    drawn = [
        trial(100, batch_size=size, learning_rate=rate, submission=submission)
        for submission in "abcd"
        for size, rate in ((8.0, 1.0), (64.0, 0.1), (512.0, 0.5), (1024.0, 0.2))
    ]

    said = warnings_of(*drawn)

    assert said.count("as if both were drawn") == 1
    assert "The batch sizes of a, b, c and others are no sweep: none has several" in said
    for sizes in ((8.0, 64.0), (math.nan, math.nan), (8.0, math.nan)):
        by_rule = [trial(100, batch_size=size, learning_rate=0.1) for size in sizes]
        assert "drawn" not in warnings_of(*by_rule)


def test_of_many_sweeps_six_are_doubted_aloud() -> None:
    sweeps = [
        trial(steps, batch_size=size, learning_rate=0.1, submission=submission)
        for submission in "abcdefgh"
        for size, steps in ((8.0, 100), (16.0, math.inf))
    ]

    said = warnings_of(*sweeps)

    assert said.count("No run reached the goal at batch size 16.") == 6
    assert "2 further sweeps over batch sizes have such doubts: g, h. `noisescale" in said
