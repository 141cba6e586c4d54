# SPDX-License-Identifier: Apache-2.0
"""Which runs are of one submission and workload; and what users have beside good runs."""

import math
from collections.abc import Iterable
from pathlib import Path

import pytest
from courses import write_run, write_trials
from refused import refused
from tiers import slow_but

from noisescale.lab.compare.compare import compare
from noisescale.lab.compare.comparison import Comparison

GOAL = "loss<=0.1"
GOALS = {"a": GOAL, "b": GOAL}


def write_runs(root: Path, names: Iterable[str], steps: float = 100) -> None:
    for name in names:
        write_run(root / name, steps)


def counted(found: Comparison) -> list[tuple[str, str, int]]:
    """Of each submission and workload the number of runs."""
    return [(each.submission, each.workload, len(each.outcomes)) for each in found.standings]


def fastest(found: Comparison) -> dict[str, float]:
    return {each.submission: each.best.at("steps") for each in found.standings}


def left_out(found: Comparison) -> list[tuple[str, str]]:
    return [(trial.name, trial.fault) for trial in found.left_out]


@pytest.mark.parametrize(
    ("runs", "submissions"),
    [
        ({"0": 200, "1": 100}, {"1": 1, "0": 1}),
        ({"a/1": 300, "a/2": 200, "b/1": 100}, {"b": 1, "a": 2}),
        ({"a/0": 200, "a/1": 100}, {"a/1": 1, "a/0": 1}),
        ({"a/0": 200, "b": 100}, {"b": 1, "a/0": 1}),
    ],
    ids=["runs", "folders", "one folder", "a run beside a folder"],
)
def test_of_one_folder_each_run_is_a_submission_unless_all_are_in_folders(
    tmp_path: Path, runs: dict[str, float], submissions: dict[str, int]
) -> None:
    for name, steps in runs.items():
        write_run(tmp_path / name, steps)

    found = compare(tmp_path, GOAL)

    assert counted(found) == [(name, "", count) for name, count in submissions.items()]


def test_runs_at_several_batch_sizes_are_one_sweep_if_all_are_known(tmp_path: Path) -> None:
    for size in (8, 64):
        write_run(tmp_path / f"sweep/{size}", 100, batch_size=size)
        write_run(tmp_path / f"some/{size}", 100, batch_size=size)
    write_run(tmp_path / "some/0", 100)

    assert counted(compare(tmp_path / "sweep", GOAL)) == [("sweep", "", 2)]
    assert {*fastest(compare(tmp_path / "some", GOAL))} == {"0", "8", "64"}


@pytest.mark.parametrize("size", [None, (32, 64)])
def test_optimizers_of_a_file_are_submissions(tmp_path: Path, size: tuple[int, int] | None) -> None:
    """Otherwise the luckiest seed, or the slower optimizer, would stand for both."""
    trials = [
        {"optimizer": name, "batch_size": each, "learning_rate": rate, "seed": seed, "steps": steps}
        for name, steps in (("sgd", 200), ("adam", 100))
        for each in size or (32,)
        for rate in (0.1, 0.2)
        for seed in range(2)
    ]

    found = compare(write_trials(tmp_path / "runs.csv", trials), GOAL)

    count = 4 * len(size or (32,))
    assert counted(found) == [("adam", "", count), ("sgd", "", count)]


def test_optimizers_of_one_submission_are_no_repetitions(tmp_path: Path) -> None:
    """The best of them stands for the submission, not the slower one of both."""
    files = [
        write_trials(tmp_path / name, [{"optimizer": o, "steps": steps} for o, steps in of.items()])
        for name, of in (("ours", {"sgd": 100, "adam": 200}), ("theirs", {"sgd": 300, "lars": 400}))
        for name in (f"{name}.csv",)
    ]

    assert fastest(compare(files, GOAL)) == {"ours.csv": 100, "theirs.csv": 300}


def test_names_have_their_folders_where_needed_and_no_path_may_be_given_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its runs would count as repetitions, or as two submissions."""
    write_runs(tmp_path, ("größe/0", "adam/0"))
    monkeypatch.chdir(tmp_path / "größe")

    alike = compare(["0", "../adam/0"], GOAL)
    both, alone = compare([".", "../adam"], GOAL), compare(".", GOAL)

    assert {*fastest(alike)} == {"0", "../adam/0"}
    names = [[each["trial"] for each in found.to_dict()["trials"]] for found in (both, alone)]
    assert names == [["größe/0", "adam/0"], ["0"]]
    assert '"größe/0"' in both.to_json()
    with refused("runs", got=". and ../adam/../größe, which are the same"):
        compare([".", "../adam", "../adam/../größe"], GOAL)


def test_each_workload_may_have_a_metric_of_its_own(tmp_path: Path) -> None:
    """The runs of a workload are read for its metric only."""
    write_runs(tmp_path, ("sgd/a/0",), 200)
    write_run(tmp_path / "sgd/b/0", 100, metric="val:acc,loss")
    file = tmp_path / "sgd/b/0/metrics.csv"
    head, *lines = file.read_text().splitlines()
    rows = [f"{line.rpartition(',')[0]},{1 - float(line.split(',')[-1])},0" for line in lines]
    file.write_text("\n".join([head, *rows, ""]))

    found = compare(tmp_path / "sgd", {"a": GOAL, "b": "val:acc>=0.9"})

    assert [(each.workload, each.best.at("steps")) for each in found.standings] == [
        ("a", 200),
        ("b", 100),
    ]


def test_the_workload_may_be_a_submission_s_folder_and_only_one(tmp_path: Path) -> None:
    write_runs(tmp_path, ("a/0", "other/b/0", "both/a/b/0"))

    found = compare([tmp_path / "a", tmp_path / "other"], GOALS)

    assert counted(found) == [("a", "a", 1), ("other", "b", 1)]
    with refused("goal", requirement="name the workload of each run"):
        compare(tmp_path / "both", GOALS)


def test_runs_are_there_once_and_one_without_a_goal_is_left_out(tmp_path: Path) -> None:
    write_runs(tmp_path, ("sgd/a/0", "adam/a/0", "adam/b/0", "sgd/words/0"))

    found = compare([tmp_path / "sgd", tmp_path / "adam"], GOALS)

    assert counted(found) == [("sgd", "a", 1), ("adam", "a", 1), ("adam", "b", 1)]
    ((name, fault),) = left_out(found)
    assert name == "sgd/words/0"
    assert "got a, b for" in fault


def test_folders_below_those_of_workloads_are_submissions(tmp_path: Path) -> None:
    write_runs(tmp_path, ("a/sgd", "b/sgd"), 100)
    write_runs(tmp_path, ("a/adam", "b/adam/0"), 50)

    found = compare(tmp_path, GOALS)

    assert counted(found) == [(name, w, 1) for w in "ab" for name in ("adam", "sgd")]


def test_a_file_names_submissions_workloads_and_studies(tmp_path: Path) -> None:
    """A submission has the median of its studies."""
    times = {
        ("sgd", "a"): (100, 200, 300),
        ("adam", "a"): (50, 60, 400),
        ("sgd", "b"): (100, 100, 100),
        ("adam", "b"): (100, 400, math.inf),
    }
    path = write_trials(
        tmp_path / "trials.csv",
        [
            {"submission": s, "workload": w, "study": study, "steps": steps}
            for (s, w), of in times.items()
            for study, steps in enumerate(of)
        ],
    )

    found = compare(path, {"a": GOAL, "b": "loss<=0.95"})
    of_one = compare(path, {"a": GOAL})

    assert {
        (each.submission, each.workload): each.best.at("steps") for each in found.standings
    } == {
        **{("adam", "a"): 60, ("sgd", "a"): 200},
        **{("sgd", "b"): 10, ("adam", "b"): 10},
    }
    assert {each.workload for each in of_one.standings} == {"a"}
    assert len(of_one.left_out) == 6
    assert all("the workload 'b' of " in fault for _, fault in left_out(of_one))
    with refused("goal", requirement="have one for the workload 'a'", got="goals for z"):
        compare(path, {"z": GOAL})
    with refused("goal", requirement="name workloads of runs", got="'z', which no run names"):
        compare(path, {"a": GOAL, "z": GOAL})


BROKEN = {
    "damaged": ("metrics.csv", "step,loss\n10,0.9\n20\n30,0.1\n", "2 cells in each line, got 1 in"),
    "no number": ("metrics.csv", "step,loss\n10,0.9\n20,low\n", "a number, got 'low' in line 3"),
    "no line": ("metrics.csv", "step,loss\n", "It did not log loss."),
    "no text": ("metrics.csv", "", ""),
    "of another workload": ("metrics.csv", "step,acc\n10,0.9\n", "It did not log loss."),
    "empty": ("", "", "an empty folder."),
    "without a log": ("hparams.yaml", "lr: 0.1\n", "a folder without one."),
}
"""A file, its text, and the reason why the run does not count."""


def leave(folder: Path, how: str) -> None:
    folder.mkdir(parents=True)
    file, text, _ = BROKEN[how]
    if file:
        (folder / file).write_text(text)


@pytest.mark.parametrize("how", BROKEN)
def test_one_broken_run_is_left_out_and_the_others_are_compared(tmp_path: Path, how: str) -> None:
    for submission, steps in (("sgd", 200), ("adam", 100)):
        for seed in range(3):
            folder = tmp_path / submission / f"version_{seed}"
            write_run(folder, steps + 10 * seed, lr=0.1, seed=seed)
    leave(tmp_path / "sgd" / "version_3", how)

    for runs in ([tmp_path / "sgd", tmp_path / "adam"], [tmp_path]):
        found = compare(runs, GOAL)

        ((name, fault),) = left_out(found)
        assert name == "sgd/version_3"
        assert BROKEN[how][-1] in fault
        assert fault in found.warnings[0]
        assert fastest(found) == {"adam": 110, "sgd": 210}
        assert [len(each.outcomes) for each in found.standings] == [3, 3]


@pytest.mark.parametrize("how", slow_but(BROKEN, "damaged", "no line", "empty", "without a log"))
def test_a_submission_without_a_run_that_counts_is_refused(tmp_path: Path, how: str) -> None:
    write_runs(tmp_path, ("adam/version_0", "adam/version_1"))
    leave(tmp_path / "sgd" / "version_0", how)

    for runs in ([tmp_path / "sgd", tmp_path / "adam"], [tmp_path]):
        with pytest.raises(ValueError, match=r"must (have|name|be|contain)"):
            compare(runs, GOAL)


@pytest.mark.parametrize("how", BROKEN)
def test_beside_two_runs_a_broken_one_is_left_out(tmp_path: Path, how: str) -> None:
    """An empty folder beside one run is no other run."""
    write_run(tmp_path / "a", 100)
    leave(tmp_path / "c", how)
    (tmp_path / ".hidden").mkdir()

    if how == "empty":
        found = compare(tmp_path, GOAL)
        assert [name for name, _ in left_out(found)] == ["c"]
        assert found.document().headline == "a reached loss <= 0.1"
    else:
        with refused("runs", requirement="have a run of c that counts"):
            compare(tmp_path, GOAL)
    write_run(tmp_path / "b", 100)
    found = compare(tmp_path, GOAL)
    assert [name for name, _ in left_out(found)] == ["c"]
    assert {*fastest(found)} == {"a", "b"}


def test_a_broken_run_in_a_sweep_leaves_it_a_sweep(tmp_path: Path) -> None:
    for size in (8, 16, 32):
        for rate in (0.1, 0.2, 0.4):
            steps = 100 if rate == 0.2 else 200
            write_run(tmp_path / f"{size}-{rate}", steps, batch_size=size, lr=rate)
    leave(tmp_path / "broken", "damaged")

    found = compare(tmp_path, GOAL)

    (swept,) = found.sweeps
    assert [batch.tried for batch in swept.batches] == [3, 3, 3]
    assert [name for name, _ in left_out(found)] == ["broken"]
