# SPDX-License-Identifier: Apache-2.0
"""What a comparison says: statements and tables, and its text in a terminal."""

import math
import re
from collections.abc import Iterable
from typing import Any

import pytest
from courses import GOAL, SIZES, compared, law, on_workloads, rivals, seeds, sweep, trial

from noisescale.history.metrics import Goal
from noisescale.lab.compare.compare import compare
from noisescale.lab.compare.comparison import Comparison
from noisescale.lab.compare.document import document_of
from noisescale.lab.compare.measurements import Measurements, Trial
from noisescale.lab.compare.statements import statements_of
from noisescale.lab.compare.tables import tables_of
from noisescale.report.document import Table
from noisescale.report.text import plain, text_of

LAW = law(64, sizes=SIZES[:7])
NOT_SEEN = "critical batch size not seen in batch sizes from"


def single(*steps: float, seconds: float | None = 6.0) -> Comparison:
    """Runs v0, v1 ..., each a submission."""
    return compared(
        trial(at, seconds=seconds, submission=f"v{k}", name=f"v{k}") for k, at in enumerate(steps)
    )


def sized(*names: str, steps: dict[float, float], **where: Any) -> list[Trial]:
    """Of each submission a run at each batch size."""
    return [
        trial(at, submission=name, batch_size=size, **where)
        for name in names
        for size, at in steps.items()
    ]


def lines_of(c: Comparison) -> list[tuple[str, str]]:
    """The statements with their parts, which are indented."""
    return [
        (indent + one.label, one.sentence)
        for statement in statements_of(c)
        for indent, one in [("", statement), *(("  ", part) for part in statement.parts)]
    ]


def table_of_sizes(c: Comparison) -> Table:
    (found,) = (each for each in tables_of(c) if "against batch size" in each.title)
    return found


def column(table: Table, heading: str) -> list[str]:
    where = table.headings.index(heading)
    return [line.cells[where].text for line in table.lines]


def as_text(c: Comparison, width: int = 100, *, details: bool = True) -> str:
    return plain(text_of(document_of(c), details=details, more="add --details"), width)


@pytest.mark.parametrize(
    ("steps", "lines"),
    [
        (
            (400, 100, math.inf),
            [
                "loss <= 0.1: first reached by v1, after 100 steps, 10.0 minutes",
                "  v0: after 400 steps, 40.0 minutes. v1 is 4.0 times as fast (2.6 to 6.7)",
                "  not by: v2",
            ],
        ),
        # Within the scatter of seeds.
        ((400, 300), ["by v1, after", "v1 is 1.3 times as fast (0.86 to 2.1: may be chance)"]),
        ((100, 400), ["by v0, after", "It is 0.25 times as fast (0.15 to 0.39)"]),
        ((100, 100, 300), ["first reached by v0 and v1, after 100", "v2: "]),
        ((100, math.inf), ["first reached by v0, after", "not by: v1"]),
        # Three follow, and as neither is the reference, there is no speed-up.
        (
            (500, 100, 200, 300, 400, math.inf),
            ["by v1", "  v2: after 200 steps, 20.0 minutes|", "  v3: ", "  v4: ", "  not by: v5"],
        ),
    ],
)
def test_the_first_lines_say_who_was_first_and_when(steps: list[float], lines: list[str]) -> None:
    for (name, text), expected in zip(lines_of(single(*steps)), lines, strict=True):
        assert expected in f"{name}: {text}|"


def test_of_hundreds_of_submissions_a_few_are_named() -> None:
    times = {f"fast{k}": 100 for k in range(200)} | {f"slow{k}": math.inf for k in range(90)}

    first, missed = lines_of(compared(rivals(times)))

    assert "by fast0, fast1, fast2 and 197 others, after" in first[1]
    assert missed == ("  not by", "slow0, slow1, slow2 and 87 others")


def test_bounds_like_the_value_are_left_out_and_a_missed_reference_bounds_the_speed_up() -> None:
    alike = compared(seeds(3 * [40_000], submission="a") + seeds(3 * [10_000], submission="b"))
    missed = single(math.inf, 100)

    assert lines_of(alike)[1][1].endswith(". b is 4.0 times as fast")
    assert dict(lines_of(missed))["  not by"] == "v0"
    assert column(tables_of(missed)[0], "speed-up") == [">= 6.60", ""]


@pytest.mark.parametrize(
    ("trials", "goal", "nearest"),
    [
        (
            [Trial("near", Measurements([10, 20], [0.9, 0.2]), "a"), *rivals({"b": math.inf})],
            GOAL,
            "0.2, by near after 20 steps",
        ),
        (
            [Trial(str(best), Measurements([10], [best])) for best in (0.2, 0.7, math.nan)],
            Goal.read("accuracy>0.9"),
            "0.7, by 0.7 after 10 steps",
        ),
        ([Trial("none", Measurements([10], [math.nan]))], GOAL, "No run measured"),
    ],
    ids=["to fall", "to rise", "unknown"],
)
def test_the_run_nearest_to_a_goal_is_named(trials: list[Trial], goal: Goal, nearest: str) -> None:
    ((name, text),) = lines_of(compare(trials, goal))

    assert name == str(goal)
    assert "by no run" in text
    assert nearest in text


def test_the_standings_have_all_clocks_that_are_known_and_what_was_set() -> None:
    trials = [
        trial(steps, seconds=6.0, submission=name, learning_rate=rate, batch_size=32.0, name=name)
        for name, rate, steps in (("a", 0.1, 100), ("b", 0.2, math.inf))
    ]

    table = tables_of(compared(trials))[0]

    assert table.title == "When loss <= 0.1 was reached"
    assert table.headings == [
        *("submission", "reached by", "steps", "minutes", "speed-up"),
        *("batch size", "learning rate"),
    ]
    first, second = ([cell.text for cell in line.cells] for line in table.lines)
    assert first == ["a", "1 of 1", "100", "10.0", "1.00", "32", "0.1"]
    assert second == ["b", "0 of 1", "not reached", "", "0–0.152", "32", "0.2"]
    assert table.lines[1].cells[2].bounds == "best 0.7"
    assert table.notes[0].startswith("Batch sizes")


def test_repetitions_have_the_middle_between_the_first_and_the_last_that_reached_the_goal() -> None:
    """Equal ones have no span."""
    trials = [
        *seeds((100, 120, 90), submission="a"),
        *seeds((130, 140, math.inf), submission="b"),
        *seeds((150, 150), submission="c"),
    ]

    cells = [line.cells[2] for line in tables_of(compared(trials))[0].lines]

    assert cells == [("100", "90–120"), ("140", "130–140"), ("150", "")]


def test_several_workloads_have_scores_and_shares_and_variants_have_none() -> None:
    times = {"a": {"x": 100, "y": 400}, "b": {"x": 200, "y": 100}}
    varied = dict.fromkeys("ab", dict.fromkeys(("x", "x_wide", "x_deep", "y"), 100))
    c = compared(on_workloads(times))

    table = tables_of(c)[2]
    with_variants = compared(on_workloads(varied), variants={"x_wide": "x", "x_deep": "x"})

    assert ("AlgoPerf score by steps", "b 0.8333, a 0.5000") in lines_of(c)
    assert table.title == "All 2 workloads"
    assert [cell.text for cell in table.lines[0].cells] == [
        *("b", "0.8333", "50 %", "50 %", "100 %", "100 %", "1.41")
    ]
    assert tables_of(c)[0].title == "When loss <= 0.1 was reached: x"
    assert tables_of(with_variants)[4].title == "All 2 workloads, checked by 2 variants"


@pytest.mark.parametrize(
    ("steps", "names", "said"),
    [
        ({8.0: 100, 16.0: 60, 32.0: 40}, "abcdef", "2 further sweeps"),
        ({8.0: 100, 16.0: math.inf}, "", "none of 8 sweeps"),
    ],
    ids=["regimes", "no regimes"],
)
def test_of_many_sweeps_the_first_six_that_show_regimes_have_answers(
    steps: dict[float, float], names: str, said: str
) -> None:
    trials = sized(*"abcdefgh", steps=steps, learning_rate=0.1)

    *before, (last, text) = lines_of(compared(trials))

    assert [name for name, _ in before if not name.startswith(" ")] == [str(GOAL), *names]
    assert last == "Batch sizes"
    assert text.startswith(said)


def test_a_sweep_has_its_batch_sizes_regimes_and_learning_rates() -> None:
    c = compared(sweep(LAW, submission="sgd"))

    names = [name for name, _ in lines_of(c)]
    table = table_of_sizes(c)

    assert names[-3:] == ["sgd", "  perfect scaling", "  largest useful"]
    assert table.title == "Steps to loss <= 0.1 against batch size: sgd"
    first, *_, last = ([cell.text for cell in line.cells] for line in table.lines)
    assert (first[0], first[1], first[3:5]) == ("8", "900", ["0.1", "0.05 to 0.2"])
    assert "perfect" in first[2]
    assert "maximal" in last[2]
    at_edge = [each for each in sweep(LAW) if (each.batch_size, each.learning_rate) != (512, 0.2)]
    shown = column(table_of_sizes(compared(at_edge)), "best learning rate")
    assert (shown[0], shown[-1]) == ("0.1", "0.1 (the highest)")


def test_every_run_is_listed_if_asked_for_and_diverged_ones_are_marked() -> None:
    """A run that missed the goal is not marked."""
    diverged = Trial("d", Measurements([10, 20], [0.9, math.nan]), "b")
    missed = trial(math.inf, submission="b", name="m")
    reached = [trial(200, submission="a"), trial(100, submission="a")]

    c = compared([*reached, diverged, missed])
    standings, table = tables_of(c)
    without = tables_of(compared([*reached, missed]))

    assert table.title == "All 4 runs"
    assert {line.cells[0].text: line.marks for line in table.lines} == {
        **{"a/100": [], "a/200": [], "m": []},
        "d": ["diverged"],
    }
    assert column(table, "run")[:2] == ["a/100", "a/200"]
    assert "diverged" in standings.headings
    assert "diverged" not in without[0].headings
    assert [line.marks for line in without[1].lines] == [[], [], []]
    assert "\nAll 4 runs\n" in as_text(c)
    assert "\nAll 4 runs\n" not in as_text(c, details=False)


@pytest.mark.parametrize("width", [60, 100, 200])
def test_the_text_fits_and_ends_with_the_warnings(width: int) -> None:
    back = Trial("b", Measurements([1, 2, 3], [0.9, 0.1, 0.2]), "b")

    text = as_text(compared([back, *sweep(law(64, sizes=SIZES[:7:3]), submission="sgd")]), width)

    assert 0.8 * width < max(map(len, text.splitlines())) <= width
    assert "later" in text.partition("Warnings")[2]


def test_a_goal_that_only_some_repetitions_reached_was_not_reached_by_no_run() -> None:
    """The slower one of two repetitions stands for both."""
    c = compared([trial(100), trial(math.inf)])

    ((_, text),) = lines_of(c)

    assert "1 of 2 runs" in text
    assert document_of(c).headline == "loss <= 0.1 was reached by some runs only"


@pytest.mark.parametrize(
    ("trials", "said", "regime"),
    [
        (sized("", steps={32.0: 200, 64.0: 120}), f"{NOT_SEEN} 32 to 64", "diminishing?"),
        # The lower bound is far below the sweep, the upper bound is open.
        (sweep({32: 800, 64: 400, 128: math.inf}), f"{NOT_SEEN} 32 to 128", "perfect?"),
        (sized("", steps={8.0: 100, 16.0: math.inf}), ": no regimes", ""),
    ],
    ids=["nothing known", "bounds beyond the sweep", "too few batch sizes count"],
)
def test_a_critical_batch_size_not_seen_has_no_number(
    trials: list[Trial], said: str, regime: str
) -> None:
    c = compared(trials)
    name, text = lines_of(c)[1 if regime else -1]

    assert name == "Batch sizes"
    assert text.endswith(said)
    assert {*column(table_of_sizes(c), "regime")} == {regime}


def test_submissions_that_differ_only_on_the_clock_that_counts_are_not_tied() -> None:
    trials = [trial(100, seconds=at, submission=name) for name, at in (("a", 1.0), ("b", 2.0))]

    by_time, by_steps = (lines_of(compared(trials, clock=x)) for x in ("seconds", "steps"))

    assert "by a, after 100 steps" in by_time[0][1]
    assert "by a and b, after 100 steps" in by_steps[0][1]


def test_all_clocks_are_in_the_answers_and_examples_stand_for_epochs_in_the_tables() -> None:
    measured = Measurements([1, 2], [0.9, 0.1], examples=[8, 16], epochs=[1, 2], seconds=[50, 120])
    c = compared(Trial(name, measured, name) for name in "ab")

    assert lines_of(single(100, seconds=None)) == [("loss <= 0.1", "reached after 100 steps")]
    assert lines_of(c)[0][1].endswith("after 2 steps, 16 examples, 2 epochs, 2.00 minutes")
    assert tables_of(c)[0].headings[2:5] == ["steps", "examples", "minutes"]
    assert column(tables_of(c)[0], "minutes") == ["2.00", "2.00"]


def test_there_is_no_speed_up_over_a_run_that_was_at_the_goal_at_once() -> None:
    at_once = Trial("a", Measurements([0, 10], [0.1, 0.1]), "a")

    for reference in "ab":
        c = compared([at_once, trial(20, submission="b")], reference=reference)
        assert lines_of(c)[1] == ("  b", "after 20 steps")


def test_five_scores_are_in_the_answers_and_all_are_in_the_table() -> None:
    times = {f"s{k}": dict.fromkeys("xy", 100 * (k + 1)) for k in reversed(range(6))}
    c = compared(on_workloads(times))

    table = tables_of(c)[2]

    assert dict(lines_of(c))["AlgoPerf score by steps"] == (
        "s0 1.0000, s1 0.6667, s2 0.3333, s3 0.0000, s4 0.0000"
    )
    assert column(table, "submission") == ["s0", "s1", "s2", "s3", "s4", "s5"]
    assert column(table, "within 2 x") == ["100 %", "100 %", *4 * ["0 %"]]
    assert column(table, "speed-up") == ["6.00", "3.00", "2.00", "1.50", "1.20", "1.00"]


def test_a_share_is_of_the_ratio_that_its_heading_names_and_a_missed_goal_has_no_speed_up() -> None:
    times = {"a": {"x": 100, "y": 100}, "b": {"x": 150, "y": 160}, "c": {"x": 100, "y": math.inf}}

    table = tables_of(compared(on_workloads(times)))[2]

    assert table.headings[2:6] == ["the fastest", "within 1.5 x", "within 2 x", "within 4 x"]
    assert column(table, "within 1.5 x") == ["100 %", "50 %", "50 %"]
    assert column(table, "speed-up") == ["1.00", "0.645", ""]


@pytest.mark.parametrize(
    ("sizes", "perfect", "useful"),
    [
        ((*range(1, 24), 45, 90, *range(256, 4096, 256)), "up to N (N to N)", "about N (N to N)"),
        (range(1, 24), "at least N", "at least N"),
        (range(256, 4096, 256), "at most N", "at most N"),
        ((16, 32, 64), "not seen in batch sizes from N to N", "at least N"),
        ((16, 32, 64, 128, 256, 512, 1024), "up to N (at most N)", "about N (N to N)"),
    ],
)
def test_borders_are_said_as_far_as_seen(sizes: Iterable[int], perfect: str, useful: str) -> None:
    """The critical batch size is 64."""
    steps = {size: 10 * round(1000 * (1 + (64 / size) ** 3) ** (1 / 3)) for size in sizes}
    few = useful.startswith("at least")

    lines = [text for name, text in lines_of(compared(sweep(steps))) if name.startswith("  ")]

    assert [re.sub(r"[\d.,]*\d", "N", line).partition(". ")[0] for line in lines] == [
        perfect,
        useful,
    ]
    assert ("Larger batches" in lines[1]) is not few


def test_one_submission_has_no_speed_up_and_is_counted_by_all_its_trials() -> None:
    """A note says that its fastest setting counts, as several were tried."""
    trials = [
        trial(steps, learning_rate=rate, hyperparameters={"seed": seed}, feasible=rate < 1)
        for rate, of in ((0.0123, (100, 110)), (0.2, (300,)), (1.0, (math.inf,)))
        for seed, steps in enumerate(of)
    ]

    table, every = tables_of(compared(trials))

    assert table.headings == ["submission", "reached by", "diverged", "steps", "learning rate"]
    cells = table.lines[0].cells
    assert [cell.text for cell in cells] == ["run/110", "3 of 4", "1", "110", "0.0123"]
    assert cells[3].bounds == "100–110"
    (note,) = table.notes
    assert "fastest setting" in note
    assert [line.marks for line in every.lines] == [[], [], [], ["diverged"]]


@pytest.mark.parametrize(("clock", "said"), [("steps", "by steps."), ("seconds", "by time.")])
def test_a_note_below_the_last_standings_says_what_counts(clock: str, said: str) -> None:
    trials = on_workloads(dict.fromkeys("ab", dict.fromkeys("xy", 100)), seconds=1.0)

    first, last, *_ = tables_of(compared(trials, clock=clock))

    assert first.notes == []
    (note,) = last.notes
    assert note.startswith(f"Speed-up: over a, {said}")


def test_runs_are_listed_by_the_clock_that_counts_which_may_be_empty() -> None:
    trials = [
        trial(steps, seconds=each, submission="a", name=name)
        for name, steps, each in (("late", 100, 9.0), ("soon", 200, 1.0))
    ]
    of_one = compared([trial(100, seconds=6.0, submission="a"), trial(200, submission="b")])

    assert column(tables_of(compared(trials))[-1], "run") == ["soon", "late"]
    assert column(tables_of(of_one)[0], "minutes") == ["10.0", ""]


def test_a_table_of_batch_sizes_has_repetitions_diverged_runs_and_no_rate_of_missed_goals() -> None:
    trials = [
        each
        for size, rate, of in (
            (8.0, 0.1, (400, 440, 420)),
            (8.0, 1.0, (math.inf,)),
            (64.0, 0.1, (100, 120, 110)),
            (128.0, 0.1, (math.inf,)),
        )
        for each in seeds(of, batch_size=size, learning_rate=rate, feasible=rate < 1)
    ]

    table = table_of_sizes(compared(trials))

    assert column(table, "steps") == ["420", "110", "not reached"]
    assert [line.cells[1].bounds for line in table.lines] == ["400–440", "100–120", ""]
    assert column(table, "best learning rate") == ["0.1 (the lowest)", "0.1 (the only one)", ""]
    assert column(table, "tried") == ["0.1 to 1", "", ""]
    assert column(table, "reached by") == ["3 of 4", "3 of 3", "0 of 1"]
    assert column(table, "diverged") == ["1", "0", "0"]


def test_how_to_get_the_tables_that_are_left_out_is_said_where_there_are_any() -> None:
    sizes = {8.0: 100, 4.0: 200}
    runs = compared([trial(100), trial(200)])

    def last_line(c: Comparison, *, details: bool = False) -> str:
        return as_text(c, details=details).splitlines()[-1]

    assert last_line(runs) == "More: 1 table: add --details"
    assert last_line(compared(sized("", steps=sizes))) == "More: 2 tables: add --details"
    assert last_line(compared(sized(*"abc", steps=sizes))) == "More: 4 tables: add --details"
    assert "More" not in last_line(runs, details=True)
    assert "More" not in last_line(single(100, 200))


@pytest.mark.parametrize(
    ("times", "headline"),
    [
        ({"a": 100}, "a reached loss <= 0.1"),
        ({"a": 400, "b": 100}, "b reached loss <= 0.1 first"),
        ({"a": 400, "b": 300}, "b reached loss <= 0.1 first, which may be chance"),
        ({"a": 100, "b": 100, "c": 400}, "a and b reached loss <= 0.1 first"),
        ({"a": math.inf, "b": math.inf}, "No run reached loss <= 0.1"),
    ],
)
def test_the_headline_says_who_was_first(times: dict[str, float], headline: str) -> None:
    document = document_of(compared(rivals(times)))

    assert document.headline == headline
    again = [step for step in document.next if "again" in step]
    assert len(again) == ("chance" in headline)
    assert all("train b and a again" in step for step in again)


def test_of_several_workloads_the_headline_has_the_highest_score() -> None:
    times = {name: dict.fromkeys(("mnist", "wmt"), at) for name, at in (("a", 100), ("b", 200))}

    document = document_of(compared(on_workloads(times)))

    assert document.headline == "a has the highest score on 2 workloads: 1.00"
    assert "score of 1" in document.how_to_read


def test_a_goal_that_no_run_reached_leads_to_one_that_the_best_run_reached() -> None:
    c = single(math.inf, math.inf)
    outcomes = [o for s in c.standings for o in s.outcomes]
    best = min(o.best for o in outcomes)

    (step,) = document_of(c).next

    assert step.splitlines()[1].strip() == f"noisescale compare RUNS --goal 'loss<={best!r}'"
    assert compare((o.trial for o in outcomes), Goal.read(f"loss<={best!r}")).reached


def test_best_learning_rates_at_an_edge_are_to_be_followed() -> None:
    trials = [
        trial(steps * 64 / size, batch_size=size, learning_rate=rate, name=f"{size}-{rate}")
        for size in (64.0, 128.0)
        for rate, steps in {0.1: 400, 0.2: 300, 0.4: 200}.items()
    ]

    (step, *_) = document_of(compared(trials)).next

    assert "higher learning rates for the sweep" in step
    assert "batch sizes 64 and 128 the highest" in step


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

    standings, sizes, runs = tables_of(compared(trials))

    assert column(standings, "schedule") == ["cosine"]
    assert column(sizes, "best schedule") == ["cosine", "cosine"]
    assert column(runs, "schedule").count("linear") == 6
    assert column(runs, "decay").count("0.1") == column(runs, "decay").count("none") == 6
    for table in (standings, sizes, runs):
        assert not {"precision", "optimizer"} & {*table.headings}


def test_optimizers_of_one_submission_are_a_column_unless_they_name_it() -> None:
    def headings(*submissions: str) -> list[str]:
        trials = [
            trial(100, submission=name, optimizer=optimizer)
            for name, optimizer in zip(submissions, ("sgd", "adam"), strict=True)
        ]
        return list(tables_of(compared(trials))[0].headings)

    assert "optimizer" in headings("ours", "ours")
    assert "optimizer" in headings("ours", "theirs")
    assert "optimizer" not in headings("sgd", "adam")
