# SPDX-License-Identifier: Apache-2.0
from typing import Any

import pytest
from lab.tune.carbs.studies import ended, study
from optuna.trial import TrialState
from refused import refused

from noisescale.lab.tune.carbs.pareto import Group, front_of, pareto_front

PAPER = [("A", 1, 0), ("A", 1, 1), ("B", 2, 0.6), ("C", 3, 0.55), ("C", 3, 0.75), ("D", 4, 0.8)]
"""Key, cost and output of the paper's example."""


@pytest.mark.parametrize("direction", ["maximize", "minimize"])
def test_the_example_as_a_study(direction: str) -> None:
    widths = {"A": 8, "B": 16, "C": 32, "D": 64}
    sign = 1.0 if direction == "maximize" else -1.0
    trials = [
        ended({"width": widths[key]}, sign * output, cost=cost) for key, cost, output in PAPER
    ]
    made = study(None, trials, direction=direction)

    front = pareto_front(made)
    plain = pareto_front(made.trials, conservative=False, direction=direction)

    assert [point.params["width"] for point in front] == [8, 32, 64]
    assert [point.value for point in front] == pytest.approx([sign * x for x in (0.5, 0.65, 0.8)])
    assert [point.trials for point in front] == [(0, 1), (3, 4), (5,)]
    assert [point.params["width"] for point in plain] == [8, 16, 32, 64]


TENTHS = [Group(cost, (cost,), (10.0 - cost,)) for cost in range(1, 11)]
REPEATED = [TENTHS[0], Group(2, (2, 2), (7.0, 7.0)), *TENTHS[2:]]
THREE = [Group(cost, (cost,), (output,)) for cost, output in [(1, 0.1), (2, 0.5), (3, 0.3)]]


@pytest.mark.parametrize(
    ("groups", "options", "front"),
    [
        (TENTHS, {}, [1]),
        (REPEATED, {}, [2]),
        (REPEATED, {"conservative": False}, [1]),
        (THREE, {"cheapest": 0.0}, [1, 2]),
        (THREE, {"cheapest": 0.5}, [2]),
        # The cheapest observation is in a group whose mean lies above the 20 % quantile.
        ([Group(1, (1, 9), (1, 1)), Group(2, (6, 6, 6), (2, 2, 2))], {}, [1, 2]),
        ([], {}, []),
    ],
)
def test_the_first_member_is_the_best_of_the_cheapest_fifth_or_of_another_share(
    groups: list[Group], options: dict[str, Any], front: list[int]
) -> None:
    """Of those, one that was repeated goes first in the conservative set."""
    assert [group.key for group in front_of(groups, **options)] == front


def test_what_did_not_succeed_is_no_member() -> None:
    trials = [
        ended({"width": 8}, None, TrialState.FAIL),
        ended({"width": 8}, 0.0, TrialState.PRUNED, cost=1.0),
        ended({"width": 8}, float("-inf"), cost=1.0),
        ended({"width": 8}, -1.0, cost=1.0, unrelated_failure=True),
    ]

    assert pareto_front(trials, direction="minimize") == []


def test_a_trial_costs_its_attribute_else_its_duration() -> None:
    timed = ended({"width": 8}, 1.0)
    timed.datetime_complete = timed.datetime_start.replace(year=timed.datetime_start.year + 1)

    (point,) = pareto_front([timed], direction="minimize")
    assert point.cost == (timed.datetime_complete - timed.datetime_start).total_seconds()

    (point,) = pareto_front([ended({"width": 8}, 1.0, euros=3)], direction="minimize", cost="euros")
    assert point.cost == 3.0


@pytest.mark.parametrize("found", [0.0, -1.0, float("nan"), float("inf"), "1 h"])
def test_a_cost_that_is_none_is_refused(found: object) -> None:
    with refused("cost", got=f"{found!r} as the user attribute of trial -1"):
        pareto_front([ended({"width": 8}, 1.0, cost=found)], direction="minimize")


def test_a_trial_without_cost_and_duration_is_refused() -> None:
    timeless = ended({"width": 8}, 1.0)
    timeless.datetime_start = None

    with refused("cost", got="None as the duration in seconds of trial -1"):
        pareto_front([timeless], direction="minimize")


def test_directions_that_contradict_are_refused() -> None:
    with refused("direction", requirement='"maximize"', got="'minimize'"):
        pareto_front(study(None, direction="maximize"), direction="minimize")
    with refused("study", got="2 directions"):
        pareto_front(study(None, directions=["minimize", "minimize"]))
    with refused("direction", requirement='one of "minimize", "maximize"'):
        pareto_front([])
