# SPDX-License-Identifier: Apache-2.0
"""What a comparison says: statements and tables, and its text in a terminal."""

import math
import re
from collections.abc import Iterable

import pytest
from courses import sweep, trial

from noisescale.history.metrics import Goal
from noisescale.lab.compare.compare_trials import compare_trials
from noisescale.lab.compare.comparison import ComparisonRecord
from noisescale.lab.compare.document import document_of
from noisescale.lab.compare.measurements import Measurements, Trial
from noisescale.lab.compare.statements import statements_of
from noisescale.lab.compare.tables import tables_of
from noisescale.report.document import Table
from noisescale.report.text import plain, text_of

GOAL = Goal.read("loss<=0.1")
LAW = {size: round(100 * (1 + 64 / size), -1) for size in (8, 16, 32, 64, 128, 256, 512)}


def single(*steps: float, seconds: float | None = 6.0) -> ComparisonRecord:
    """Runs version_0, version_1 ..., each a submission."""
    names = [f"version_{k}" for k in range(len(steps))]
    return compare_trials(
        [
            trial(each, seconds=seconds, submission=name, name=name)
            for name, each in zip(names, steps, strict=True)
        ],
        GOAL,
    )


def lines_of(c: ComparisonRecord) -> list[tuple[str, str]]:
    """The statements with their parts, which are indented."""
    return [
        (indent + one.label, one.sentence)
        for statement in statements_of(c)
        for indent, one in [("", statement), *(("  ", part) for part in statement.parts)]
    ]


def table_of_sizes(c: ComparisonRecord) -> Table:
    (found,) = (each for each in tables_of(c) if "against batch size" in each.title)
    return found


def as_text(c: ComparisonRecord, width: int = 100, *, details: bool = True) -> str:
    return plain(text_of(document_of(c), details=details, more="add --details"), width)


def test_the_first_lines_say_who_was_first_when_and_by_how_much() -> None:
    lines = lines_of(single(400, 100, math.inf))

    assert lines == [
        ("loss <= 0.1", "first reached by version_1, after 100 steps, 10.0 minutes"),
        (
            "  version_0",
            "after 400 steps, 40.0 minutes. version_1 is 4.0 times as fast (2.6 to 6.7)",
        ),
        ("  not by", "version_2"),
    ]


def test_a_speed_up_within_the_scatter_of_seeds_may_be_chance() -> None:
    assert "1.3 times as fast (0.86 to 2.1: may be chance)" in lines_of(single(400, 300))[1][1]
    assert lines_of(single(100, 400))[1][1].endswith("It is 0.25 times as fast (0.15 to 0.39)")


def test_bounds_that_would_be_written_like_the_value_are_left_out() -> None:
    trials = [
        trial(steps, submission=name, hyperparameters={"seed": seed}, name=f"{name}{seed}")
        for name, steps in (("a", 40_000), ("b", 10_000))
        for seed in range(3)
    ]

    assert lines_of(compare_trials(trials, GOAL))[1][1].endswith(". b is 4.0 times as fast")


def test_what_the_reference_missed_bounds_the_speed_up() -> None:
    lines = dict(lines_of(single(math.inf, 100)))
    table = tables_of(single(math.inf, 100))[0]

    assert lines["  not by"] == "version_0"
    assert [line.cells[-1].text for line in table.lines] == [">= 6.60", ""]


def test_submissions_that_were_equally_fast_are_named_together() -> None:
    assert lines_of(single(100, 100, 300))[0][1].startswith(
        "first reached by version_0 and version_1, after 100 steps"
    )


def test_a_goal_that_no_run_reached_says_which_was_nearest() -> None:
    near = Trial("near", Measurements([10, 20], [0.9, 0.2]), "a")

    lines = lines_of(compare_trials([near, trial(math.inf, submission="b")], GOAL))
    empty = lines_of(compare_trials([Trial("none", Measurements([10], [math.nan]))], GOAL))

    assert lines == [
        ("loss <= 0.1", "reached by no run. The nearest was 0.2, by near after 20 steps")
    ]
    assert empty == [("loss <= 0.1", "reached by no run. No run measured the metric")]


def test_one_run_alone_has_one_line() -> None:
    assert as_text(single(100, seconds=None), details=False).splitlines()[:3] == [
        "version_0 reached loss <= 0.1",
        "",
        "loss <= 0.1  reached after 100 steps",
    ]


def test_the_standings_have_all_clocks_that_are_known_and_what_was_set() -> None:
    trials = [
        trial(steps, seconds=6.0, submission=name, learning_rate=rate, batch_size=32.0, name=name)
        for name, rate, steps in (("a", 0.1, 100), ("b", 0.2, math.inf))
    ]

    table = tables_of(compare_trials(trials, GOAL))[0]

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

    cell = tables_of(compare_trials(trials, GOAL))[0].lines[0].cells[2]

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
    c = compare_trials(trials, GOAL)

    table = tables_of(c)[2]

    assert ("AlgoPerf score by steps", "b 0.8333, a 0.5000") in lines_of(c)
    assert table.title == "All 2 workloads"
    assert [cell.text for cell in table.lines[0].cells] == [
        *("b", "0.8333", "50 %", "50 %", "100 %", "100 %", "1.41")
    ]
    assert tables_of(c)[0].title == "When loss <= 0.1 was reached: x"


def test_of_many_sweeps_the_first_six_have_answers() -> None:
    trials = [
        trial(steps, submission=submission, batch_size=size, learning_rate=0.1)
        for submission in "abcdefgh"
        for size, steps in ((8.0, 100), (16.0, 60), (32.0, 40))
    ]
    c = compare_trials(trials, GOAL)

    names = [name for name, _ in lines_of(c)]

    assert [n for n in names[names.index("a") :] if not n.startswith(" ")] == [
        *"abcdef",
        "Batch sizes",
    ]
    assert lines_of(c)[-1] == ("Batch sizes", "2 further sweeps: see the tables")


def test_of_many_sweeps_without_regimes_one_answer_says_so() -> None:
    trials = [
        trial(steps, submission=submission, batch_size=size, learning_rate=0.1)
        for submission in "abcdefgh"
        for size, steps in ((8.0, 100), (16.0, math.inf))
    ]

    answers = lines_of(compare_trials(trials, GOAL))

    assert answers[-1] == ("Batch sizes", "none of 8 sweeps shows its regimes: see the tables")


def test_a_sweep_has_its_batch_sizes_regimes_and_learning_rates() -> None:
    c = compare_trials(sweep(LAW, submission="sgd"), GOAL)

    names = [name for name, _ in lines_of(c)]
    table = table_of_sizes(c)

    assert names[-3:] == ["sgd", "  perfect scaling", "  largest useful"]
    assert table.title == "Steps to loss <= 0.1 against batch size: sgd"
    first, *_, last = ([cell.text for cell in line.cells] for line in table.lines)
    assert (first[0], first[1], first[3:5]) == ("8", "900", ["0.1", "0.05 to 0.2"])
    assert "perfect" in first[2]
    assert "maximal" in last[2]


def test_a_learning_rate_at_the_edge_is_marked() -> None:
    trials = [each for each in sweep(LAW) if (each.batch_size, each.learning_rate) != (512, 0.2)]

    table = table_of_sizes(compare_trials(trials, GOAL))

    assert table.lines[-1].cells[3].text == "0.1 (the highest)"
    assert table.lines[0].cells[3].text == "0.1"


def test_every_run_is_listed_if_asked_for_and_diverged_ones_are_marked() -> None:
    diverged = Trial("d", Measurements([10, 20], [0.9, math.nan]), "b")
    c = compare_trials([trial(200, submission="a"), trial(100, submission="a"), diverged], GOAL)

    table = tables_of(c)[-1]

    assert table.title == "All 3 runs"
    assert [line.cells[0].text for line in table.lines] == ["a/100", "a/200", "d"]
    assert [line.marks for line in table.lines] == [[], [], ["diverged"]]
    assert "\nAll 3 runs\n" in as_text(c)
    assert "\nAll 3 runs\n" not in as_text(c, details=False)


@pytest.mark.parametrize("width", [60, 100])
def test_the_text_fits_and_ends_with_the_warnings(width: int) -> None:
    back = Trial("b", Measurements([1, 2, 3], [0.9, 0.1, 0.2]), "b")
    c = compare_trials([back, *sweep(LAW, submission="sgd")], GOAL)

    text = as_text(c, width)

    assert max(map(len, text.splitlines())) <= width
    assert "Warnings" in text
    assert "later" in text.partition("Warnings")[2]


def test_a_goal_that_only_some_repetitions_reached_was_not_reached_by_no_run() -> None:
    """The slower one of two repetitions stands for both."""
    found = compare_trials([trial(100), trial(math.inf)], GOAL)

    assert lines_of(found) == [
        ("loss <= 0.1", "reached by 1 of 2 runs, but by no run that stands for its submission")
    ]


def test_a_critical_batch_size_that_the_sweep_does_not_show_has_no_number() -> None:
    found = compare_trials([trial(200, batch_size=32.0), trial(120, batch_size=64.0)], GOAL)

    assert lines_of(found)[1] == (
        "Batch sizes",
        "critical batch size not seen in batch sizes from 32 to 64",
    )


def test_a_critical_batch_size_below_or_above_all_that_was_tried_is_not_seen() -> None:
    """Its lower bound is far below the sweep, its upper bound is open."""
    trials = sweep({32: 800, 64: 400, 128: math.inf})

    lines = lines_of(compare_trials(trials, GOAL))

    assert lines[1][1] == "critical batch size not seen in batch sizes from 32 to 128"


def test_of_hundreds_of_submissions_a_few_are_named() -> None:
    fast = [trial(100, submission=f"run_{k}") for k in range(200)]
    slow = [trial(math.inf, submission=f"slow_{k}") for k in range(90)]

    first, missed = lines_of(compare_trials([*fast, *slow], GOAL))

    assert first[1] == ("first reached by run_0, run_1, run_2 and 197 others, after 100 steps")
    assert missed == ("  not by", "slow_0, slow_1, slow_2 and 87 others")


def column(table: Table, heading: str) -> list[str]:
    where = table.headings.index(heading)
    return [line.cells[where].text for line in table.lines]


def test_a_note_says_that_the_fastest_setting_counts_where_several_were_tried() -> None:
    trials = [trial(steps, learning_rate=rate) for rate, steps in ((0.1, 100), (0.2, 200))]

    assert tables_of(compare_trials(trials, GOAL))[0].notes == [
        "The numbers of a submission are those of its fastest setting of hyperparameters, and of"
        " the middle one of its repetitions."
    ]


def test_the_three_that_follow_the_first_are_named_in_the_answers() -> None:
    lines = lines_of(single(500, 100, 200, 300, 400, math.inf))

    assert [name for name, _ in lines] == [
        *("loss <= 0.1", "  version_2", "  version_3", "  version_4", "  not by"),
    ]
    assert lines[1][1] == "after 200 steps, 20.0 minutes"  # neither is the reference


def test_the_first_of_several_submissions_is_named_though_no_other_reached_the_goal() -> None:
    assert lines_of(single(100, math.inf))[0][1].startswith("first reached by version_0, after")


def test_submissions_that_differ_only_on_the_clock_that_counts_are_not_tied() -> None:
    trials = [trial(100, seconds=each, submission=name) for name, each in (("a", 1.0), ("b", 2.0))]

    by_time, by_steps = (
        lines_of(compare_trials(trials, GOAL, clock=x)) for x in ("seconds", "steps")
    )

    assert by_time[0][1].startswith("first reached by a, after 100 steps")
    assert by_steps[0][1].startswith("first reached by a and b, after 100 steps")


def test_all_clocks_are_in_the_answers_and_examples_stand_for_epochs_in_the_tables() -> None:
    measured = Measurements([1, 2], [0.9, 0.1], examples=[8, 16], epochs=[1, 2], seconds=[50, 120])
    trials = [Trial(name, measured, name) for name in "ab"]

    lines = lines_of(compare_trials(trials, GOAL))
    tables = tables_of(compare_trials(trials, GOAL))

    assert lines[0][1].endswith("after 2 steps, 16 examples, 2 epochs, 2.00 minutes")
    assert tables[0].headings[2:5] == ["steps", "examples", "minutes"]
    assert column(tables[0], "minutes") == ["2.00", "2.00"]


def test_the_nearest_to_a_goal_that_is_to_rise_is_the_highest() -> None:
    trials = [
        Trial(str(best), Measurements([10], [best]), str(best)) for best in (0.2, 0.7, math.nan)
    ]

    ((_, text),) = lines_of(compare_trials(trials, Goal.read("accuracy>0.9")))

    assert text == "reached by no run. The nearest was 0.7, by 0.7 after 10 steps"


def test_there_is_no_speed_up_over_a_run_that_was_at_the_goal_at_once() -> None:
    at_once = Trial("a", Measurements([0, 10], [0.1, 0.1]), "a")

    for reference in "ab":
        c = compare_trials([at_once, trial(20, submission="b")], GOAL, reference=reference)
        assert lines_of(c)[1] == ("  b", "after 20 steps")


def test_five_scores_are_in_the_answers_and_all_are_in_the_table() -> None:
    c = compare_trials(
        [
            trial(100 * (k + 1), submission=f"s{k}", workload=workload)
            for workload in "xy"
            for k in reversed(range(6))
        ],
        GOAL,
    )

    score = dict(lines_of(c))["AlgoPerf score by steps"]
    table = tables_of(c)[2]

    assert score == "s0 1.0000, s1 0.6667, s2 0.3333, s3 0.0000, s4 0.0000"
    assert column(table, "submission") == ["s0", "s1", "s2", "s3", "s4", "s5"]
    assert column(table, "within 2 x") == ["100 %", "100 %", *4 * ["0 %"]]
    assert column(table, "speed-up") == ["6.00", "3.00", "2.00", "1.50", "1.20", "1.00"]


def test_a_share_is_of_the_ratio_that_its_heading_names_and_a_missed_goal_has_no_speed_up() -> None:
    times = {"a": (100, 100), "b": (150, 160), "c": (100, math.inf)}
    c = compare_trials(
        [
            trial(steps, submission=name, workload=workload)
            for name, of in times.items()
            for workload, steps in zip("xy", of, strict=True)
        ],
        GOAL,
    )

    table = tables_of(c)[2]

    assert table.headings[2:6] == ["the fastest", "within 1.5 x", "within 2 x", "within 4 x"]
    assert column(table, "within 1.5 x") == ["100 %", "50 %", "50 %"]
    assert column(table, "speed-up") == ["1.00", "0.645", ""]


def border_lines(*sizes: int) -> list[str]:
    """What is said of perfect scaling and of the largest useful batch size; B_crit is 64."""
    steps = {size: 10 * round(1000 * (1 + (64 / size) ** 3) ** (1 / 3)) for size in sizes}
    return [
        text for name, text in lines_of(compare_trials(sweep(steps), GOAL)) if name.startswith("  ")
    ]


@pytest.mark.parametrize(
    ("sizes", "perfect", "useful"),
    [
        (
            (*range(1, 24), 32, 45, 64, 90, 128, *range(256, 4096, 256)),
            "up to N (N to N)",
            "about N (N to N)",
        ),
        (range(1, 24), "at least N", "at least N"),
        (range(256, 4096, 256), "at most N", "at most N"),
        ((16, 32, 64), "not seen in batch sizes from N to N", "at least N"),
        ((16, 32, 64, 128, 256, 512, 1024), "up to N (at most N)", "about N (N to N)"),
    ],
)
def test_borders_are_said_as_far_as_the_sweep_shows_them(
    sizes: Iterable[int], perfect: str, useful: str
) -> None:
    if not useful.startswith("at least"):
        useful += ". Larger batches save few more steps"

    lines = border_lines(*sizes)

    assert [re.sub(r"[\d.,]*\d", "N", line) for line in lines] == [perfect, useful]


def test_a_sweep_of_which_too_few_batch_sizes_count_has_no_regimes() -> None:
    trials = [trial(100, batch_size=8.0), trial(math.inf, batch_size=16.0)]

    c = compare_trials(trials, GOAL)

    assert lines_of(c)[-1] == (
        "Batch sizes",
        "the goal was reached at fewer than two batch sizes that count: no regimes",
    )
    assert column(table_of_sizes(c), "regime") == ["", ""]


def test_one_submission_has_no_speed_up_and_is_counted_by_all_its_trials() -> None:
    trials = [
        trial(steps, learning_rate=rate, hyperparameters={"seed": seed}, feasible=rate < 1)
        for rate, of in ((0.0123, (100, 110)), (0.2, (300,)), (1.0, (math.inf,)))
        for seed, steps in enumerate(of)
    ]

    table, every = tables_of(compare_trials(trials, GOAL))

    assert table.headings == ["submission", "reached by", "diverged", "steps", "learning rate"]
    cells = table.lines[0].cells
    assert [cell.text for cell in cells] == ["run/110", "3 of 4", "1", "110", "0.0123"]
    assert cells[3].bounds == "100–110"
    (note,) = table.notes
    assert note.startswith("The numbers of a submission are those of its fastest setting")
    assert [line.marks for line in every.lines] == [[], [], [], ["diverged"]]


def test_a_run_that_missed_the_goal_is_not_marked_as_diverged() -> None:
    trials = [
        trial(100, submission="a"),
        trial(200, submission="a"),
        trial(math.inf, submission="b"),
    ]
    c = compare_trials(trials, GOAL)

    table, every = tables_of(c)

    assert "diverged" not in table.headings
    assert [line.marks for line in every.lines] == [[], [], []]


@pytest.mark.parametrize(("clock", "said"), [("steps", "by steps."), ("seconds", "by time.")])
def test_a_note_below_the_last_standings_says_what_speed_ups_are_over(
    clock: str, said: str
) -> None:
    trials = [
        trial(100, seconds=1.0, submission=name, workload=workload)
        for name in "ab"
        for workload in "xy"
    ]

    first, last, *_ = tables_of(compare_trials(trials, GOAL, clock=clock))

    assert first.notes == []
    (note,) = last.notes
    assert note.startswith(f"Speed-up: over a, {said}")


def test_repetitions_that_missed_the_goal_are_not_in_the_span_and_equal_ones_have_none() -> None:
    trials = [
        trial(steps, submission=name, hyperparameters={"seed": seed}, name=f"{name}{seed}")
        for name, of in (("a", (100, 120, math.inf)), ("b", (90, 90)))
        for seed, steps in enumerate(of)
    ]

    table = tables_of(compare_trials(trials, GOAL))[0]

    assert [line.cells[2].text for line in table.lines] == ["90", "120"]
    assert [line.cells[2].bounds for line in table.lines] == ["", "100–120"]


def test_a_clock_that_only_one_submission_has_is_empty_for_the_other() -> None:
    c = compare_trials([trial(100, seconds=6.0, submission="a"), trial(200, submission="b")], GOAL)

    table = tables_of(c)[0]

    assert column(table, "minutes") == ["10.0", ""]


def test_runs_are_listed_by_the_clock_that_counts() -> None:
    trials = [
        trial(steps, seconds=each, submission="a", name=name)
        for name, steps, each in (("late", 100, 9.0), ("soon", 200, 1.0))
    ]

    assert column(tables_of(compare_trials(trials, GOAL))[-1], "run") == ["soon", "late"]


def test_a_table_of_batch_sizes_has_repetitions_diverged_runs_and_no_rate_of_missed_goals() -> None:
    trials = [
        trial(
            steps,
            batch_size=size,
            learning_rate=rate,
            hyperparameters={"seed": seed},
            feasible=rate < 1,
        )
        for size, rate, of in (
            (8.0, 0.1, (400, 440, 420)),
            (8.0, 1.0, (math.inf,)),
            (64.0, 0.1, (100, 120, 110)),
            (128.0, 0.1, (math.inf,)),
        )
        for seed, steps in enumerate(of)
    ]

    table = table_of_sizes(compare_trials(trials, GOAL))

    assert column(table, "steps") == ["420", "110", "not reached"]
    assert [line.cells[1].bounds for line in table.lines] == ["400–440", "100–120", ""]
    assert column(table, "best learning rate") == ["0.1 (the lowest)", "0.1 (the only one)", ""]
    assert column(table, "tried") == ["0.1 to 1", "", ""]
    assert column(table, "reached by") == ["3 of 4", "3 of 3", "0 of 1"]
    assert column(table, "diverged") == ["1", "0", "0"]


def test_how_to_get_the_tables_that_are_left_out_is_said_where_there_are_any() -> None:
    runs = compare_trials([trial(100), trial(200)], GOAL)
    sizes = compare_trials([trial(100, batch_size=8.0), trial(200, batch_size=4.0)], GOAL)
    several = compare_trials(
        [
            trial(steps, submission=name, batch_size=size)
            for name in "abc"
            for size, steps in ((8.0, 100), (4.0, 200))
        ],
        GOAL,
    )

    def last_line(c: ComparisonRecord, *, details: bool = False) -> str:
        return as_text(c, details=details).splitlines()[-1]

    assert last_line(runs) == "More: 1 table: add --details"
    assert last_line(sizes) == "More: 2 tables: add --details"
    assert last_line(several) == "More: 4 tables: add --details"
    assert "More" not in last_line(runs, details=True)
    assert "More" not in last_line(single(100, 200))


def test_text_is_100_characters_wide_unless_asked_for() -> None:
    c = compare_trials([Trial("b", Measurements([1, 2, 3], [0.9, 0.1, 0.2]), "b")], GOAL)

    assert 80 < max(map(len, as_text(c).splitlines())) <= 100
    assert 100 < max(map(len, as_text(c, 200).splitlines())) <= 200


def test_variants_are_no_workloads_of_the_scores() -> None:
    trials = [
        trial(100, submission=name, workload=workload)
        for name in "ab"
        for workload in ("x", "x_wide", "x_deep", "y")
    ]

    c = compare_trials(trials, GOAL, variants={"x_wide": "x", "x_deep": "x"})

    assert tables_of(c)[4].title == "All 2 workloads, checked by 2 variants"


def test_a_lead_whose_bounds_include_1_may_be_chance_and_both_are_trained_again() -> None:
    close, clear = (document_of(single(*steps)) for steps in ((400, 300), (400, 100)))

    assert close.headline == "version_1 reached loss <= 0.1 first, which may be chance"
    (step,) = close.next
    assert step.startswith("Next: train version_1 and version_0 again with other seeds")
    assert clear.headline == "version_1 reached loss <= 0.1 first"
    assert clear.next == []


def test_a_goal_that_no_run_reached_leads_to_one_that_the_best_run_reached() -> None:
    c = single(math.inf, math.inf)
    best = min(o.best for s in c.standings for o in s.outcomes)

    (step,) = document_of(c).next

    command = step.splitlines()[1].strip()
    assert command == f"noisescale compare RUNS --goal 'loss<={best!r}'"
    again = compare_trials(
        [o.trial for s in c.standings for o in s.outcomes], Goal.read(f"loss<={best!r}")
    )
    assert again.reached


def test_best_learning_rates_at_an_edge_are_to_be_followed() -> None:
    rates = {0.1: 400, 0.2: 300, 0.4: 200}
    trials = [
        trial(steps * 64 / size, batch_size=size, learning_rate=rate, name=f"{size}-{rate}")
        for size in (64.0, 128.0)
        for rate, steps in rates.items()
    ]

    (step, *_) = document_of(compare_trials(trials, GOAL)).next

    assert step == (
        "Next: try higher learning rates for the sweep: at batch sizes 64 and 128 the highest one"
        " was the best."
    )


def test_words_in_which_runs_differ_are_columns_and_name_the_best() -> None:
    decay = {"cosine": 0.1, "linear": "none"}
    trials = [
        trial(
            at * slower,
            batch_size=size,
            learning_rate=rate,
            submission="a",
            optimizer="adam",
            hyperparameters={
                "schedule": schedule,
                "precision": "16-mixed",
                "decay": decay[schedule],
            },
            name=f"{size}/{rate}/{schedule}",
        )
        for size, at in ((8.0, 400), (16.0, 200))
        for rate, factor in ((0.1, 2), (0.2, 1), (0.4, 2))
        for schedule, slower in (("cosine", factor), ("linear", 1.5 * factor))
    ]
    c = compare_trials(trials, GOAL)

    standings, sizes, runs = tables_of(c)

    assert column(standings, "schedule") == ["cosine"]
    assert column(sizes, "best schedule") == ["cosine", "cosine"]
    assert column(runs, "schedule").count("linear") == 6
    assert column(runs, "decay").count("0.1") == column(runs, "decay").count("none") == 6
    for table in (standings, sizes, runs):
        assert not {"precision", "optimizer"} & {*table.headings}


def test_optimizers_of_one_submission_are_a_column_unless_they_name_it() -> None:
    def headings(*submissions: str) -> list[str]:
        trials = [
            trial(100 + k, submission=name, optimizer=optimizer, name=optimizer)
            for k, (name, optimizer) in enumerate(zip(submissions, ("sgd", "adam"), strict=True))
        ]
        return tables_of(compare_trials(trials, GOAL))[0].headings

    assert "optimizer" in headings("ours", "ours")
    assert "optimizer" in headings("ours", "theirs")
    assert "optimizer" not in headings("sgd", "adam")
