# SPDX-License-Identifier: Apache-2.0
import pytest
from lab.tune.carbs.studies import ended, study
from optuna.trial import TrialState
from refused import refused

from noisescale.lab.tune.carbs.pareto import Group, front_of, group_by_key, pareto_front


def of_paper(sign: float = 1.0) -> list[tuple[str, float, float]]:
    """Key, cost and output of the paper's example."""
    rows = [("A", 1, 0), ("A", 1, 1), ("B", 2, 0.6), ("C", 3, 0.55), ("C", 3, 0.75), ("D", 4, 0.8)]
    return [(key, cost, sign * output) for key, cost, output in rows]


def keys(groups: list[Group]) -> str:
    return "".join(str(group.key) for group in groups)


def test_the_example_of_the_paper() -> None:
    names, costs, outputs = zip(*of_paper(), strict=True)
    groups = group_by_key(names, costs, outputs)

    assert keys(front_of(groups)) == "ACD"
    assert keys(front_of(groups, conservative=False)) == "ABCD"


@pytest.mark.parametrize("direction", ["maximize", "minimize"])
def test_the_example_as_a_study(direction: str) -> None:
    widths = {"A": 8, "B": 16, "C": 32, "D": 64}
    sign = 1.0 if direction == "maximize" else -1.0
    trials = [
        ended({"width": widths[key]}, output, cost=cost) for key, cost, output in of_paper(sign)
    ]
    made = study(None, trials, direction=direction)

    front = pareto_front(made)
    plain = pareto_front(made.trials, conservative=False, direction=direction)

    assert [point.params["width"] for point in front] == [8, 32, 64]
    assert [point.value for point in front] == pytest.approx([sign * x for x in (0.5, 0.65, 0.8)])
    assert [point.trials for point in front] == [(0, 1), (3, 4), (5,)]
    assert [point.params["width"] for point in plain] == [8, 16, 32, 64]


def test_the_first_member_is_the_best_of_the_cheapest_fifth() -> None:
    groups = [Group(cost, (cost,), (10.0 - cost,)) for cost in range(1, 11)]

    assert keys(front_of(groups)) == "1"
    # Of those, one that was repeated goes first in the conservative set.
    groups[1] = Group(2, (2, 2), (7.0, 7.0))
    assert keys(front_of(groups)) == "2"
    assert keys(front_of(groups, conservative=False)) == "1"


def test_without_a_share_the_first_member_is_the_cheapest() -> None:
    groups = [Group(cost, (cost,), (output,)) for cost, output in [(1, 0.1), (2, 0.5), (3, 0.3)]]

    assert keys(front_of(groups, cheapest=0.0)) == "12"
    assert keys(front_of(groups, cheapest=0.5)) == "2"


def test_a_group_dearer_than_the_cheapest_observations_is_no_gap() -> None:
    """The cheapest observation is in a group whose mean lies above the 20 % quantile."""
    groups = [Group("A", (1, 9), (1, 1)), Group("B", (6, 6, 6), (2, 2, 2))]

    assert keys(front_of(groups)) == "AB"


def test_what_did_not_succeed_is_no_member() -> None:
    trials = [
        ended({"width": 8}, None, TrialState.FAIL),
        ended({"width": 8}, 0.0, TrialState.PRUNED, cost=1.0),
        ended({"width": 8}, float("-inf"), cost=1.0),
        ended({"width": 8}, -1.0, cost=1.0, unrelated_failure=True),
    ]

    assert pareto_front(trials, direction="minimize") == []
    assert front_of([]) == []


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
