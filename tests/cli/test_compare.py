# SPDX-License-Identifier: Apache-2.0
import json
import math
from collections.abc import Iterable
from pathlib import Path

import pytest
from program import ended, refused, run

GOAL = ("--goal", "val_loss<=0.15")


def course(steps: float) -> list[tuple[float, float]]:
    """Evaluations every 10 steps, at 0.1 from `steps` on."""
    last = int(min(steps, 490)) + 11
    return [(step, 0.1 if step >= steps else 0.9) for step in range(10, last, 10)]


def csv_logger(folder: Path, steps: float, batch_size: float | None = None) -> Path:
    """A run as Lightning's CSVLogger writes it."""
    folder.mkdir(parents=True)
    lines = ["epoch,step,val_loss"]
    lines += [f"{k},{step - 1:.0f},{loss}" for k, (step, loss) in enumerate(course(steps))]
    (folder / "metrics.csv").write_text("\n".join(lines) + "\n")
    if batch_size is not None:
        (folder / "hparams.yaml").write_text(f"batch_size: {batch_size}\nlr: 0.1\n")
    return folder


def long_format(path: Path, trials: Iterable[dict[str, object]]) -> Path:
    """One file with all trials; `steps` is when each reaches the goal."""
    rows = [
        {**{k: v for k, v in trial.items() if k != "steps"}, "step": step, "val_loss": loss}
        for trial in trials
        for step, loss in course(float(str(trial["steps"])))
    ]
    lines = [",".join(rows[0]), *(",".join(map(str, row.values())) for row in rows)]
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_runs_are_compared_over_the_first(here: Path) -> None:
    csv_logger(here / "sgd", 200)
    csv_logger(here / "adam", 100)

    words = " ".join(run("compare", "sgd", "adam", *GOAL).split())

    assert words.startswith("val_loss <= 0.15 first reached by adam, after 99 steps, 10 epochs")
    assert "adam is 2.0 times as fast" in words


def test_of_one_folder_each_run_is_a_submission_unless_they_are_a_sweep(here: Path) -> None:
    for k, steps in enumerate((200, 100)):
        csv_logger(here / "logs" / f"version_{k}", steps)
    for size, steps in ((8, 400), (64, 100)):
        csv_logger(here / "sweep" / f"bs{size}", steps, batch_size=size)
    for name, steps in (("a/1", 300), ("a/2", 200), ("b/1", 100)):
        csv_logger(here / "both" / name, steps)

    def submissions(folder: str) -> list[tuple[str, int]]:
        record = json.loads(run("compare", folder, *GOAL, "--json"))
        return [(each["submission"], each["trials"]) for each in record["standings"]]

    assert submissions("logs") == [("version_1", 1), ("version_0", 1)]
    assert submissions("sweep") == [("sweep", 2)]
    assert submissions("both") == [("b", 1), ("a", 2)]


def test_paths_with_one_name_keep_their_folders(here: Path) -> None:
    for name, steps in (("sgd/version_0", 200), ("adam/version_0", 100)):
        csv_logger(here / name, steps)

    assert "first reached by adam/version_0" in run(
        "compare", "sgd/version_0", "adam/version_0", *GOAL
    )


def test_a_goal_that_no_run_reached_ends_with_code_1_and_says_so(here: Path) -> None:
    csv_logger(here / "sgd", math.inf)

    code, output, errors = ended("compare", "sgd", *GOAL)
    as_json = ended("compare", "sgd", *GOAL, "--json")

    assert (code, errors) == (1, "")
    assert "reached by no run. The nearest was 0.9," in output
    assert as_json[0] == 1
    assert json.loads(as_json[1])["standings"][0]["steps"] is None


def test_several_workloads_have_a_goal_each_and_a_score(here: Path) -> None:
    for name, steps in (("sgd/mnist", 200), ("sgd/text", 100), ("adam/mnist", 100)):
        csv_logger(here / name / "version_0", steps)
    csv_logger(here / "adam/text/version_0", 300)
    goals = ("--goal", "mnist: val_loss<=0.15", "--goal", "text: val_loss<0.2")

    record = json.loads(run("compare", "sgd", "adam", *goals, "--json"))
    output = run("compare", "sgd", "adam", *goals)

    assert record["goals"] == {"mnist": "val_loss <= 0.15", "text": "val_loss < 0.2"}
    assert record["scores"]["sgd"] == pytest.approx((1 + 2 / 3) / 2, abs=0.02)
    assert "AlgoPerf score" in output
    assert "All 2 workloads" in output


def test_a_long_file_names_submissions_workloads_and_studies(here: Path) -> None:
    trials = [
        {"submission": s, "workload": w, "study": study, "trial": 1, "steps": steps}
        for s, w, times in (
            ("sgd", "a", (100, 200, 300)),
            ("adam", "a", (50, 60, 400)),
            ("sgd", "b", (100, 100, 100)),
            ("adam", "b", (100, 400, math.inf)),
        )
        for study, steps in enumerate(times)
    ]
    path = long_format(here / "trials.csv", trials)

    record = json.loads(run("compare", path, *GOAL, "--json"))

    found = {(each["submission"], each["workload"]): each["steps"] for each in record["standings"]}
    assert found == {("adam", "a"): 60, ("sgd", "a"): 200, ("sgd", "b"): 100, ("adam", "b"): 400}


def test_a_sweep_has_its_regimes_in_the_answers(here: Path) -> None:
    trials = [
        {"batch_size": size, "learning_rate": rate, "steps": steps * (1 if rate == 0.2 else 2)}
        for size, steps in ((8, 480), (16, 260), (32, 160), (64, 100), (128, 80), (256, 60))
        for rate in (0.1, 0.2, 0.4)
    ]
    path = long_format(here / "sweep.csv", trials)

    output = run("compare", path, *GOAL)
    whole = run("compare", path, *GOAL, "--details")

    assert "critical batch size" in output
    assert "perfect scaling" in output
    assert "largest useful" in output
    assert "Tables of batch sizes, and of all 18 runs: add --details" in output
    assert "Steps to val_loss <= 0.15 against batch size" not in output
    assert "Steps to val_loss <= 0.15 against batch size" in whole


def test_budgets_clocks_and_details_are_followed(here: Path) -> None:
    csv_logger(here / "sgd", 200)

    assert ended("compare", "sgd", *GOAL, "--budget", "steps=150")[0] == 1
    assert json.loads(run("compare", "sgd", *GOAL, "--by", "epochs", "--json"))["clock"] == "epochs"
    assert "All 1 run" in run("compare", "sgd", *GOAL, "--details")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("nothing", *GOAL), "nothing"),
        (("sgd",), "Missing option '--goal'. See `noisescale compare --help`."),
        (("sgd", "--goal", "val_loss"), "`--goal` must be a metric's name and its value, got"),
        (("sgd", "--goal", "val_acc>=1"), "`--goal` must name a metric of sgd, got 'val_acc'"),
        (("sgd", *GOAL, "--goal", "a: b=1"), "`--goal` must name a workload in each of 2 goals"),
        (("sgd", *GOAL, *GOAL), "`--goal` must be given once for each workload, got two without"),
        (
            ("sgd", "--goal", "a: val_loss=1", "--goal", "b: val_loss=1"),
            "`--goal` must name the workload of each run, got a, b for",
        ),
        (("sgd", *GOAL, "--by", "hours"), "`--by` must be known of every trial that reached its"),
        (("sgd", *GOAL, "--by", "days"), '`--by` must be one of "steps", "examples", "epochs"'),
        (("sgd", *GOAL, "--budget", "steps"), "`--budget` must be written as name=value, got"),
        (("sgd", *GOAL, "--budget", "steps=x"), "`--budget` must be a number of steps, examples"),
        (("sgd", *GOAL, "--budget", "days=1"), '`--budget` must be one of "steps", "examples"'),
        (("sgd", *GOAL, "--reference", "x"), "`--reference` must be one of sgd, got 'x'"),
        (("sgd", *GOAL, "--variant", "x=y"), "`--variant` must name workloads among"),
        (("sgd", *GOAL, "--confidence", "2"), "`--confidence` must lie between 0 and 1"),
        (("sgd", *GOAL, "--html", "no/x.html"), "`--html` must be in a folder that exists, got"),
    ],
)
def test_bad_options_are_refused(here: Path, arguments: tuple[str, ...], message: str) -> None:
    csv_logger(here / "sgd", 200)

    assert message in refused("compare", *arguments)


def test_a_folder_that_is_given_twice_is_refused(here: Path) -> None:
    """Its runs would count as repetitions, or as two submissions."""
    csv_logger(here / "sgd", 200)
    csv_logger(here / "adam", 200)

    said = refused("compare", "sgd", "adam", "adam/../sgd", *GOAL)

    assert "`RUNS` must be different folders or files, got sgd and adam/../sgd" in said


def test_optimizers_of_one_sweep_are_no_repetitions(here: Path) -> None:
    """The slower one of two optimizers would stand for both."""
    trials = [
        {"optimizer": name, "batch_size": size, "steps": steps * 64 // size}
        for name, steps in (("sgd", 100), ("adam", 200))
        for size in (32, 64)
    ]
    long_format(here / "sweep.csv", trials)

    found = json.loads(run("compare", "sweep.csv", *GOAL, "--json"))

    assert [(each["submission"], each["steps"]) for each in found["standings"]] == [
        ("sgd", 100),
        ("adam", 200),
    ]


def test_optimizers_of_one_submission_are_no_repetitions(here: Path) -> None:
    """The best of them stands for the submission, not the slower one of both."""
    for name, runs in (("ours", {"sgd": 100, "adam": 200}), ("theirs", {"sgd": 300, "lars": 400})):
        trials = [{"optimizer": each, "steps": steps} for each, steps in runs.items()]
        long_format(here / f"{name}.csv", trials)

    found = json.loads(run("compare", "ours.csv", "theirs.csv", *GOAL, "--json"))

    assert [(each["submission"], each["steps"]) for each in found["standings"]] == [
        ("ours.csv", 100),
        ("theirs.csv", 300),
    ]
