# SPDX-License-Identifier: Apache-2.0
"""benchmarks/suite/run.py: its targets, its clock, its trainings, and what is trained next."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import ttest_1samp

from benchmarks.lib import results
from benchmarks.suite import run as suite
from benchmarks.suite._report import tuners, untuned
from benchmarks.suite._scores import (
    mean_factor,
    mean_speed_up,
    scored,
    times_of,
    trial_by_trial,
    verdicts,
)
from benchmarks.suite._submissions import (
    CARBS,
    EXTERNAL,
    EXTERNALS,
    Key,
    Size,
    key_of,
    missing,
    target_of,
)
from benchmarks.suite._trials import Course, Method, Row, Task, step_seconds, train
from benchmarks.suite._workloads import PROBLEMS, VARIANTS

pytestmark = pytest.mark.slow

UNTUNED = ("sgd, untuned",)
SMALL = Size(("sgd", CARBS), UNTUNED, studies=2, trials=2, long=6, target_trials=2, reruns=3)
TINY = Size(("sgd", "momentum, large"), UNTUNED, 1, 2, 2, target_trials=1, reruns=1, budget=0.05)


def ended(task: Task) -> Row:
    """A row of a training that nobody did: its loss follows from its settings."""
    rate = task.settings["learning_rate"]
    loss = abs(math.log(rate / 0.2)) + task.seed / 1e6
    seconds = {"1": 2 * loss, "8": loss, "64": loss / 2}
    last = {"step": 10, "examples": 80, "seconds": seconds, "measured": 0.0, "loss": loss}
    found = {"ended": "goal", "evaluations": 3, "best": loss, "last": [last]}
    return {**task.about, "settings": dict(task.settings), "seed": task.seed, **found}


def target(workload: str) -> Row:
    about = {"kind": "target", "submission": "", "study": 0, "trial": 0}
    return {**about, "workload": workload, "goal": 1.0, "of_each": {}}


def trained(
    method: Method, budget: float, *, workload: str = "regression", seed: int = 0, **settings: float
) -> Row:
    settings = {"learning_rate": 0.01, "batch_size": 128} | settings
    return train(Task(workload, method, settings, seed, 0.0, budget))


def worked_off(rows: list[Row]) -> Iterator[Task]:
    """Do what is missing, a training at a time, and yield each."""
    while True:
        known = any(row["kind"] == "target" for row in rows)
        if not known and (found := target_of("regression", SMALL, rows)):
            rows.append(found)
        task = next(missing(rows, ["regression"], SMALL, set()), None)
        if task is None:
            return
        yield task
        rows.append(ended(task))


def test_an_interrupted_suite_goes_on_as_if_it_had_not_been() -> None:
    whole: list[Row] = []
    parts: list[Row] = []

    expected = list(worked_off(whole))
    for _ in range(200):  # each call does one training, and loses the next one
        begun = list(zip(range(2), worked_off(parts), strict=False))
        if not begun:
            break

    # Targets: 3 algorithms x 2 trials and 3 reruns. Studies: 1 untuned, 2 x 6 long ones, twice.
    assert len(expected) == 3 * (2 + 3) + 2 * (1 + 2 * 6)
    assert parts == whole


def test_an_interrupted_suite_saves_what_is_under_way_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(results, "FOLDER", tmp_path)
    whole = suite.Suite([], TINY, saved=False, processes=1)
    assert whole.run(["regression"], math.inf)
    added = suite.Suite._add

    def interrupted(self: suite.Suite, row: Row) -> None:
        added(self, row)
        if len(self.rows) == 3:
            raise KeyboardInterrupt

    begun: list[Key] = []
    with monkeypatch.context() as once:
        once.setattr(suite.Suite, "_add", interrupted)
        once.setattr(suite, "key_of", lambda row: begun.append(key_of(row)) or begun[-1])
        with pytest.raises(KeyboardInterrupt):
            suite.Suite([], TINY, saved=True, processes=2).run(["regression"], math.inf)
    kept = results.saved_rows(suite.NAME)
    later = suite.Suite(results.saved_rows(suite.NAME), TINY, saved=True, processes=2)
    assert later.run(["regression"], math.inf)

    def found(rows: list[Row]) -> list[tuple[Key, float]]:
        return sorted((key_of(row), row.get("best", row.get("goal"))) for row in rows)

    assert sorted(map(key_of, kept)) == sorted(begun)  # none of them is lost
    assert len(begun) < len(whole.rows) == 3 * 2 + 1 + 1 + 2 * 2
    assert found(results.saved_rows(suite.NAME)) == found(later.rows) == found(whole.rows)


def test_results_of_another_protocol_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(results, "FOLDER", tmp_path)
    suite.check_saved()  # nothing is saved
    suite.Suite([], TINY, saved=True, processes=1)._add(target("digits"))

    now = suite.protocol()
    sgd = {**now["spaces"]["sgd"], "momentum": [0.1, 0.9]}
    added = now | {"budgets": {**now["budgets"], "another": 1.0}}
    others = [
        now | {"budgets": {**now["budgets"], "digits": 3.0}},
        now | {"spaces": {**now["spaces"], "sgd": sgd}},
        {what: value for what, value in now.items() if what != "clock"},
    ]

    monkeypatch.setattr(suite, "protocol", lambda: added)
    suite.check_saved()
    for other in others:
        monkeypatch.setattr(suite, "protocol", lambda other=other: other)
        with pytest.raises(SystemExit, match="`protocol`"):
            suite.check_saved()
    monkeypatch.setattr(suite, "protocol", lambda: now)
    monkeypatch.setattr(suite, "versions", lambda packages: {"torch": "1.0"})
    with pytest.raises(SystemExit, match="`versions`"):
        suite.check_saved()


def test_no_two_workloads_share_points_or_seeds() -> None:
    size = Size(externals=("sgd",), selves=(), studies=3, trials=5, long=5)

    tasks = list(missing([target(w) for w in PROBLEMS], list(PROBLEMS), size, set()))

    assert len(tasks) == 16 * 15
    assert len({task.seed for task in tasks}) == len(tasks)
    assert len({task.settings["learning_rate"] for task in tasks}) == len(tasks)


def test_carbs_is_tried_on_workloads_that_are_no_variants() -> None:
    size = Size(externals=("sgd", CARBS), selves=(), studies=1, trials=2, long=3)
    workloads = ["mnist", "mnist_width"]

    tasks = missing([target(w) for w in workloads], workloads, size, set())

    found = [(task.workload, task.about["submission"]) for task in tasks]
    # Three trials of SGD, and the first of CARBS, which waits for it.
    assert found == [("mnist", "sgd")] * 3 + [("mnist", CARBS)] + [("mnist_width", "sgd")] * 2


def test_trainings_under_way_are_not_begun_again() -> None:
    first, second, *_ = missing([], ["digits"], SMALL, set())

    assert next(missing([], ["digits"], SMALL, {key_of(first.about)})) == second


def test_the_target_is_the_middle_algorithms_median_of_reruns_of_its_best_trial() -> None:
    rows: list[Row] = []
    losses = {"sgd": (0.5, 0.1, 0.3), "momentum": (0.2, 0.2, 0.9), "adamw": (0.4, None, 0.6)}
    while len(rows) < 3 * (2 + 3):
        assert target_of("regression", SMALL, rows) is None
        row = ended(next(missing(rows, ["regression"], SMALL, set())))
        if row["kind"] == "rerun":
            name = row["submission"]
            trials = [r for r in rows if (r["kind"], r["submission"]) == ("target trial", name)]
            assert row["settings"] == min(trials, key=lambda each: each["best"])["settings"]
            row |= {"best": losses[name][row["trial"]]}
        rows.append(row)
    found = target_of("regression", SMALL, rows)

    assert found is not None
    assert found["of_each"] == {"sgd": 0.3, "momentum": 0.2, "adamw": 0.6}
    assert found["goal"] == 0.3


def test_the_clock_is_the_law_of_step_times_with_what_it_assumes() -> None:
    """Half of 32 ms is fixed. Two devices synchronise for a quarter, 1/16 more each further one."""
    timed = [step_seconds(size, devices) for size, devices in ((128, 1), (128, 8), (2048, 8))]

    assert timed == pytest.approx(
        [0.016 * 5, 0.016 * 1.5 + 0.008 * 1.375, 0.016 * 9 + 0.008 * 1.375], rel=1e-5
    )


def test_measuring_is_charged_as_the_meter_counts_it() -> None:
    """Each of the first steps is measured, for 1/8 of its computing: 16 ms, 1 ms an example."""
    step = step_seconds(128, 8) + 0.125 * 0.016 * (1 + 16 / 32 * 1)

    last = trained(Method("sgd", "tradeoff"), 4.5 * step)["last"][-1]

    assert (last["step"], last["examples"]) == (4, 4 * 128)
    assert last["seconds"]["8"] == pytest.approx(4 * step, rel=1e-3)


def test_evaluations_come_after_five_percent_more_time() -> None:
    """At a fixed batch size that is 5 % more steps, from 20 steps on; before, every step."""
    row = trained(Method("sgd"), 140.5 * step_seconds(128, 8))

    due, evaluated = 0.0, 0
    for step in range(1, 141):
        if step >= due or step == 140:
            due, evaluated = max(1.05 * due, step + 1), evaluated + 1
    assert row["last"][-1]["step"] == 140
    assert row["evaluations"] == evaluated
    assert row["last"][-2]["step"] > 140 / 1.05 / 1.05


def test_a_training_that_measures_is_evaluated_at_the_steps_of_one_that_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """2,048 is the least and the largest batch size here, so the policy cannot move it."""
    steps: list[int] = []
    add = Course.add

    def noted(self: Course, evaluation: Row, spent: bool) -> None:
        steps.append(evaluation["step"])
        add(self, evaluation, spent)

    def evaluated(method: Method) -> list[int]:
        steps.clear()
        trained(method, 30.0, batch_size=2048)
        return [*steps]

    monkeypatch.setattr(Course, "add", noted)
    measured = evaluated(Method("sgd", "tradeoff", least=2048))
    plain = evaluated(Method("sgd"))

    assert measured[-1] < plain[-1]  # as measuring is charged
    assert measured[:-1] == plain[: len(measured) - 1]


def test_a_least_batch_size_is_never_left() -> None:
    """In its first steps this training shrinks from 128 to 8, unless it must not."""
    free, kept = (trained(Method("sgd", "tradeoff", least), 0.5)["last"][-1] for least in (0, 128))

    assert free["examples"] / free["step"] < 100
    assert kept["examples"] / kept["step"] >= 128


def test_a_constant_learning_rate_gets_on_where_adascale_shrinks_it() -> None:
    """The batch size shrinks from 128 alike in both, far from the regression's answer."""
    constant = EXTERNALS["sgd, tradeoff, constant lr"].method
    ours, theirs = (
        trained(method, 1.0, learning_rate=0.03)["last"][-1]
        for method in (constant, Method("sgd", "tradeoff"))
    )

    assert (ours["step"], ours["examples"]) == (theirs["step"], theirs["examples"])
    assert ours["loss"] < 0.95 * theirs["loss"]


def test_a_schedule_that_never_moves_trains_as_a_fixed_batch_size() -> None:
    """Until the first decision it does not move; 8 micro-batches have the gradient of the batch."""
    settings: Any = {"workload": "digits", "seed": 3, "learning_rate": 0.3, "batch_size": 64}

    def last(policy: str, budget: float) -> Row:
        return trained(Method("sgd", policy), budget, **settings)["last"][-1]

    fixed, scheduled = last("", 0.35), last("ratio", 0.35)
    again = last("", 1.0001 * scheduled["step"] * step_seconds(64, 8))

    assert fixed["step"] > scheduled["step"] == again["step"]
    assert scheduled["loss"] == pytest.approx(again["loss"], rel=1e-4)


@pytest.mark.parametrize("name", ["regression", "regression_init", "regression_labels"])
def test_the_regressions_loss_is_what_its_answer_leaves(name: str) -> None:
    problem: Any = PROBLEMS[name]
    model = problem.seeded_model(3)

    x, y = problem.draw(400_000, torch.Generator().manual_seed(0))
    with torch.no_grad():
        squares = ((model(x).squeeze(-1) - y).square() / 2).double().numpy()

    error = (squares.mean() - problem.noise**2 / 2 - problem.held_out_loss(model)) / (
        squares.std() / math.sqrt(len(squares))
    )
    assert abs(error) < 4, error


def test_noisy_labels_are_a_fifth_and_stay() -> None:
    clean, noisy = (PROBLEMS[name] for name in ("digits", "digits_labels"))

    (x, y), (_, other), (_, again) = (
        problem.draw(20_000, torch.Generator().manual_seed(0)) for problem in (clean, noisy, noisy)
    )

    assert torch.equal(other, again)
    changed = dict(zip(map(tuple, x.tolist()), (y != other).tolist(), strict=True))
    assert np.mean([*changed.values()]) == pytest.approx(0.2 * 0.9, abs=0.04)


def test_all_workloads_have_the_three_variants_and_submissions_a_control() -> None:
    bases = {name for name, problem in PROBLEMS.items() if not problem.variant_of}

    assert all(each.control in {"", *EXTERNALS} for each in EXTERNALS.values())
    assert {f"{b}_{what}": b for b in bases for what in ("width", "init", "labels")} == VARIANTS


def test_two_ranks_of_decentlam_are_momentum_sgd_and_those_of_adasum_are_not() -> None:
    """A ring of two averages all with all. Both have the same batches and weights."""
    settings = {"learning_rate": 0.1, "batch_size": 64, "momentum": 0.9}

    plain, mixed, combined = (
        trained(Method("momentum", combine=c, ranks=r), 1.0, **settings)
        for c, r in (("", 1), ("decentlam", 2), ("adasum", 2))
    )

    assert [row["last"][-1]["step"] for row in (plain, mixed, combined)] == [32, 32, 32]
    assert mixed["best"] == pytest.approx(plain["best"], rel=1e-3)
    assert combined["best"] != pytest.approx(plain["best"], rel=1e-2)


def rows_of(submission: str, workload: str, seconds: list[list[float]]) -> list[Row]:
    """Trials by study; infinite ones missed the goal, though they were short."""

    def row(study: int, trial: int, time: float) -> Row:
        missed = math.isinf(time)
        end = 1.0 if missed else time
        evaluations = (9, 0.95 * end, 2.0), (10, end, 2.0 if missed else 0.5)
        last = [
            {"step": n, "examples": n, "seconds": {"8": at}, "loss": loss}
            for n, at, loss in evaluations
        ]
        about = {"kind": "trial", "workload": workload, "submission": submission}
        settings = {"batch_size": 8, "learning_rate": 0.1 * (trial + 1)}
        ended = "budget" if missed else "goal"
        return about | {
            "study": study,
            "trial": trial,
            "settings": settings,
            "ended": ended,
            "last": last,
        }

    every = [(s, t, time) for s, times in enumerate(seconds) for t, time in enumerate(times)]
    return [row(*one) for one in every]


def test_a_time_is_the_median_over_studies_of_the_fastest_trial() -> None:
    rows = rows_of("a", "digits", [[3, 2, 9, 9, 9], [math.inf, 5, 9, 9, 9], [4, 9, 9, 9, 9]])
    rows += rows_of("b", "digits", [[math.inf, 8, 9, 9, 9]] * 3)

    times = times_of(rows, EXTERNAL)

    assert times == {"a": {"digits": 4.0}, "b": {"digits": 8.0}}
    assert scored(times) == pytest.approx({"a": 1.0, "b": 2 / 3})


def test_workloads_have_equal_shares_in_a_speed_up_with_their_variants() -> None:
    """Where all have it, it is certain. Speed-ups of 2 and 8 on one, of 4 on the other: 4."""
    sure = mean_speed_up([("digits", 2.0, 4.0), ("mnist", 3.0, 6.0)])
    found = mean_speed_up([("digits", 2.0, 4.0), ("digits_width", 2.0, 16.0), ("mnist", 1.0, 4.0)])

    assert sure == pytest.approx((2.0, 2.0, 2.0, 2))
    assert sure.verdict == "helped"
    assert (found.mean, found.workloads) == (pytest.approx(4.0), 3)


def test_a_workload_that_both_missed_tells_nothing() -> None:
    """Where one missed the goal its time is the budget and a second."""
    both = ("digits", math.inf, math.inf)
    one = [("mnist", 2.0, math.inf), ("regression", math.inf, 2.0)]

    assert mean_speed_up([both]).workloads == 0
    assert str(mean_speed_up([both])) == "?"
    mnist, regression = (PROBLEMS[name].budget + 1 for name, *_ in one)
    expected = math.sqrt(mnist / 2 * 2 / regression)
    assert mean_speed_up([both, *one])[::3] == pytest.approx((expected, 2))


def test_trials_with_the_same_settings_are_compared_by_batch_size() -> None:
    fixed = rows_of("sgd", "digits", [[4.0, math.inf], [2.0, math.inf]])
    moved = rows_of("x", "digits", [[2.0, 5.0], [math.inf, math.inf]])
    for row in fixed + moved:
        row["settings"] |= {"batch_size": 16 if row["trial"] == 0 else 32}

    small, both = (trial_by_trial(fixed + moved, "x", "sgd", s) for s in ([16], [16, 32]))

    assert small.speed_up.mean == pytest.approx(4.0 / 2.0)
    assert (small[1:], both[1:]) == ((1, 0, 1), (1, 1, 1))


def test_one_setting_is_compared_with_the_best_of_five_within_their_budget(
    capsys: pytest.CaptureFixture[str],
) -> None:
    size = Size(externals=("sgd",), selves=("sgd, untuned",), studies=1, trials=2)
    late = 1.2 * PROBLEMS["mnist"].budget
    rows = rows_of("sgd", "digits", [[4.0, 2.0]]) + rows_of("sgd", "mnist", [[3.0, math.inf]])
    rows += rows_of("sgd, untuned", "digits", [[1.0]]) + rows_of("sgd, untuned", "mnist", [[late]])

    (found,) = untuned(rows, size)

    factor = 2.0 / 1.0 * 3.0 / (PROBLEMS["mnist"].budget + 1)
    assert found["speed_up"]["mean"] == pytest.approx(math.sqrt(factor), abs=1e-4)
    assert "| sgd, untuned | sgd | " in capsys.readouterr().out


def test_carbs_is_compared_after_the_first_trials_of_workloads_that_are_whole(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Rows are saved as trainings end, so not in their order."""
    size = Size(externals=(), selves=(), studies=1, trials=1, long=2)
    rows = rows_of("sgd", "digits", [[4.0, 1.0]]) + rows_of(CARBS, "digits", [[2.0, 0.5]])
    rows += rows_of("sgd", "mnist", [[1.0, 1.0]]) + rows_of(CARBS, "mnist", [[9.0]])
    for row in rows:
        row["asked"] = {"learning_rate": 0.1}  # the second trial of CARBS repeats the first

    first, second = tuners(rows[::-1], size)

    assert first["speed_up"]["mean"] == pytest.approx(4.0 / 2.0)
    assert second["speed_up"]["mean"] == pytest.approx(1.0 / 0.5)
    assert second["without_repeats"]["mean"] == pytest.approx(1.0 / 2.0)
    assert "1 studies of 1 workloads" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("factors", "observed"),
    [
        ([[1.2, 1.21, 1.19], [0.9, 0.9], [2.0, 2.01]], "groups"),
        ([[0.5, 2.0], [0.4, 2.5], [0.8, 1.25]], "factors"),  # each group's mean is 1
    ],
)
def test_the_interval_of_a_speed_up_is_the_wider_of_groups_and_of_factors(
    factors: list[list[float]], observed: str
) -> None:
    """It is scipy's interval of the mean of logarithms."""
    mean, *bounds = mean_factor({str(k): each for k, each in enumerate(factors)})

    logs = [np.log(each) for each in factors]
    sample = [each.mean() for each in logs] if observed == "groups" else np.concatenate(logs)
    by_scipy = ttest_1samp(sample, 0.0).confidence_interval(0.95)
    assert np.log(mean) == pytest.approx(np.mean([each.mean() for each in logs]))
    half = (by_scipy.high - by_scipy.low) / 2
    assert np.log(bounds) == pytest.approx([np.log(mean) - half, np.log(mean) + half])
    assert mean_factor({"digits": [2.0, 2.1]})[1] == 0.0  # one workload has none


def test_a_workload_counts_as_faster_only_beyond_the_scatter_of_the_studies() -> None:
    control = rows_of("sgd", "digits", [[8.0], [8.1], [7.9]])
    fast, near, mixed = [[2.0], [2.1], [1.9]], [[7.8]] * 3, [[2.0], [2.1], [math.inf]]

    found = [
        verdicts(control + rows_of("x", "digits", each), {"digits": 1.0}, "sgd")
        for each in (fast, near, mixed)
    ]

    assert found == [["1 / 0 / 0"], ["0 / 0 / 1"], ["0 / 0 / 1"]]
