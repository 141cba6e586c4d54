# SPDX-License-Identifier: Apache-2.0
"""AlgoPerf's protocol, also on its published trials, which are found through NOISESCALE_DATA."""

import csv
import math
import os
from pathlib import Path

import pytest
from refused import refused

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
    def at(line: dict[str, str], clock: str) -> float:
        return float(line[clock]) if line["reached"] == "True" else math.inf

    return [
        TrialTime(
            *(line[name] for name in ("submission", "workload", "study")),
            *(at(line, clock) for clock in ("eval_index", "seconds_to_target")),
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
    """The exact integral is up to 0.0016 from them."""
    times, published = counted(times_to_result(published_trials(), ties=ties)), published_scores()

    scores = algoperf_score(times, variants=HELD_OUT_VARIANTS, grid=100)
    exact = algoperf_score(times, variants=HELD_OUT_VARIANTS)

    assert {name: round(score, 4) for name, score in scores.items()} == published
    assert len(scores) == 11
    apart = max(abs(exact[name] - score) for name, score in published.items())
    assert ties == "seconds" or 0.0014 < apart < 0.0016


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
    """Of equal evaluations the first counts, or the fastest."""
    trials, equal = study("a", (3, 50.0), (2, 60.0), MISSED), study("a", (2, 60.0), (2, 50.0))

    assert times_to_result(trials) == times_to_result(equal) == {"s": {"w": 60.0}}
    assert times_to_result(equal, ties="seconds") == {"s": {"w": 50.0}}


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
    within = [*trials, *study("a", (3, 9.0))]  # another was earlier beyond it
    assert times_to_result(within, budgets={"w": 10}) == {"s": {"w": 9.0}}


def test_a_ruleset_refuses_more_trials_than_it_has_and_warns_of_fewer() -> None:
    rules = RULESETS["external_tuning_v06"]
    whole = [trial for name in "abc" for trial in study(name, *5 * [(1.0, 10.0)])]

    assert times_to_result(whole, ruleset=rules) == {"s": {"w": 10.0}}
    with refused("trials", requirement="at most 5 trials", got="6 of s on w"):
        times_to_result([*whole, *study("a", MISSED)], ruleset=rules)
    with refused("trials", requirement="at most 3 studies", got="4 of s on w"):
        times_to_result([*whole, *study("d", MISSED)], ruleset=rules)
    with pytest.warns(UserWarning, match=r"s on w has 2 of 3 studies and 5 of 5 trials") as told:
        times_to_result(whole[:10], ruleset=rules)
    assert told[0].filename == __file__
    with pytest.warns(UserWarning, match=r"s on w has 3 of 3 studies and 4 of 5 trials in the sm"):
        times_to_result(whole[:-1], ruleset=rules)


def test_rulesets_are_those_of_the_benchmark() -> None:
    assert {
        "external_tuning_v05": Ruleset(5, 5, 1.0),
        "external_tuning_v06": Ruleset(3, 5, 1.0),
        "self_tuning_v05": Ruleset(5, 1, 3.0),
        "self_tuning_v06": Ruleset(3, 1, 1.5),
    } == RULESETS


def test_the_workloads_that_count_are_eight_and_six_have_a_variant() -> None:
    assert len(set(WORKLOADS)) == 8
    assert len(HELD_OUT_VARIANTS) == 6
    assert {*HELD_OUT_VARIANTS.values()} == {*WORKLOADS} - {
        "imagenet_vit",
        "librispeech_deepspeech",
    }
    assert all(variant.startswith(f"{base}_") for variant, base in HELD_OUT_VARIANTS.items())


def test_no_trial_and_an_unknown_rule_for_ties_are_refused() -> None:
    with refused("trials", got="none"):
        times_to_result([])
    with refused("ties", requirement='one of "first", "seconds"', got="'last'"):
        times_to_result(study("a", MISSED), ties="last")
