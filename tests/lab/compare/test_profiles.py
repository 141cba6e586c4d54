# SPDX-License-Identifier: Apache-2.0
import math
from typing import Any

import numpy as np
import pytest
from refused import refused

from noisescale.lab.compare.profiles import algoperf_score, performance_profile, speed_up

INF = math.inf
TIMES = {"a": {"x": 10.0, "y": 40.0, "z": INF}, "b": {"x": 20.0, "y": 10.0, "z": INF}}


def test_a_profile_is_the_share_of_workloads_within_a_ratio_of_the_best() -> None:
    profile = performance_profile(TIMES)

    assert profile.at(1) == {"a": 1 / 3, "b": 1 / 3}
    assert profile.at(2) == {"a": 1 / 3, "b": 2 / 3}
    assert profile.at(1e9) == {"a": 2 / 3, "b": 2 / 3}
    assert profile.ratios.tolist() == [[1, 4, INF], [2, 1, INF]]
    ratios, shares = profile.curve("b")
    assert (ratios.tolist(), shares.tolist()) == ([1, 2], [1 / 3, 2 / 3])


def test_a_workload_that_nobody_reached_or_a_submission_does_not_have_counts_as_missed() -> None:
    assert performance_profile({"a": {"x": INF}, "b": {"x": INF}}).at(4) == {"a": 0, "b": 0}
    assert performance_profile({"a": {"x": 1, "y": 1}, "b": {"x": 1}}).at(4) == {"a": 1, "b": 0.5}


@pytest.mark.parametrize("max_ratio", [2.0, 4.0, 10.0])
def test_the_score_is_the_integral_of_the_profile(max_ratio: float) -> None:
    """Against a fine midpoint rule on the profile itself."""
    rng = np.random.default_rng(0)
    times = {str(k): {str(w): t for w, t in enumerate(rng.uniform(1, 6, 7))} for k in range(4)}
    profile = performance_profile(times)

    scores = profile.scores(max_ratio)

    cells = 20_000
    width = (max_ratio - 1) / cells
    at = 1 + width * (np.arange(cells) + 0.5)
    for submission, score in scores.items():
        heights = [profile.at(ratio)[submission] for ratio in at[:: cells // 2_000]]
        assert score == pytest.approx(float(np.mean(heights)), abs=2e-3)


def test_the_grid_is_a_trapezoid_rule_on_equally_spaced_ratios() -> None:
    profile = performance_profile({"a": {"x": 1}, "b": {"x": 2.5}})

    # At the ratios 1, 2, 3 and 4 the shares of b are 0, 0, 1 and 1: their trapezoids sum to 1.5.
    assert profile.scores(grid=4) == {"a": 1.0, "b": pytest.approx(0.5)}
    assert profile.scores() == {"a": 1.0, "b": pytest.approx(0.5)}
    # At 1, 2.5 and 4 they are 0, 1 and 1: 0.75 and 1.5.
    assert profile.scores(grid=3)["b"] == pytest.approx(0.75)


@pytest.mark.parametrize(
    ("a", "b", "scores"),
    [
        # A workload does not count where its variant was missed.
        ([10, INF], [20, 20], (0, 1)),
        # Nor a variant where its workload was missed: its time is no longer the best.
        ([INF, 1], [20, 20], (0, 1)),
        # A variant more than four times as slow as the best counts as missed.
        ([10, 41], [20, 10], (0, 1)),
        ([10, 40], [20, 10], (1, 2 / 3)),
        # Ratios are to the best of what is left: the time of "a" would be, but for its variant.
        ([1, INF], [4.5, 20], (0, 0)),
        ([1, INF], [3.5, 20], (0, 1)),
    ],
)
def test_workloads_count_with_variants(a: list[float], b: list[float], scores: list[float]) -> None:
    times = {"a": dict(zip("wv", a, strict=True)), "b": dict(zip("wv", b, strict=True))}

    found = algoperf_score(times, variants={"v": "w"})

    assert (found["a"], found["b"]) == pytest.approx(scores)


@pytest.mark.parametrize(
    ("times", "options", "argument", "requirement"),
    [
        ({}, {}, "times", "have a submission and a workload"),
        ({"a": {"x": -1.0}}, {}, "times['a']", "be positive"),
        ({"a": {"x": 1.0}}, {"variants": {"y": "x"}}, "variants", "name workloads of x"),
        (
            {"a": {"x": 1.0, "y": 1.0, "z": 1.0}},
            {"variants": {"y": "x", "z": "y"}},
            *("variants", "lead to workloads that count"),
        ),
        ({"a": {"x": 1.0}}, {"max_ratio": 1}, "max_ratio", "be above 1 and finite"),
        ({"a": {"x": 1.0}}, {"grid": 1}, "grid", "have two ratios at least"),
    ],
)
def test_bad_times_are_refused(times: Any, options: Any, argument: str, requirement: str) -> None:
    with refused(argument, requirement=requirement):
        algoperf_score(times, **options)


def test_a_speed_up_is_the_geometric_mean_and_a_missed_goal_takes_the_budget_and_a_second() -> None:
    assert speed_up({"x": 10, "y": 10}, {"x": 20, "y": 80}) == pytest.approx(4)
    budgets = {"x": 99.0}
    assert speed_up({"x": INF}, {"x": 50}, budgets) == pytest.approx(0.5)
    assert speed_up({"x": 50}, {"x": INF}, budgets) == pytest.approx(2)


def test_a_speed_up_needs_the_same_workloads_and_budgets_of_missed_goals() -> None:
    with refused("reference", requirement="the workloads of `times`"):
        speed_up({"x": 1}, {"y": 1})
    with refused("budgets", requirement="the seconds for x"):
        speed_up({"x": INF}, {"x": 1})


def test_an_unknown_submission_has_no_curve() -> None:
    with refused("submission", requirement="one of a, b", got="'c'"):
        performance_profile(TIMES).curve("c")
