# SPDX-License-Identifier: Apache-2.0
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from courses import sweep, trial

from noisescale.bounded import Bounded
from noisescale.history.metrics import Goal
from noisescale.lab.compare.compare_trials import compare_trials
from noisescale.lab.compare.comparison import ComparisonRecord
from noisescale.lab.compare.measurements import Measurements, Trial
from noisescale.lab.compare.outcomes import Standing
from noisescale.tradeoff.profile import STEPS_SCATTER

GOAL = Goal.read("loss<=0.1")


def standing(c: ComparisonRecord, submission: str, workload: str = "") -> Standing:
    (found,) = (
        each for each in c.standings if (each.submission, each.workload) == (submission, workload)
    )
    return found


def test_submissions_are_ranked_by_when_they_reached_the_goal() -> None:
    trials = [trial(300, submission="sgd"), trial(math.inf, submission="lars")]
    trials += [trial(100, submission="adam")]

    found = compare_trials(trials, GOAL)

    assert [each.submission for each in found.standings] == ["adam", "sgd", "lars"]
    assert found.clock == "steps"
    assert found.reference == "sgd"
    assert found.reached
    assert not compare_trials(trials[1:2], GOAL).reached


@pytest.mark.parametrize("last", [False, True])
def test_a_run_of_which_a_budget_is_not_known_is_left_out_and_named(last: bool) -> None:
    """It reached the goal, maybe within the budget: it did not miss the goal."""
    trials = [trial(200, seconds=1.0, submission="sgd")]
    trials += [trial(100, seconds=1.0, submission="adam", name=f"adam/{n}") for n in range(3)]
    known = trials[-1].measurements
    seconds = np.where(known.steps >= known.steps[-1], np.nan, known.steps) if last else None
    untimed = Measurements(known.steps, known.values, seconds=seconds)
    trials[-1] = replace(trials[-1], measurements=untimed)

    found = compare_trials(trials, GOAL, budget={"seconds": 105})

    assert [t.name for t in found.left_out] == ["adam/2"]
    assert "seconds" in found.left_out[0].fault
    assert len(standing(found, "adam").outcomes) == standing(found, "adam").reached == 2
    with pytest.raises(ValueError, match="must have a run of adam that counts, got 1 that do not"):
        compare_trials([trials[0], trials[-1]], GOAL, budget={"seconds": 105})


def test_a_run_that_failed_or_never_got_there_missed_the_goal_within_any_budget() -> None:
    timed = [trial(100, seconds=1.0, submission="a", name=f"{n}") for n in range(2)]
    failed = Trial("failed", Measurements([], []), submission="a", feasible=False)
    missed = trial(math.inf, submission="a", name="missed")  # without seconds, but never there

    found = compare_trials([*timed, failed, missed], GOAL, budget={"seconds": 500})

    assert not found.left_out
    assert (standing(found, "a").reached, len(standing(found, "a").outcomes)) == (2, 4)
    both = compare_trials([*timed, failed, missed], GOAL, budget={"seconds": 500, "steps": 900})
    assert standing(both, "a").reached == 2


def test_a_run_that_is_not_known_by_the_clock_is_left_out_if_others_are() -> None:
    timed = [trial(100 + n, seconds=1.0, submission="a", name=f"{n}") for n in range(2)]
    missed = trial(math.inf, submission="a", name="missed")

    found = compare_trials([*timed, trial(90, submission="a"), missed], GOAL, clock="seconds")

    assert [t.name for t in found.left_out] == ["a/90"]
    assert len(standing(found, "a").outcomes) == 3  # what missed the goal needs no time
    with pytest.raises(ValueError, match="`clock` must be known of every trial that reached"):
        compare_trials([*timed, trial(90, submission="b")], GOAL, clock="seconds")


def test_how_long_a_diverged_run_was_logged_changes_no_speed_up() -> None:
    def speed_up(until: int) -> Bounded:
        trials = [trial(300 + 10 * n, submission="sgd", name=f"sgd/{n}") for n in range(3)]
        trials += [trial(150 + 10 * n, submission="adam", name=f"adam/{n}") for n in range(2)]
        at = np.arange(10, until + 1, 10)
        diverged = Measurements(at, np.where(at < 100, 0.5, np.nan))
        trials.append(Trial("adam/2", diverged, submission="adam"))
        return standing(compare_trials(trials, GOAL), "adam").speed_up

    assert speed_up(110) == speed_up(260) == speed_up(2600)


def test_seconds_count_where_every_trial_that_reached_the_goal_has_them() -> None:
    slow, fast = trial(100, seconds=9.0, submission="a"), trial(200, seconds=1.0, submission="b")

    by_time = compare_trials([slow, fast], GOAL)
    by_steps = compare_trials([slow, fast], GOAL, clock="steps")
    untimed = compare_trials([slow, trial(200, submission="b")], GOAL)

    assert [each.submission for each in by_time.standings] == ["b", "a"]
    assert [each.submission for each in by_steps.standings] == ["a", "b"]
    assert untimed.clock == "steps"


def test_where_no_run_reached_the_goal_the_nearest_is_first_and_time_counts_if_it_is_known() -> (
    None
):
    far, near = (
        Trial(name, Measurements([1, 2], [0.9, loss]), name)
        for name, loss in (("f", 0.8), ("n", 0.2))
    )
    timed = Trial("t", Measurements([1, 2], [0.9, 0.5], seconds=[1, 2]), "t")

    found = compare_trials([far, near], GOAL)

    assert [each.submission for each in found.standings] == ["n", "f"]
    assert found.clock == "steps"
    assert compare_trials([timed], GOAL).clock == "seconds"
    assert compare_trials([timed, far], GOAL).clock == "steps"


def test_a_run_that_missed_the_goal_and_has_no_seconds_leaves_the_clock_to_the_others() -> None:
    reached, missed = trial(100, seconds=1.0, submission="a"), trial(math.inf, submission="b")

    assert compare_trials([reached, missed], GOAL).clock == "seconds"


def test_the_speed_up_of_single_runs_has_the_usual_scatter_and_the_evaluations_in_its_bounds() -> (
    None
):
    found = compare_trials([trial(400, submission="a"), trial(200, submission="b")], GOAL)

    margin = math.exp(1.959964 * STEPS_SCATTER * math.sqrt(2))
    speed_up = standing(found, "b").speed_up
    assert speed_up.value == 2
    assert speed_up.low == pytest.approx(390 / 200 / margin)
    assert speed_up.high == pytest.approx(margin * 400 / 190)
    assert standing(found, "a").speed_up == Bounded(1, 1, 1)


MIDDLE = {1: (0, 1), 2: (0.5641896, 0.6816901), 3: (0, 0.4486712), 4: (0.2970114, 0.3604553)}
"""Mean and variance of the middle of so many normal numbers: Teichroew 1956, tables of order
statistics. Of an even number the larger one in the middle."""


def margin_of(
    ours: int, theirs: int, scatter: float = STEPS_SCATTER, quantile: float = 1.959964
) -> float:
    (one, several), (other, others) = MIDDLE[ours], MIDDLE[theirs]
    return math.exp(scatter * (quantile * math.sqrt(several + others) + abs(one - other)))


def seeds(submission: str, steps: list[float]) -> list[Trial]:
    return [
        trial(each, submission=submission, hyperparameters={"seed": k}, name=f"{submission}{k}")
        for k, each in enumerate(steps)
    ]


def test_repetitions_have_their_own_scatter_in_the_bounds() -> None:
    a, b = seeds("a", [400, 410, 390]), seeds("b", [200, 210, 190])

    found = standing(compare_trials([*a, *b], GOAL), "b").speed_up

    logs = [np.log([400, 410, 390]), np.log([200, 210, 190])]
    scatter = math.sqrt(sum(((each - each.mean()) ** 2).sum() for each in logs) / 4)
    margin = margin_of(3, 3, scatter, 2.776445)
    assert found.value == 2
    assert found.low == pytest.approx(390 / 200 / margin, rel=1e-5)


@pytest.mark.parametrize("sizes", [(1, 1), (2, 1), (2, 2), (3, 3), (4, 3), (5, 1), (8, 8), (9, 9)])
def test_bounds_hold_the_truth_as_often_as_they_say(sizes: tuple[int, int]) -> None:
    """Trainings of equal submissions that scatter by 15 %."""
    rng = np.random.default_rng(sum(sizes))
    held = 0
    for _ in range(400):
        logs = [STEPS_SCATTER * rng.standard_normal(size) for size in sizes]
        times = [np.round(10_000 * np.exp(of), -1) for of in logs]
        both = [
            Trial(
                f"{name}{k}",
                Measurements([time - 10, time], [0.9, 0.1]),
                name,
                hyperparameters={"seed": float(k)},
            )
            for name, of in zip("ab", times, strict=True)
            for k, time in enumerate(of)
        ]
        found = standing(compare_trials(both, GOAL), "b").speed_up
        held += found.low <= 1 <= found.high
    assert 0.92 <= held / 400 <= 0.995


@pytest.mark.parametrize("size", [3, 5, 8])
@pytest.mark.parametrize("budget", [1500, 1000])
@pytest.mark.parametrize("scatter", [0.4, 0.8])
def test_repetitions_that_missed_the_goal_show_scatter_too(
    size: int, budget: float, scatter: float
) -> None:
    """Equal submissions, of whose trainings some miss the goal within the budget."""
    rng = np.random.default_rng(size)
    sure = 0
    for _ in range(150):
        both = []
        for name in "ab":
            times = np.round(1000 * np.exp(scatter * rng.standard_normal(size)))
            for k, time in enumerate(times):
                reached = time < budget
                measured = ([0.97 * time, time], [0.9, 0.1]) if reached else ([budget], [0.9])
                both.append(
                    Trial(
                        f"{name}{k}",
                        Measurements(*measured),
                        name,
                        hyperparameters={"seed": float(k)},
                    )
                )
        found = standing(compare_trials(both, GOAL), "b").speed_up
        sure += found.low > 1 or found.high < 1
    assert sure <= 0.08 * 150  # 5 %; with an assumed scatter up to 57 %


def test_of_a_missed_goal_the_speed_up_is_known_from_one_side() -> None:
    missed = trial(math.inf, until=500, submission="a")
    c = compare_trials([missed, trial(100, submission="b"), trial(math.inf, submission="c")], GOAL)

    margin = math.exp(1.959964 * STEPS_SCATTER * math.sqrt(2))
    assert standing(c, "b").speed_up.low == pytest.approx(500 / 100 / margin)
    assert standing(c, "b").speed_up.high == math.inf
    assert math.isnan(standing(c, "b").speed_up.value)
    assert not standing(c, "a").speed_up.known
    assert not standing(c, "c").speed_up.known
    other = compare_trials([missed, trial(100, submission="b")], GOAL, reference="b")
    assert standing(other, "a").speed_up.high == pytest.approx(margin * 100 / 500)
    assert standing(other, "a").speed_up.low == 0


def missed(submission: str, until: list[float]) -> list[Trial]:
    return [
        trial(math.inf, until=last, submission=submission, hyperparameters={"seed": k}, name=str(k))
        for k, last in enumerate(until)
    ]


@pytest.mark.parametrize(
    ("until", "least"),
    [
        ([1000, 500, 600], 600),
        ([500, 500, 1000], 500),
        ([1000, 1000, 500], 1000),
        ([500, 1000], 1000),
    ],
)
def test_of_repetitions_that_missed_the_goal_the_middle_one_bounds_the_speed_up(
    until: list[float], least: float
) -> None:
    """Only the longest one was trained as far as the longest one."""
    trials = [*missed("a", until), *seeds("b", [100, 100, 100])]

    ours = standing(compare_trials(trials, GOAL), "b").speed_up
    theirs = standing(compare_trials(trials, GOAL, reference="b"), "a").speed_up

    margin = margin_of(len(until), 3)
    assert ours.low == pytest.approx(least / 100 / margin, rel=1e-5)
    assert ours.high == math.inf
    assert theirs.low == 0
    assert theirs.high == pytest.approx(margin * 100 / least, rel=1e-5)


def test_what_was_trained_beyond_the_budget_does_not_bound_a_speed_up() -> None:
    """Without the budget "b" is four times as fast."""
    margin = math.exp(1.959964 * STEPS_SCATTER * math.sqrt(2))
    trials = [trial(400, until=10_000, submission="a"), trial(100, submission="b")]

    found = standing(compare_trials(trials, GOAL, budget={"steps": 300}), "b").speed_up

    assert found.low == pytest.approx(300 / 100 / margin)
    assert found.low < 4


def test_a_run_without_a_measurement_shows_nothing_of_how_slow_it_is() -> None:
    """By its own record it failed."""
    failed = Trial("none", Measurements([], []), "a", feasible=False)
    trials = [failed, trial(100, submission="b")]

    assert not standing(compare_trials(trials, GOAL), "b").speed_up.known
    assert not standing(compare_trials(trials, GOAL, reference="b"), "a").speed_up.known


def test_the_scatter_of_repetitions_counts_if_there_are_enough() -> None:
    """Two and three are too few."""
    trials = [*seeds("a", [400, 410, 390]), *seeds("b", [200, 210])]

    found = standing(compare_trials(trials, GOAL), "b").speed_up

    margin = margin_of(3, 2)
    assert found.value == pytest.approx(400 / 210)
    assert found.low == pytest.approx(390 / 210 / margin, rel=1e-5)


def test_a_goal_that_was_reached_before_the_first_step_gives_no_ratio() -> None:
    at_once = Measurements([0, 10], [0.1, 0.1])
    trials = [
        one
        for workload in ("x", "y")
        for one in (
            Trial("a", at_once, "a", workload),
            trial(20, submission="b", workload=workload),
        )
    ]

    for reference in "ab":
        found = compare_trials(trials, GOAL, reference=reference)
        other = standing(found, "b" if reference == "a" else "a", "x")
        assert not other.speed_up.known
        assert (found.scores, found.profile, found.speed_ups) == (None, None, {})
        assert found.warnings[0].startswith("2 of 4 runs reached the goal at their first")


def test_bounds_of_another_confidence_have_another_width() -> None:
    trials = [trial(400, submission="a"), trial(200, submission="b")]
    both = sweep({8: 900, 64: 200, 512: 110}, submission="a")

    found = standing(compare_trials(trials, GOAL, confidence=0.5), "b").speed_up
    narrow, wide = (compare_trials(both, GOAL, confidence=x).sweeps[0].regimes for x in (0.5, 0.95))

    margin = math.exp(0.6744898 * STEPS_SCATTER * math.sqrt(2))
    assert found.low == pytest.approx(390 / 200 / margin)
    assert found.high == pytest.approx(margin * 400 / 190)
    assert narrow is not None
    assert wide is not None
    assert narrow.critical_batch_size.low > wide.critical_batch_size.low
    assert narrow.critical_batch_size.high < wide.critical_batch_size.high


def test_diverged_trials_are_counted_apart_from_those_that_only_missed_the_goal() -> None:
    trials = [trial(math.inf, name="missed"), trial(100), trial(math.inf, feasible=False, name="d")]

    assert standing(compare_trials(trials, GOAL), "").diverged == 1


def test_on_a_workload_that_the_reference_was_not_trained_on_no_speed_up_is_known() -> None:
    trials = [
        trial(100, submission=submission, workload=workload)
        for submission, workload in (("a", "x"), ("b", "x"), ("b", "y"))
    ]

    found = compare_trials(trials, GOAL)

    assert not standing(found, "b", "y").speed_up.known
    assert found.speed_ups["a"] == 1
    assert math.isnan(found.speed_ups["b"])


def test_the_time_of_several_studies_is_the_middle_of_their_best() -> None:
    trials = [
        trial(steps, submission="a", study=study, learning_rate=rate, name=f"{study}{rate}")
        for study, both in (("1", (100, 200)), ("2", (400, 300)), ("3", (250, 900)))
        for rate, steps in zip((0.1, 0.2), both, strict=True)
    ]

    found = standing(compare_trials(trials, GOAL), "a")

    assert sorted(each.at("steps") for each in found.counting) == [100, 250, 300]
    assert found.best.at("steps") == 250
    assert len(found.outcomes) == 6


def test_each_study_counts_once_however_many_repetitions_it_has() -> None:
    trials = [
        trial(steps, submission="a", study=study, hyperparameters={"seed": k}, name=f"{study}{k}")
        for study, of in (("1", (300, 310, 320)), ("2", (100,)), ("3", (200,)))
        for k, steps in enumerate(of)
    ]

    found = standing(compare_trials(trials, GOAL), "a")

    assert sorted(each.at("steps") for each in found.counting) == [100, 200, 310]
    assert found.best.at("steps") == 200


def test_workloads_have_goals_of_their_own_a_profile_and_scores() -> None:
    trials = [
        trial(steps, submission=submission, workload=workload)
        for submission, workload, steps in (
            ("a", "x", 100),
            ("a", "y", 400),
            ("b", "x", 200),
            ("b", "y", 100),
        )
    ]

    found = compare_trials(trials, {"x": GOAL, "y": Goal.read("loss<0.2")})

    assert found.scores == {"a": 0.5, "b": pytest.approx(5 / 6)}
    assert found.profile is not None
    assert found.profile.at(1) == {"a": 0.5, "b": 0.5}
    assert found.speed_ups == {"a": 1, "b": pytest.approx(math.sqrt(0.5 * 4))}
    assert compare_trials(trials[:1], GOAL).scores is None
    for fewer in (trials[:1], trials[:2], trials[::2]):  # one submission, or one workload
        found = compare_trials(fewer, GOAL)
        assert (found.scores, found.profile, found.speed_ups) == (None, None, {})


@pytest.mark.parametrize(
    ("clock", "budget", "speed_up"),
    [
        ("steps", None, math.nan),
        ("steps", {"steps": 399.0}, math.sqrt(0.5 * 400 / 100)),
        ("steps", {"seconds": 1e6}, math.nan),
        ("seconds", {"seconds": 799.0, "steps": 1e6}, math.sqrt(0.5 * 800 / 200)),
    ],
)
def test_a_missed_goal_costs_the_budget_and_one_more_in_the_mean_speed_up(
    clock: str, budget: dict[str, float] | None, speed_up: float
) -> None:
    trials = [
        trial(steps, seconds=2.0, submission=submission, workload=workload)
        for submission, workload, steps in (
            ("a", "x", 100),
            ("a", "y", math.inf),
            ("b", "x", 200),
            ("b", "y", 100),
        )
    ]

    found = compare_trials(trials, GOAL, clock=clock, budget=budget).speed_ups

    assert found["b"] == pytest.approx(speed_up, nan_ok=True)


def test_variants_check_a_workload_and_have_no_share_in_the_score() -> None:
    trials = [
        trial(steps, submission=submission, workload=workload)
        for submission, workload, steps in (
            ("a", "x", 100),
            ("a", "x_wide", math.inf),
            ("b", "x", 200),
            ("b", "x_wide", 100),
        )
    ]

    found = compare_trials(trials, GOAL, variants={"x_wide": "x"})

    assert found.scores == {"a": 0, "b": 1}
    assert found.profile is not None
    assert found.profile.workloads == ("x",)


def test_the_side_of_a_goal_is_decided_by_where_most_trials_begin() -> None:
    rising = Trial("r", Measurements([1, 2, 3], [0.1, 0.5, 0.9]), "a")

    assert compare_trials([rising], Goal.read("accuracy=0.5")).goals[""].side == ">"
    assert compare_trials([trial(100)], Goal.read("loss=0.1")).goals[""].side == "<"
    empty = Trial("e", Measurements([1], [math.nan]))
    assert compare_trials([empty], Goal.read("loss=0.1")).goals[""].side == "<"


@pytest.mark.parametrize(
    ("starts", "side"),
    [
        ([0.1, 0.9, 0.9], "<"),
        ([0.9, 0.1, 0.1], ">"),
        ([0.9, 0.1, 0.9], "<"),
        ([math.nan, math.nan, 0.9], "<"),
        ([math.nan, math.nan, 0.1], ">"),
    ],
)
def test_a_first_value_that_is_no_number_or_unlike_most_does_not_decide_the_side(
    starts: list[float], side: str
) -> None:
    """Values that are not numbers are left out; a trial of them alone does not count."""
    trials = [
        Trial(str(k), Measurements([0, 1], [start, start]), "a") for k, start in enumerate(starts)
    ]

    assert compare_trials(trials, Goal.read("metric=0.5")).goals[""].side == side


def test_each_workload_decides_the_side_of_its_goal_by_its_own_trials() -> None:
    trials = [
        Trial(name, Measurements([1, 2], [start, 0.5]), "a", workload=name)
        for name, start in (("falls", 0.9), ("rises", 0.2))
    ]

    goals = compare_trials(trials, Goal.read("metric=0.5")).goals

    assert {name: goal.side for name, goal in goals.items()} == {"falls": "<", "rises": ">"}


def test_a_budget_holds_for_all() -> None:
    assert not compare_trials([trial(100)], GOAL, budget={"steps": 90}).reached


def test_sweeps_over_batch_sizes_are_found_for_each_submission() -> None:
    trials = [*sweep({8: 400, 16: 200, 32: 110}, submission="a"), trial(100, submission="b")]

    found = compare_trials(trials, GOAL)

    assert [each.submission for each in found.sweeps] == ["a"]


def test_warnings_of_a_sweep_say_whose_it_is() -> None:
    missed = {8: 400, 16: 200, 32: math.inf}

    named = compare_trials(sweep(missed, submission="a", workload="x"), GOAL).warnings
    unnamed = compare_trials(sweep(missed), GOAL).warnings

    assert named == ("a on x: No run reached the goal at batch size 32.",)
    assert unnamed == ("No run reached the goal at batch size 32.",)


def test_the_reference_is_the_first_of_the_submissions() -> None:
    trials = [trial(steps, submission=name) for name, steps in (("a", 300), ("b", 100), ("c", 200))]

    assert compare_trials(trials, GOAL).submissions == ("a", "b", "c")
    assert compare_trials(trials, GOAL, reference="c").submissions == ("c", "b", "a")


def test_a_metric_that_leaves_the_goal_again_and_one_that_begins_there_are_warned_of() -> None:
    back = Trial("b", Measurements([1, 2, 3], [0.9, 0.1, 0.2]), "b")
    first = Trial("f", Measurements([1, 2, 3], [0.1, 0.1, 0.1]), "f")

    found = compare_trials([back, first], GOAL).warnings

    assert found[0].startswith("In 1 of 2 runs that reached the goal a later measurement was short")
    assert found[1].startswith("1 of 2 runs reached the goal at their first measurement.")
    assert compare_trials([trial(100)], GOAL).warnings == ()


@pytest.mark.parametrize(
    ("trials", "options", "message"),
    [
        ([], {}, "`trials` must have one trial at least, got none"),
        ([trial(1, workload="x")], {"goals": {"y": GOAL}}, "`goals` must have one for the workl"),
        ([trial(10)], {"clock": "seconds"}, "`clock` must be known of every trial that reached"),
        ([trial(10)], {"clock": "hours"}, '`clock` must be one of "steps", "examples"'),
        ([trial(10, submission="a")], {"reference": "b"}, "`reference` must be one of a, got 'b'"),
        (
            [trial(10, workload="x")],
            {"variants": {"y": "x"}},
            "`variants` must name workloads amon",
        ),
        ([trial(10)], {"confidence": 2}, "`confidence` must lie between 0 and 1"),
    ],
)
def test_bad_arguments_are_refused(
    trials: list[Trial], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        compare_trials(trials, **{"goals": GOAL} | options)


def searched(submission: str, rates: list[float], study: str = "") -> list[Trial]:
    return [
        trial(
            100,
            submission=submission,
            study=study,
            learning_rate=rate,
            hyperparameters={"seed": seed},
        )
        for rate in rates
        for seed in (0.0, 1.0)
    ]


def test_a_search_over_twice_the_settings_of_another_is_warned_of_and_repetitions_are_not() -> None:
    narrow, wide = searched("sgd", [0.1]), searched("adam", [0.1, 0.2])

    (told,) = compare_trials([*narrow, *wide], GOAL).warnings

    assert told.startswith("The searches differ: adam was trained with 2 settings of")
    assert "sgd with 1." in told
    assert not compare_trials(
        [*searched("sgd", [0.1, 0.3, 0.4]), *searched("adam", [1, 2, 3, 4, 5])], GOAL
    ).warnings


def test_settings_are_counted_in_each_study() -> None:
    one = searched("sgd", [0.1], "1")
    three = [t for study in "123" for t in searched("adam", [0.1], study)]

    assert not compare_trials([*one, *three], GOAL).warnings
    assert standing(compare_trials([*one, *three], GOAL), "adam").settings == 1


SILENT = Trial("silent", Measurements([], []), "b")
BROKEN = Trial("broken", Measurements([], []), "a", fault="`x.csv` must be a file, got none.")


def test_a_run_that_cannot_be_read_or_did_not_log_the_metric_is_left_out_and_named() -> None:
    whole = [trial(steps, submission=s) for s in "ab" for steps in (100, 110, 120)]

    found = compare_trials([*whole, SILENT, BROKEN], GOAL)
    without = compare_trials(whole, GOAL)

    assert [(each.name, each.fault) for each in found.left_out] == [
        ("silent", "It did not log loss."),
        ("broken", BROKEN.fault),
    ]
    told, *others = found.warnings
    assert told == (
        "2 runs are left out. silent: It did not log loss. broken: `x.csv` must be a file, got"
        " none. The answer is of the other runs. A training that failed before its first evaluation"
        " does not count against its submission."
    )
    assert tuple(others) == without.warnings
    for ours, theirs in zip(found.standings, without.standings, strict=True):
        assert (ours.speed_up, ours.reached) == (theirs.speed_up, theirs.reached)
        assert len(ours.outcomes) == 3


def test_of_many_runs_that_are_left_out_three_are_named() -> None:
    silent = [Trial(str(k), Measurements([], [])) for k in range(5)]

    told = compare_trials([trial(100), *silent], GOAL).warnings[0]

    assert told.startswith(
        "5 runs are left out. 0: It did not log loss. 1: It did not log loss. 2:"
    )
    assert "And 2 further runs: `noisescale compare --json` has them all." in told


@pytest.mark.parametrize(
    ("trials", "of"),
    [
        ([BROKEN], " of a"),
        ([SILENT, trial(9, submission="a")], " of b"),
        ([replace(SILENT, submission="")], ""),
    ],
)
def test_a_submission_of_which_no_run_counts_is_refused(trials: list[Trial], of: str) -> None:
    with pytest.raises(ValueError, match=f"`trials` must have a run{of} that counts, got 1 that"):
        compare_trials(trials, GOAL)


def test_a_run_whose_metric_is_no_number_counts_as_one_that_missed_the_goal() -> None:
    """It was trained, and diverged."""
    diverged = Trial("nan", Measurements([10, 20], [0.5, math.nan]), "b")

    found = compare_trials([trial(100, submission="a"), diverged], GOAL)

    assert found.left_out == ()
    assert (standing(found, "b").reached, standing(found, "b").diverged) == (0, 1)


def test_the_profile_has_the_score_as_its_mean_height_with_variants_too() -> None:
    """A workload whose variant was missed is missed."""
    steps = {"a": {"x": 20, "y": math.inf}, "b": {"x": 30, "y": 20}}
    trials = [
        trial(at, submission=name, workload=workload, name=f"{name}/{workload}")
        for name, of in steps.items()
        for workload, at in of.items()
    ]

    found = compare_trials(trials, GOAL, variants={"y": "x"})

    assert found.profile is not None
    assert found.profile.at(4.0) == {"a": 0.0, "b": 1.0}
    assert found.scores == found.profile.scores() == {"a": 0.0, "b": 1.0}


def test_searches_are_compared_on_each_workload_on_its_own() -> None:
    trials = [
        trial(100, submission=name, workload=workload, learning_rate=0.1 * (k + 1), name=str(k))
        for workload, searches in (("x", {"a": 3, "b": 3}), ("y", {"a": 1, "b": 1}))
        for name, many in searches.items()
        for k in range(many)
    ]
    more = trial(90, submission="b", workload="y", learning_rate=0.7)

    assert compare_trials(trials, GOAL).warnings == ()
    (told,) = compare_trials([*trials, more], GOAL).warnings
    assert told.startswith("The searches differ on y: b was trained with 2 settings")
