# SPDX-License-Identifier: Apache-2.0
"""`noisescale.compare` on folders, files and trials."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from courses import rivals, trial, write_run
from refused import refused

from noisescale import compare
from noisescale.history.metrics import Goal
from noisescale.refusal import TypeRefusal

GOAL = "loss<=0.1"


def test_paths_are_submissions_and_one_path_has_them_below_it(tmp_path: Path) -> None:
    sgd, adam = write_run(tmp_path / "sgd", 200), write_run(tmp_path / "adam", 100)

    of_two = compare([sgd, str(adam)], GOAL)
    of_one = compare(tmp_path, GOAL)

    assert [each.submission for each in of_two.standings] == ["adam", "sgd"]
    assert of_two.reference == "sgd"
    assert of_one.reference == "adam"
    assert of_two.document().headline == "adam reached loss <= 0.1 first"


def test_a_goal_is_a_text_a_goal_or_one_for_each_workload(tmp_path: Path) -> None:
    for workload in ("a", "b"):
        write_run(tmp_path / "sgd" / workload, 100)
    goals = {"a": Goal.read(GOAL), "b": Goal.read("loss<0.95")}

    found = compare(tmp_path / "sgd", {"a": GOAL, "b": goals["b"]})

    assert compare(tmp_path / "sgd", Goal.read(GOAL)).goals == {"": Goal.read(GOAL)}
    assert found.goals == goals
    assert [each.best.at("steps") for each in found.standings] == [100, 10]


def test_trials_are_compared_as_they_are() -> None:
    found = compare(iter(rivals({"a": 200, "b": 100})), GOAL, reference="b", confidence=0.5)

    assert [each.submission for each in found.standings] == ["b", "a"]
    assert (found.reference, found.confidence) == ("b", 0.5)


@pytest.mark.parametrize(
    ("budget", "reached"),
    [
        ({"hours": 1}, True),
        ({"hours": 0.99}, False),
        ({"seconds": 3600, "steps": 100}, True),
        ({"steps": 99}, False),
    ],
)
def test_budgets_and_what_counts_may_be_in_hours(budget: dict[str, float], reached: bool) -> None:
    hour = [trial(100, seconds=36.0, submission="a")]

    assert compare(hour, GOAL, budget=budget).reached is reached
    assert compare(hour, GOAL, by="hours").clock == "seconds"
    assert compare(hour, GOAL, by="steps").clock == "steps"


def test_the_answer_shows_itself_as_text_json_page_and_in_a_notebook(tmp_path: Path) -> None:
    found = compare(rivals({"a": 100, "b": math.inf}), GOAL)

    page = found.to_html(tmp_path / "report.html").read_text(encoding="utf-8")

    assert found.to_text().startswith("a reached loss <= 0.1 first\n\nloss <= 0.1  first")
    assert json.loads(found.to_json())["standings"][1]["submission"] == "b"
    assert "<h1>a reached loss &lt;= 0.1 first</h1>" in page
    assert "a reached loss &lt;= 0.1 first" in found._repr_html_()


@pytest.mark.parametrize(
    ("options", "argument", "requirement", "got"),
    [
        ({"goal": {}}, "goal", "have one goal at least", "none"),
        ({"goal": {"": GOAL, "a": GOAL}}, "goal", "name a workload in each of 2 goals", "one with"),
        ({"goal": {"x": GOAL}}, "goal", "have one for the workload ''", "goals for x"),
        ({"goal": "loss"}, "goal", "be a metric's name and its value", "'loss'"),
        ({"by": "days"}, "by", "be steps, examples, epochs or hours", "'days'"),
        ({"by": "hours"}, "by", "be known of every trial that reached its goal", "time, which is"),
        ({"budget": {"hours": 1, "seconds": 1}}, "budget", "be given once", "hours and seconds"),
        ({"budget": {"steps": 0}}, "budget", "be positive", "0 steps"),
        ({"runs": []}, "runs", "have one trial at least", "none"),
        ({"reference": "x"}, "reference", "be one of a", "'x'"),
        ({"variants": {"x": "y"}}, "variants", "name workloads among", "'x'"),
        ({"confidence": 2}, "confidence", "lie between 0 and 1", "2"),
    ],
)
def test_bad_arguments_are_refused(options: Any, argument: str, requirement: str, got: str) -> None:
    given = {"runs": rivals({"a": 100}), "goal": GOAL} | options

    with refused(argument, requirement=requirement) as error:
        compare(**given)

    assert error.value.got.startswith(got)


def test_what_is_neither_a_path_nor_a_trial_nor_a_goal_is_refused(tmp_path: Path) -> None:
    with refused("runs", error=TypeRefusal, requirement="paths or trials"):
        compare([tmp_path, trial(100)], GOAL)
    with refused("goal", error=TypeRefusal, got="0.1"):
        compare([trial(100)], 0.1)  # type: ignore[arg-type]  # refused
