# SPDX-License-Identifier: Apache-2.0
"""AlgoPerf's protocol, also on its published trials, which are found through NOISESCALE_DATA."""

import csv
import math
import os
from pathlib import Path

import pytest

from noisescale.lab.compare.algoperf import (
    HELD_OUT_VARIANTS,
    RULESETS,
    WORKLOADS,
    Ruleset,
    TrialTime,
    times_to_result,
)
from noisescale.lab.compare.profiles import Times, algoperf_score

ROOT = Path(__file__).parents[3]
DATA = Path(os.environ.get("NOISESCALE_DATA") or ROOT / "data") / "algoperf"

needs_data = pytest.mark.skipif(
    not DATA.is_dir(), reason="needs the published trials of AlgoPerf under NOISESCALE_DATA"
)


def lines(name: str) -> list[dict[str, str]]:
    with (DATA / name).open(newline="") as file:
        return list(csv.DictReader(file))


def published_trials() -> list[TrialTime]:
    def infinite(text: str, reached: bool) -> float:
        return float(text) if reached else math.inf

    return [
        TrialTime(
            line["submission"],
            line["workload"],
            line["study"],
            infinite(line["eval_index"], line["reached"] == "True"),
            infinite(line["seconds_to_target"], line["reached"] == "True"),
        )
        for line in lines("trials_time_to_target.csv")
    ]


def counted(times: Times) -> dict[str, dict[str, float]]:
    """Only the workloads and variants that count: four others were trained too."""
    names = {*WORKLOADS, *HELD_OUT_VARIANTS}
    return {
        submission: {workload: time for workload, time in of.items() if workload in names}
        for submission, of in times.items()
    }


def published_scores() -> dict[str, float]:
    return {
        line["submission"]: float(line["published_score"]) for line in lines("published_scores.csv")
    }


@needs_data
@pytest.mark.parametrize("ties", ["first", "seconds"])
def test_all_published_scores_come_out_to_four_decimals(ties: str) -> None:
    times = counted(times_to_result(published_trials(), ties=ties))

    scores = algoperf_score(times, variants=HELD_OUT_VARIANTS, grid=100)

    assert {name: round(score, 4) for name, score in scores.items()} == published_scores()
    assert len(scores) == 11


@needs_data
def test_the_exact_integral_is_up_to_0_0016_from_the_published_scores() -> None:
    times = counted(times_to_result(published_trials()))

    exact = algoperf_score(times, variants=HELD_OUT_VARIANTS)

    apart = [abs(exact[name] - score) for name, score in published_scores().items()]
    assert 0.0014 < max(apart) < 0.0016


@needs_data
@pytest.mark.parametrize(("ties", "differ"), [("seconds", 0), ("first", 4)])
def test_the_published_medians_break_ties_by_seconds(ties: str, differ: int) -> None:
    times = times_to_result(published_trials(), ties=ties)

    apart = []
    for line in lines("time_to_target_median_v05_external_tuning.csv"):
        submission = line.pop("")
        for workload, text in line.items():
            published = float(text or "inf")
            found = times[submission].get(workload, math.inf)
            apart.append(0 if found == published else abs(found / published - 1))
    assert len(apart) == 11 * 14
    assert sum(each > 1e-4 for each in apart) == differ


@needs_data
def test_variants_that_do_not_count_would_change_the_score() -> None:
    every = times_to_result(published_trials())
    known = {name for of in every.values() for name in of}
    variants = {
        name: next(base for base in WORKLOADS if name.startswith(base))
        for name in known - {*WORKLOADS}
    }

    scores = algoperf_score(every, variants=variants)

    assert len(known) == 18
    assert round(scores["shampoo_submission"], 4) == 0.4333


def study(name: str, *trials: tuple[float, float], workload: str = "w") -> list[TrialTime]:
    return [TrialTime("s", workload, name, *trial) for trial in trials]


MISSED = (math.inf, math.inf)


def test_the_time_of_a_study_is_that_of_the_earliest_evaluation_not_of_the_fewest_seconds() -> None:
    trials = study("a", (3, 50.0), (2, 60.0), MISSED)

    assert times_to_result(trials) == {"s": {"w": 60.0}}


def test_of_equal_evaluations_the_first_counts_or_the_fastest() -> None:
    trials = study("a", (2, 60.0), (2, 50.0))

    assert times_to_result(trials) == {"s": {"w": 60.0}}
    assert times_to_result(trials, ties="seconds") == {"s": {"w": 50.0}}


def test_studies_have_their_median_in_which_a_missed_goal_is_infinite() -> None:
    two = [*study("a", (1, 10.0)), *study("b", (1, 30.0))]

    assert times_to_result(two) == {"s": {"w": 20.0}}
    assert times_to_result([*two, *study("c", MISSED)]) == {"s": {"w": 30.0}}
    assert times_to_result([*study("a", (1, 10.0)), *study("c", MISSED)]) == {"s": {"w": math.inf}}


def test_a_time_above_the_budget_counts_as_missed_and_self_tuning_has_more_time() -> None:
    trials = study("a", (1, 25.0))
    longer = Ruleset(studies=1, trials=1, budget=3.0)

    assert times_to_result(trials, budgets={"w": 10}) == {"s": {"w": math.inf}}
    assert times_to_result(trials, budgets={"w": 25}) == {"s": {"w": 25.0}}
    assert times_to_result(trials, budgets={"w": 10}, ruleset=longer) == {"s": {"w": 25.0}}


def test_a_ruleset_refuses_more_trials_than_it_has_and_warns_of_fewer() -> None:
    rules = RULESETS["external_tuning_v06"]
    whole = [trial for name in "abc" for trial in study(name, *5 * [(1.0, 10.0)])]

    assert times_to_result(whole, ruleset=rules) == {"s": {"w": 10.0}}
    with pytest.raises(ValueError, match=r"at most 5 trials in a study, got 6 of s on w"):
        times_to_result([*whole, *study("a", MISSED)], ruleset=rules)
    with pytest.raises(ValueError, match=r"at most 3 studies, got 4 of s on w"):
        times_to_result([*whole, *study("d", MISSED)], ruleset=rules)
    with pytest.warns(UserWarning, match=r"s on w has 2 of 3 studies and 5 of 5 trials") as told:
        times_to_result(whole[:10], ruleset=rules)
    assert told[0].filename == __file__
    with pytest.warns(UserWarning, match=r"s on w has 3 of 3 studies and 4 of 5 trials in the sm"):
        times_to_result(whole[:-1], ruleset=rules)


def test_a_trial_within_the_budget_counts_though_another_was_earlier_beyond_it() -> None:
    trials = study("a", (2, 20.0), (3, 9.0))

    assert times_to_result(trials, budgets={"w": 10}) == {"s": {"w": 9.0}}


@pytest.mark.parametrize(
    ("name", "studies", "trials", "budget"),
    [
        ("external_tuning_v05", 5, 5, 1.0),
        ("external_tuning_v06", 3, 5, 1.0),
        ("self_tuning_v05", 5, 1, 3.0),
        ("self_tuning_v06", 3, 1, 1.5),
    ],
)
def test_rulesets_are_those_of_the_benchmark(
    name: str, studies: int, trials: int, budget: float
) -> None:
    assert RULESETS[name] == Ruleset(studies, trials, budget)


def test_the_workloads_that_count_are_eight_and_six_have_a_variant() -> None:
    assert len(set(WORKLOADS)) == 8
    assert len(HELD_OUT_VARIANTS) == 6
    assert {*HELD_OUT_VARIANTS.values()} == {*WORKLOADS} - {
        "imagenet_vit",
        "librispeech_deepspeech",
    }
    assert all(variant.startswith(f"{base}_") for variant, base in HELD_OUT_VARIANTS.items())


def test_no_trial_and_an_unknown_rule_for_ties_are_refused() -> None:
    with pytest.raises(ValueError, match="`trials` must have one trial at least, got none"):
        times_to_result([])
    with pytest.raises(ValueError, match='`ties` must be one of "first", "seconds", got \'last\''):
        times_to_result(study("a", MISSED), ties="last")
