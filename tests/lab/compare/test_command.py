# SPDX-License-Identifier: Apache-2.0
import json
import math
import shutil
from collections.abc import Iterable
from pathlib import Path

import pytest
from goldens.make import INPUTS, OUTPUTS
from program import ended, refused, run

from noisescale.bounded import Bounded
from noisescale.report.numbers import with_bounds

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

    assert words.startswith(
        "adam reached val_loss <= 0.15 first"
        " val_loss <= 0.15 first reached by adam, after 99 steps, 10 epochs"
    )
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
    assert "\nMore: 2 tables: add --details\n" in output
    assert "\nSteps to val_loss <= 0.15 against batch size" not in output
    assert "\nSteps to val_loss <= 0.15 against batch size: sweep.csv\n" in whole


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
        (("sgd", *GOAL, "--by", "days"), "`--by` must be steps, examples, epochs or hours, got"),
        (("sgd", *GOAL, "--budget", "steps"), "`--budget` must be written as name=value, got"),
        (
            ("sgd", *GOAL, "--budget", "seconds=1", "--budget", "hours=1"),
            "`--budget` must be given once for each unit, got hours and seconds.",
        ),
        (
            ("sgd", *GOAL, "--budget", "steps=1", "--budget", "steps=2"),
            "`--budget` must be given once for each unit, got two limits of steps.",
        ),
        (("sgd", *GOAL, "--budget", "=5"), "`--budget` must be written as name=value, got '=5'"),
        (("sgd", *GOAL, "--variant", "a="), "`--variant` must be written as name=value, got 'a='"),
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


def timed_csv(path: Path, hours: float) -> Path:
    """A file of one submission that reaches the goal at step 200."""
    lines = ["submission,step,seconds,val_loss"]
    lines += [f"{path.stem},{step},{hours * 18 * step},{loss}" for step, loss in course(200)]
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.mark.parametrize(
    ("budget", "reached"), [("hours=2", True), ("hours=1.9", False), ("seconds=7200", True)]
)
def test_a_budget_may_be_in_hours(here: Path, budget: str, reached: bool) -> None:
    path = timed_csv(here / "sgd.csv", 2.0)

    code, output, _ = ended("compare", path, *GOAL, "--budget", budget, "--by", "hours", "--json")

    record = json.loads(output)
    assert code == (0 if reached else 1)
    assert record["clock"] == "seconds"
    assert record["standings"][0]["seconds"] == (7200 if reached else None)


def test_reference_confidence_and_variants_are_followed(here: Path) -> None:
    for name, steps in (("sgd/a", 200), ("sgd/b", 100), ("adam/a", 100), ("adam/b", 450)):
        csv_logger(here / name / "0", steps)
    goals = ("--goal", "a: val_loss<=0.15", "--goal", "b: val_loss<=0.15")

    record = json.loads(
        run(
            *("compare", "sgd", "adam", *goals, "--reference", "adam", "--variant", "b = a"),
            *("--confidence", "0.5", "--json"),
        )
    )

    assert (record["reference"], record["confidence"]) == ("adam", 0.5)
    assert record["scores"] == {"sgd": 1, "adam": 0}


def test_each_workload_may_have_a_metric_of_its_own(here: Path) -> None:
    """The runs of a workload are read for its metric only, and a metric's name may have a colon."""
    for name, steps in (("sgd/a", 200), ("sgd/b", 100)):
        csv_logger(here / name / "0", steps)
    for file in here.glob("*/b/0/metrics.csv"):
        lines = file.read_text().replace("val_loss", "val_loss,acc").splitlines()
        rows = [f"{line},{1 - float(line.split(',')[-1])}" for line in lines[1:]]
        file.write_text("\n".join([lines[0], *rows]) + "\n")
    goals = ("--goal", " a : val_loss<=0.15", "--goal", "b: acc>=0.85")

    record = json.loads(run("compare", "sgd", *goals, "--json"))

    assert record["goals"] == {"a": "val_loss <= 0.15", "b": "acc >= 0.85"}
    assert [(each["workload"], each["steps"]) for each in record["trials"]] == [
        ("a", 199),
        ("b", 99),
    ]


def test_two_workloads_with_one_metric_have_their_runs_once(here: Path) -> None:
    for name in ("sgd/a", "sgd/b"):
        csv_logger(here / name / "0", 100)
    goals = ("--goal", "a: val_loss<=0.15", "--goal", "b: val_loss<=0.15")

    record = json.loads(run("compare", "sgd", *goals, "--json"))

    assert [each["trials"] for each in record["standings"]] == [1, 1]


def test_the_workload_may_be_a_submission_s_folder_and_only_one(here: Path) -> None:
    for name in ("a/0", "other/b/0", "both/a/b/0"):
        csv_logger(here / name, 100)
    goals = ("--goal", "a: val_loss<=0.15", "--goal", "b: val_loss<=0.15")

    record = json.loads(run("compare", "a", "other", *goals, "--json"))

    assert [(each["submission"], each["workload"]) for each in record["standings"]] == [
        ("a", "a"),
        ("other", "b"),
    ]
    assert "`--goal` must name the workload of each run, got a, b for" in refused(
        "compare", "both", *goals
    )


def test_what_lies_in_one_folder_is_told_apart_by_run_unless_all_of_it_is_in_folders(
    here: Path,
) -> None:
    for name in ("one/a/0", "one/a/1", "mixed/a/0", "mixed/b"):
        csv_logger(here / name, 100)
    csv_logger(here / "some" / "0", 100)
    for size in (8, 16):
        csv_logger(here / "some" / str(size), 100, batch_size=size)

    def submissions(folder: str) -> set[str]:
        record = json.loads(run("compare", folder, *GOAL, "--json"))
        return {each["submission"] for each in record["standings"]}

    assert submissions("one") == {"a/0", "a/1"}
    assert submissions("mixed") == {"a/0", "b"}
    assert submissions("some") == {"0", "8", "16"}


def test_a_file_may_name_the_workload_of_each_goal(here: Path) -> None:
    trials = [{"submission": "a", "workload": w, "steps": 100} for w in ("x", "y")]
    path = long_format(here / "trials.csv", trials)
    goals = ("--goal", "x: val_loss<=0.15", "--goal", "y: val_loss<=0.95")

    record = json.loads(run("compare", path, *goals, "--json"))

    assert [(each["workload"], each["steps"]) for each in record["standings"]] == [
        ("x", 100),
        ("y", 10),
    ]


def test_names_of_runs_begin_with_their_submission_where_there_are_several(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("größe/0", "adam/0"):
        csv_logger(here / name, 100)
    monkeypatch.chdir(here / "größe")

    output = run("compare", ".", "../adam", *GOAL, "--json")
    alone = json.loads(run("compare", ".", *GOAL, "--json"))

    assert [each["trial"] for each in json.loads(output)["trials"]] == ["größe/0", "adam/0"]
    assert '"größe/0"' in output
    assert [each["trial"] for each in alone["trials"]] == ["0"]


def test_the_path_of_a_report_is_printed(here: Path) -> None:
    csv_logger(here / "sgd", 100)

    assert "\nReport: x.html\n" in run("compare", "sgd", *GOAL, "--html", "x.html")
    json.loads(run("compare", "sgd", *GOAL, "--html", "x.html", "--json"))


def test_where_folders_of_workloads_come_first_the_next_ones_are_submissions(here: Path) -> None:
    for name, steps in (("m/sgd", 100), ("m/adam", 50), ("t/sgd", 100), ("t/adam/0", 50)):
        csv_logger(here / "runs" / name, steps)
    goals = ("--goal", "m: val_loss<=0.15", "--goal", "t: val_loss<=0.15")

    record = json.loads(run("compare", "runs", *goals, "--json"))

    assert [(each["submission"], each["workload"]) for each in record["standings"]] == [
        ("adam", "m"),
        ("sgd", "m"),
        ("adam", "t"),
        ("sgd", "t"),
    ]


def test_a_workload_of_a_file_that_has_no_goal_is_named(here: Path) -> None:
    trials = [{"submission": "a", "workload": w, "steps": 100} for w in ("x", "y")]
    path = long_format(here / "trials.csv", trials)

    record = json.loads(run("compare", path, "--goal", "x: val_loss<=0.15", "--json"))

    ((name, reason),) = [(each["trial"], each["reason"]) for each in record["left_out"]]
    assert name == "y"
    assert reason.startswith("`goal` must have one for the workload 'y' of y, got goals for x.")
    assert [each["workload"] for each in record["standings"]] == ["x"]
    assert "`--goal` must have one for the workload 'x' of" in refused(
        "compare", path, "--goal", "z: val_loss<=0.15"
    )
    assert "`--goal` must name workloads of runs, got 'z', which no run names." in refused(
        "compare", path, "--goal", "x: val_loss<=0.15", "--goal", "z: val_loss<=0.15"
    )


def test_time_that_is_not_known_is_called_time(here: Path) -> None:
    csv_logger(here / "sgd", 100)

    assert "got time, which is not known of sgd" in refused(
        "compare", "sgd", *GOAL, "--by", "hours"
    )


def test_a_sweep_has_one_critical_batch_size_in_fit_and_compare(tmp_path: Path) -> None:
    """The stored sweep of the goldens, whose own table `noisescale sweep` writes."""
    shutil.copytree(INPUTS / "sweep" / "sweep", tmp_path / "sweep")
    compared = run("compare", tmp_path / "sweep/trials.csv", "--goal", "val_loss<=0.35", "--json")
    fitted = json.loads(run("fit", tmp_path / "sweep" / "sweep.csv", "--json"))
    shown = (OUTPUTS / "sweep" / "sweep.txt").read_text()

    (found,) = json.loads(compared)["sweeps"]
    critical = Bounded(**fitted["critical_batch_size"])
    assert found["regimes"]["critical_batch_size"] == fitted["critical_batch_size"]
    assert f": {with_bounds(critical)} examples" in shown


def test_a_published_sweep_has_one_critical_batch_size_in_fit_and_compare(tmp_path: Path) -> None:
    """Steps of the 85M model to loss 3.42, Zhang et al. 2024, arXiv:2410.21676."""
    sizes = [64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384]
    steps = [46000, 23000, 13282, 7000, 3840, 2528, 1917, 1600, 1600]
    pairs = list(zip(sizes, steps, strict=True))
    points = tmp_path / "points.csv"
    points.write_text("batch_size,steps\n" + "".join(f"{b},{s}\n" for b, s in pairs))
    trials = tmp_path / "trials.csv"
    searched = ((0.5, 3.9), (1, 3.4), (2, 3.9))  # beside the best rate the goal is missed
    trials.write_text(
        "batch_size,learning_rate,step,loss\n"
        + "".join(f"{b},{rate},{s},{loss}\n" for b, s in pairs for rate, loss in searched)
    )
    alone = tmp_path / "alone.csv"
    alone.write_text("batch_size,step,loss\n" + "".join(f"{b},{s},3.4\n" for b, s in pairs))

    (found,) = json.loads(run("compare", trials, "--goal", "loss<=3.42", "--json"))["sweeps"]

    fitted = json.loads(run("fit", points, "--json"))["critical_batch_size"]
    assert found["regimes"]["critical_batch_size"] == fitted
    assert fitted["low"] < 2190.6 < fitted["high"]  # the authors' fit

    said = json.loads(run("compare", alone, "--goal", "loss<=3.42", "--json"))
    (unsearched,) = said["sweeps"]
    wider = unsearched["regimes"]["critical_batch_size"]
    assert wider["low"] < 0.75 * fitted["low"]
    assert wider["high"] > 1.5 * fitted["high"]
    assert any(
        "At 9 of 9 batch sizes the learning rate was not searched" in w for w in said["warnings"]
    )
