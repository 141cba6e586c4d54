# SPDX-License-Identifier: Apache-2.0
"""`noisescale.compare` on folders, files and trials."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from courses import trial

from noisescale import compare
from noisescale.history.metrics import Goal
from noisescale.refusal import Refusal, TypeRefusal

GOAL = "val_loss<=0.15"


def csv_logger(folder: Path, steps: float, metric: str = "val_loss") -> Path:
    """A run as Lightning's CSVLogger writes it, at the goal after some steps of 500."""
    folder.mkdir(parents=True)
    losses = [(at, 0.1 if at >= steps else 0.9) for at in range(10, 501, 10)]
    lines = [f"epoch,step,{metric}", *(f"{at},{at},{loss}" for at, loss in losses)]
    (folder / "metrics.csv").write_text("\n".join(lines) + "\n")
    return folder


def test_paths_are_submissions_and_one_path_has_them_below_it(tmp_path: Path) -> None:
    sgd, adam = csv_logger(tmp_path / "sgd", 200), csv_logger(tmp_path / "adam", 100)

    of_two = compare([sgd, str(adam)], GOAL)
    of_one = compare(tmp_path, GOAL)

    assert [each.submission for each in of_two.standings] == ["adam", "sgd"]
    assert of_two.reference == "sgd"
    assert of_one.reference == "adam"
    assert of_two.document().headline == "adam reached val_loss <= 0.15 first"


def test_a_goal_is_a_text_a_goal_or_one_for_each_workload(tmp_path: Path) -> None:
    for workload in ("a", "b"):
        csv_logger(tmp_path / "sgd" / workload, 100)

    goals = {"a": GOAL, "b": Goal.read("val_loss<0.95")}
    found = compare(tmp_path / "sgd", goals)

    assert compare(tmp_path / "sgd", Goal.read(GOAL)).goals == {"": Goal.read(GOAL)}
    assert found.goals == {"a": Goal.read(GOAL), "b": Goal.read("val_loss<0.95")}
    assert [each.best.at("steps") for each in found.standings] == [100, 10]


def test_trials_are_compared_as_they_are() -> None:
    trials = [trial(steps, submission=name) for name, steps in (("a", 200), ("b", 100))]

    found = compare(iter(trials), "loss<=0.1", reference="b", confidence=0.5)

    assert [each.submission for each in found.standings] == ["b", "a"]
    assert (found.reference, found.confidence) == ("b", 0.5)


def test_budgets_count_hours_and_what_counts_may_be_hours() -> None:
    hour = trial(100, seconds=36.0, submission="a")

    assert compare([hour], "loss<=0.1", budget={"hours": 1}).reached
    assert compare([hour], "loss<=0.1", budget={"seconds": 3600, "steps": 100}).reached
    assert not compare([hour], "loss<=0.1", budget={"hours": 0.99}).reached
    assert not compare([hour], "loss<=0.1", budget={"steps": 99}).reached
    assert compare([hour], "loss<=0.1", by="hours").clock == "seconds"
    assert compare([hour], "loss<=0.1", by="steps").clock == "steps"


def test_the_answer_shows_itself_as_text_json_page_and_in_a_notebook(tmp_path: Path) -> None:
    found = compare([trial(100, submission="a"), trial(math.inf, submission="b")], "loss<=0.1")

    page = found.to_html(tmp_path / "report.html").read_text(encoding="utf-8")

    assert found.to_text().startswith(
        "a reached loss <= 0.1 first\n\nloss <= 0.1  first reached by"
    )
    assert json.loads(found.to_json())["standings"][1]["submission"] == "b"
    assert "<h1>a reached loss &lt;= 0.1 first</h1>" in page
    assert "a reached loss &lt;= 0.1 first" in found._repr_html_()


def test_several_workloads_have_scores_and_variants_check_them() -> None:
    trials = [
        trial(steps, submission=name, workload=workload)
        for name, workload, steps in (
            ("a", "x", 100),
            ("a", "x_wide", 100),
            ("b", "x", 200),
            ("b", "x_wide", math.inf),
        )
    ]

    found = compare(trials, "loss<=0.1", variants={"x_wide": "x"})

    assert found.scores == {"a": 1, "b": 0}


@pytest.mark.parametrize(
    ("options", "argument", "requirement", "got"),
    [
        ({"goal": {}}, "goal", "have one goal at least", "none"),
        ({"goal": {"": GOAL, "a": GOAL}}, "goal", "name a workload in each of 2 goals", "one with"),
        ({"goal": {"x": "loss<=0.1"}}, "goal", "have one for the workload ''", "goals for x"),
        ({"goal": "loss"}, "goal", "be a metric's name and its value", "'loss'"),
        ({"by": "days"}, "by", "be steps, examples, epochs or hours", "'days'"),
        ({"by": "hours"}, "by", "be known of every trial that reached its goal", "time, which is"),
        ({"budget": {"hours": 1, "seconds": 1}}, "budget", "be given once", "hours and seconds"),
        ({"budget": {"steps": 0}}, "budget", "be positive", "0 steps"),
        ({"runs": []}, "runs", "have one trial at least", "none"),
        ({"reference": "x"}, "reference", "be one of a", "'x'"),
        ({"variants": {"x": "y"}}, "variants", "name workloads among", "'x'"),
    ],
)
def test_bad_arguments_are_refused(
    options: dict[str, Any], argument: str, requirement: str, got: str
) -> None:
    given = {"runs": [trial(100, submission="a")], "goal": "loss<=0.1"} | options

    with pytest.raises(Refusal) as refused:
        compare(**given)

    assert refused.value.arguments == (argument,)
    assert refused.value.requirement.startswith(requirement)
    assert refused.value.got.startswith(got)


def test_what_is_neither_a_path_nor_a_trial_nor_a_goal_is_refused(tmp_path: Path) -> None:
    one = trial(100)

    with pytest.raises(TypeRefusal, match="`runs` must be paths or trials, got 1 of one kind"):
        compare([tmp_path, one], "loss<=0.1")
    with pytest.raises(TypeRefusal, match="`goal` must be a text or a"):
        compare([one], 0.1)  # type: ignore[arg-type]  # refused
