# SPDX-License-Identifier: Apache-2.0
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from courses import compared, on_workloads, seeds, trial

from noisescale.lab.compare.measurements import Measurements, Trial

UNLIKE = "missed the goal, and batch size"


def warnings_of(
    *trials: Trial, clock: str | None = None, budget: Mapping[str, float] | None = None
) -> str:
    return " ".join(compared(trials, clock=clock, budget=budget).warnings)


def clocked(
    steps: float, submission: str, size: float, *, epoch: float = math.nan, **where: Any
) -> Trial:
    """A trial with the examples of its batch size, a second a step, and epochs of so many steps."""
    one = trial(steps, submission=submission, batch_size=size, **where)
    at = one.measurements.steps
    epochs = None if math.isnan(epoch) else at / epoch
    measured = Measurements(at, one.measurements.values, size * at, epochs, at)
    return replace(one, measurements=measured)


def test_runs_that_nothing_tells_apart_are_named() -> None:
    """They may have had different learning rates that nobody logged."""
    same = {"hyperparameters": {"seed": 3}}

    for where in ({}, same):
        said = warnings_of(trial(100, **where), trial(120, **where))
        assert said.startswith("2 runs have the same hyperparameters")
        assert "example run/100 and run/120." in said
    assert warnings_of(*seeds((100, 120))) == ""
    assert warnings_of(trial(100, learning_rate=0.1), trial(120, learning_rate=0.2)) == ""
    assert warnings_of(trial(100, study="a", **same), trial(120, study="b", **same)) == ""


def test_a_refused_noise_scale_has_its_reason_once() -> None:
    trials = seeds((100, 110, 120))
    reasons = "BatchNorm. Accumulate.", "BatchNorm. Accumulate.", ""

    said = warnings_of(
        *(replace(t, unmeasured=why) for t, why in zip(trials, reasons, strict=True))
    )

    one = f"The noise scale of {trials[0].name} and 1 other run is not known."
    assert said == f"{one} BatchNorm. Accumulate."


def test_what_was_not_run_is_named() -> None:
    trials = on_workloads({"a": {"x": 100, "y": 100}, "b": {"x": 100}})

    assert "Not run: b on y." in warnings_of(*trials)
    assert "Not run" not in warnings_of(*trials[:2])


def test_clocks_that_loggers_keep_in_their_own_way_are_named_where_they_count() -> None:
    calls, logged = (
        replace(trial(100, submission=name, seconds=1.0), doubtful_clocks=frozenset({clock}))
        for name, clock in (("a", "steps"), ("b", "seconds"))
    )

    by_steps, by_time = (warnings_of(calls, logged, clock=c) for c in ("steps", "seconds"))

    assert "The steps of 1 of 2 runs are calls of wandb.log." in by_steps
    assert "seconds" not in by_steps
    assert "The seconds of 1 of 2 runs are those of the logs" in by_time
    assert "wandb" not in by_time
    assert "The steps of all runs are calls" in warnings_of(calls, clock="steps")


def test_steps_of_different_batch_sizes_are_named_unless_examples_count() -> None:
    small, large = clocked(200, "a", 32.0), clocked(100, "b", 64.0)

    assert "b has 64 examples in a step, a 32." in warnings_of(small, large, clock="steps")
    for other in (clocked(100, "b", 32.0), trial(100, submission="b")):
        assert warnings_of(small, other, clock="steps") == ""
    assert "in a step" not in warnings_of(small, large, clock="examples")


@pytest.mark.parametrize("clock", ["steps", "seconds", "examples"])
def test_a_budget_in_steps_at_different_batch_sizes_is_named_by_any_clock(clock: str) -> None:
    small = clocked(math.inf, "sgd", 32.0, until=2000)
    large, alike = clocked(500, "adam", 256.0), clocked(500, "lion", 32.0)

    said = warnings_of(small, large, clock=clock, budget={"steps": 1000})

    assert f"With 32,000 examples batch size 32 (sgd) {UNLIKE} 256 (adam) needed 128,000." in said
    for trials, budget in (((small, alike), {"steps": 1000}), ((small, large), {"seconds": 900})):
        assert UNLIKE not in warnings_of(*trials, clock=clock, budget=budget)


@pytest.mark.parametrize(
    ("steps", "until", "size", "named"),
    [
        *((math.inf, length, 256.0, True) for length in (400, 1000, 3000)),
        (900, 1000, 256.0, False),
        (math.inf, 8000, 256.0, False),
        (math.inf, 1000, 32.0, False),
        (math.inf, 1000, 64.0, False),  # the larger batch needed no more examples
    ],
)
def test_runs_of_as_many_steps_at_different_batch_sizes_are_named_if_the_smaller_missed(
    steps: float, until: int, size: float, named: bool
) -> None:
    """The length of the runs is their budget. Where all reached the goal it took nothing.

    The run of the larger batch may have ended when it reached the goal.
    """
    small = clocked(steps, "sgd", 32.0, until=until)

    said = warnings_of(small, clocked(500, "adam", size, until=1000), clock="seconds")

    assert (f"With {32 * until:,} examples" in said) is named
    assert (UNLIKE in said) is named


def test_the_smaller_batch_that_missed_need_not_be_the_smallest() -> None:
    trials = [
        *(clocked(900, "sgd", 16.0, until=1000), clocked(500, "lion", 256.0, until=1000)),
        clocked(math.inf, "adam", 32.0, until=1000),
    ]

    said = warnings_of(*trials)

    assert f"With 32,000 examples batch size 32 (adam) {UNLIKE} 256 (lion)" in said


@pytest.mark.parametrize("budget", [None, {"steps": 600.0}])
def test_sizes_of_one_submission_that_missed_for_examples_are_named(budget: Any) -> None:
    trials = [
        trial(steps, until=600, submission="sgd", batch_size=size, name=f"{size}")
        for size, steps in ((32.0, math.inf), (64.0, math.inf), (128.0, 550.0), (256.0, 400.0))
    ]

    said = warnings_of(*trials, budget=budget)

    assert f"With 19,200 examples batch size 32 (sgd) {UNLIKE} 256 (sgd)" in said


@pytest.mark.parametrize("budget", [{"steps": 1e5}, {"steps": 400.0, "examples": 9000.0}])
def test_a_budget_in_steps_that_ends_no_run_is_no_matter(budget: dict[str, float]) -> None:
    trials = (clocked(250, "sgd", 32.0, until=600), clocked(30, "adam", 256.0, until=600))

    assert UNLIKE not in warnings_of(*trials, clock="examples", budget=budget)


def test_epochs_with_different_numbers_of_examples_are_named() -> None:
    """Four micro-batches a step, and the logged batch size is of one of them."""
    whole, accumulated, alike = (
        clocked(400, name, 64.0, epoch=epoch) for name, epoch in (("a", 40), ("b", 10), ("b", 40))
    )

    said = warnings_of(whole, accumulated)

    assert f"an epoch has 2,560 examples in {whole.name} and 640 in {alike.name}." in said
    assert "an epoch has" not in warnings_of(whole, alike)


def test_batch_sizes_that_were_drawn_are_named() -> None:
    drawn = [
        trial(100, batch_size=size, learning_rate=rate, submission=submission)
        for submission in "ab"
        for size, rate in ((8.0, 1.0), (64.0, 0.1), (512.0, 0.5), (1024.0, 0.2))
    ]
    leaves_out = "At 4 of 4 batch sizes at most one learning rate is known"

    said = warnings_of(*drawn)

    assert f"a: {leaves_out}" in said
    assert f"b: {leaves_out}" in said
    for sizes in ((8.0, 64.0), (math.nan, math.nan), (8.0, math.nan)):
        by_rule = [trial(100, batch_size=size, learning_rate=0.1) for size in sizes]
        assert "at most one" not in warnings_of(*by_rule)


def test_of_many_sweeps_six_are_doubted_aloud() -> None:
    sweeps = [
        each
        for name in "abcdefgh"
        for size, steps in ((8.0, 100), (16.0, math.inf))
        for each in seeds([steps], batch_size=size, learning_rate=0.1, submission=name)
    ]

    said = warnings_of(*sweeps)

    assert said.count("at batch size 16.") == 6
    assert "2 further sweeps" in said
