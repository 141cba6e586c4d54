# SPDX-License-Identifier: Apache-2.0
"""A comparison in a terminal, and the answers and tables that all reports of it have."""

import math

import pytest
from courses import sweep, trial

from noisescale.history.metrics import Goal
from noisescale.report.comparison_tables import comparison_tables, headline_of
from noisescale.report.comparison_text import comparison_as_text
from noisescale.time_to_result.comparison import Comparison, compare
from noisescale.time_to_result.measurements import Measurements, Trial

GOAL = Goal.read("loss<=0.1")
LAW = {size: round(100 * (1 + 64 / size), -1) for size in (8, 16, 32, 64, 128, 256, 512)}


def single(*steps: float, seconds: float | None = 6.0) -> Comparison:
    """Runs version_0, version_1 ..., each a submission."""
    names = [f"version_{k}" for k in range(len(steps))]
    return compare(
        [
            trial(each, seconds=seconds, submission=name, name=name)
            for name, each in zip(names, steps, strict=True)
        ],
        GOAL,
    )


def test_the_first_lines_say_who_was_first_when_and_by_how_much() -> None:
    lines = headline_of(single(400, 100, math.inf))

    assert lines == [
        ("loss <= 0.1", "first reached by version_1, after 100 steps, 10.0 minutes"),
        (
            "  version_0",
            "after 400 steps, 40.0 minutes. version_1 is 4.0 times as fast (2.6 to 6.7)",
        ),
        ("  not by", "version_2"),
    ]


def test_a_speed_up_within_the_scatter_of_seeds_may_be_chance() -> None:
    assert "1.3 times as fast (0.86 to 2.1: may be chance)" in headline_of(single(400, 300))[1][1]


def test_what_the_reference_missed_bounds_the_speed_up() -> None:
    lines = dict(headline_of(single(math.inf, 100)))
    table = comparison_tables(single(math.inf, 100))[0]

    assert lines["  not by"] == "version_0"
    assert [line.cells[-1].text for line in table.lines] == [">= 6.60", ""]


def test_submissions_that_were_equally_fast_are_named_together() -> None:
    assert headline_of(single(100, 100, 300))[0][1].startswith(
        "first reached by version_0 and version_1, after 100 steps"
    )


def test_a_goal_that_no_run_reached_says_which_was_nearest() -> None:
    near = Trial("near", Measurements([10, 20], [0.9, 0.2]), "a")

    lines = headline_of(compare([near, trial(math.inf, submission="b")], GOAL))
    empty = headline_of(compare([Trial("none", Measurements([], []))], GOAL))

    assert lines == [
        ("loss <= 0.1", "reached by no run. The nearest was 0.2, by near after 20 steps")
    ]
    assert empty == [("loss <= 0.1", "reached by no run. No run measured the metric")]


def test_one_run_alone_has_one_line() -> None:
    assert (
        comparison_as_text(single(100, seconds=None), details=False)
        == "loss <= 0.1  reached after 100 steps\n"
    )


def test_the_standings_have_all_clocks_that_are_known_and_what_was_set() -> None:
    trials = [
        trial(steps, seconds=6.0, submission=name, learning_rate=rate, batch_size=32.0, name=name)
        for name, rate, steps in (("a", 0.1, 100), ("b", 0.2, math.inf))
    ]

    table = comparison_tables(compare(trials, GOAL))[0]

    assert table.title == "When loss <= 0.1 was reached"
    assert table.headings == [
        *("submission", "reached by", "steps", "minutes", "speed-up"),
        *("batch size", "learning rate"),
    ]
    first, second = ([cell.text for cell in line.cells] for line in table.lines)
    assert first == ["a", "1 of 1", "100", "10.0", "1.00", "32", "0.1"]
    assert second == ["b", "0 of 1", "not reached", "", "0–0.152", "32", "0.2"]
    assert table.lines[1].cells[2].bounds == "best 0.7"
    assert table.notes[0].startswith("Batch sizes are taken as global, over all devices.")


def test_repetitions_have_the_middle_between_the_first_and_the_last() -> None:
    trials = [
        trial(steps, submission="a", name=str(seed), hyperparameters={"seed": seed})
        for seed, steps in enumerate((100, 120, 90))
    ]

    cell = comparison_tables(compare(trials, GOAL))[0].lines[0].cells[2]

    assert (cell.text, cell.bounds) == ("100", "90–120")


def test_several_workloads_have_scores_and_shares() -> None:
    trials = [
        trial(steps, submission=submission, workload=workload)
        for submission, workload, steps in (
            ("a", "x", 100),
            ("a", "y", 400),
            ("b", "x", 200),
            ("b", "y", 100),
        )
    ]
    c = compare(trials, GOAL)

    table = comparison_tables(c)[2]

    assert ("AlgoPerf score", "b 0.8333, a 0.5000") in headline_of(c)
    assert table.title == "All 2 workloads"
    assert [cell.text for cell in table.lines[0].cells] == [
        *("b", "0.8333", "50 %", "50 %", "100 %", "100 %", "1.41")
    ]
    assert comparison_tables(c)[0].title == "When loss <= 0.1 was reached: x"


def test_a_sweep_has_its_batch_sizes_regimes_and_learning_rates() -> None:
    c = compare(sweep(LAW, submission="sgd"), GOAL)

    names = [name for name, _ in headline_of(c)]
    table = comparison_tables(c, every_trial=False)[-1]

    assert names[-3:] == ["sgd", "  perfect scaling", "  largest useful"]
    assert table.title == "Steps to loss <= 0.1 against batch size: sgd"
    first, *_, last = ([cell.text for cell in line.cells] for line in table.lines)
    assert (first[0], first[1], first[3:5]) == ("8", "900", ["0.1", "0.05 to 0.2"])
    assert "perfect" in first[2]
    assert "maximal" in last[2]


def test_a_learning_rate_at_the_edge_is_marked() -> None:
    trials = [each for each in sweep(LAW) if (each.batch_size, each.learning_rate) != (512, 0.2)]

    table = comparison_tables(compare(trials, GOAL), every_trial=False)[-1]

    assert table.lines[-1].cells[3].text == "0.1 (the highest)"
    assert table.lines[0].cells[3].text == "0.1"


def test_every_run_is_listed_if_asked_for_and_diverged_ones_are_marked() -> None:
    diverged = Trial("d", Measurements([10, 20], [0.9, math.nan]), "b")
    c = compare([trial(200, submission="a"), trial(100, submission="a"), diverged], GOAL)

    table = comparison_tables(c)[-1]

    assert table.title == "All 3 runs"
    assert [line.cells[0].text for line in table.lines] == ["a/100", "a/200", "d"]
    assert [line.marks for line in table.lines] == [[], [], ["diverged"]]
    assert "All 3 runs" in comparison_as_text(c)
    assert "All 3 runs" not in comparison_as_text(c, details=False)


@pytest.mark.parametrize("width", [60, 100])
def test_the_text_fits_and_ends_with_the_warnings(width: int) -> None:
    back = Trial("b", Measurements([1, 2, 3], [0.9, 0.1, 0.2]), "b")
    c = compare([back, *sweep(LAW, submission="sgd")], GOAL)

    text = comparison_as_text(c, width)

    assert max(map(len, text.splitlines())) <= width
    assert "Warnings" in text
    assert "later" in text.partition("Warnings")[2]


def test_a_goal_that_only_some_repetitions_reached_was_not_reached_by_no_run() -> None:
    """The slower one of two repetitions stands for both."""
    found = compare([trial(100), trial(math.inf)], GOAL)

    assert headline_of(found) == [
        ("loss <= 0.1", "reached by 1 of 2 runs, but by no run that stands for its submission")
    ]


def test_a_critical_batch_size_that_the_sweep_does_not_show_has_no_number() -> None:
    found = compare([trial(200, batch_size=32.0), trial(120, batch_size=64.0)], GOAL)

    assert headline_of(found)[1] == (
        "Batch sizes",
        "critical batch size not seen in batch sizes from 32 to 64",
    )


def test_a_critical_batch_size_below_or_above_all_that_was_tried_is_not_seen() -> None:
    """Its lower bound is far below the sweep, its upper bound is open."""
    trials = sweep({32: 800, 64: 400, 128: math.inf})

    lines = headline_of(compare(trials, GOAL))

    assert lines[1][1] == "critical batch size not seen in batch sizes from 32 to 128"


def test_of_hundreds_of_submissions_a_few_are_named() -> None:
    fast = [trial(100, submission=f"run_{k}") for k in range(200)]
    slow = [trial(math.inf, submission=f"slow_{k}") for k in range(90)]

    first, missed = headline_of(compare([*fast, *slow], GOAL))

    assert first[1] == ("first reached by run_0, run_1, run_2 and 197 others, after 100 steps")
    assert missed == ("  not by", "slow_0, slow_1, slow_2 and 87 others")
