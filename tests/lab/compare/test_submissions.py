# SPDX-License-Identifier: Apache-2.0
"""What users have beside good runs: cut, empty and foreign ones."""

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from noisescale.lab.compare.compare import Comparison, compare

GOAL = "loss<=0.1"


def write_run(folder: Path, steps: int, hyperparameters: str = "", metric: str = "loss") -> None:
    """Write a run of CSVLogger that reaches the goal after these steps."""
    folder.mkdir(parents=True)
    lines = [f"{step},{0.1 if step >= steps else 0.9}" for step in range(10, steps + 20, 10)]
    (folder / "metrics.csv").write_text("\n".join([f"step,{metric}", *lines, ""]))
    if hyperparameters:
        (folder / "hparams.yaml").write_text(hyperparameters)


def write_text(folder: Path, text: str) -> None:
    folder.mkdir(parents=True)
    (folder / "metrics.csv").write_text(text)


def leave_empty(folder: Path) -> None:
    folder.mkdir(parents=True)


def leave_without_log(folder: Path) -> None:
    folder.mkdir(parents=True)
    (folder / "hparams.yaml").write_text("lr: 0.1\n")


BROKEN: Mapping[str, tuple[Callable[[Path], None], str]] = {
    "damaged": (
        lambda folder: write_text(folder, "step,loss\n10,0.9\n20\n30,0.1\n"),
        "must have 2 cells in each line, got 1 in line 3",
    ),
    "no number": (
        lambda folder: write_text(folder, "step,loss\n10,0.9\n20,low\n"),
        "must be a number, got 'low' in line 3",
    ),
    "no line": (lambda folder: write_text(folder, "step,loss\n"), "It did not log loss."),
    "no text": (lambda folder: write_text(folder, ""), ""),
    "of another workload": (
        lambda folder: write_run(folder, 100, metric="accuracy"),
        "It did not log loss.",
    ),
    "empty": (leave_empty, "must have the log of a run, got an empty folder. Remove it"),
    "without a log": (leave_without_log, "must have the log of a run, got a folder without one."),
}


def left_out(found: Comparison) -> list[tuple[str, str]]:
    return [(trial.name, trial.fault) for trial in found.left_out]


@pytest.mark.parametrize("how", BROKEN)
def test_one_broken_run_is_left_out_and_the_others_are_compared(tmp_path: Path, how: str) -> None:
    for submission, fastest in (("sgd", 200), ("adam", 100)):
        for seed in range(3):
            folder = tmp_path / submission / f"version_{seed}"
            write_run(folder, fastest + 10 * seed, f"lr: 0.1\nseed: {seed}\n")
    without = compare([tmp_path / "sgd", tmp_path / "adam"], GOAL)
    make, reason = BROKEN[how]
    make(tmp_path / "sgd" / "version_3")

    for runs in ([tmp_path / "sgd", tmp_path / "adam"], [tmp_path]):
        found = compare(runs, GOAL)

        ((name, fault),) = left_out(found)
        assert name == "sgd/version_3"
        assert reason in fault
        assert found.warnings[0].startswith(f"1 run is left out. sgd/version_3: {fault}")
        ours = {each.submission: each for each in found.standings}
        for theirs in without.standings:
            assert ours[theirs.submission].best.at("steps") == theirs.best.at("steps")
            assert len(ours[theirs.submission].outcomes) == 3
        assert ours["adam"].best.at("steps") == 111  # Lightning counts from 0


@pytest.mark.parametrize("how", BROKEN)
def test_a_submission_without_a_run_that_counts_is_refused(tmp_path: Path, how: str) -> None:
    write_run(tmp_path / "adam" / "version_0", 100)
    write_run(tmp_path / "adam" / "version_1", 100)
    BROKEN[how][0](tmp_path / "sgd" / "version_0")

    for runs in ([tmp_path / "sgd", tmp_path / "adam"], [tmp_path]):
        with pytest.raises(ValueError, match=r"must (have|name|be|contain)"):
            compare(runs, GOAL)


@pytest.mark.parametrize("how", BROKEN)
def test_of_runs_beside_each_other_one_that_is_broken_is_left_out(tmp_path: Path, how: str) -> None:
    for name in ("a", "b"):
        write_run(tmp_path / name, 100)
    BROKEN[how][0](tmp_path / "c")

    found = compare(tmp_path, GOAL)

    assert [name for name, _ in left_out(found)] == ["c"]
    assert {each.submission for each in found.standings} == {"a", "b"}


def test_the_optimizers_of_a_file_at_one_batch_size_are_its_submissions(tmp_path: Path) -> None:
    """Otherwise the luckiest seed of all would be compared with the first line's."""
    rows = [
        f"{optimizer},{rate},{seed},{step},{0.1 if step >= fastest + 10 * seed else 0.9}"
        for optimizer, fastest in (("sgd", 200), ("adam", 100))
        for rate in (0.1, 0.2)
        for seed in range(2)
        for step in range(10, 300, 10)
    ]
    file = tmp_path / "runs.csv"
    file.write_text("\n".join(["optimizer,lr,seed,step,loss", *rows, ""]))

    found = compare(file, GOAL)

    assert [each.submission for each in found.standings] == ["adam", "sgd"]
    assert [len(each.outcomes) for each in found.standings] == [4, 4]


def test_an_empty_folder_beside_one_run_is_no_other_run(tmp_path: Path) -> None:
    write_run(tmp_path / "a", 100)
    leave_empty(tmp_path / "figures")
    leave_empty(tmp_path / ".hidden")

    found = compare(tmp_path, GOAL)

    assert [name for name, _ in left_out(found)] == ["figures"]
    assert found.document().headline == "a reached loss <= 0.1"


@pytest.mark.parametrize("how", [how for how in BROKEN if how != "empty"])
def test_of_two_runs_beside_each_other_none_may_be_broken(tmp_path: Path, how: str) -> None:
    write_run(tmp_path / "a", 100)
    BROKEN[how][0](tmp_path / "c")

    with pytest.raises(ValueError, match="`runs` must have a run of c that counts, got 1 that do"):
        compare(tmp_path, GOAL)


def test_a_broken_run_in_a_sweep_leaves_it_a_sweep(tmp_path: Path) -> None:
    for size in (8, 16, 32):
        for rate in (0.1, 0.2, 0.4):
            steps = 100 if rate == 0.2 else 200
            write_run(tmp_path / f"{size}-{rate}", steps, f"batch_size: {size}\nlr: {rate}\n")
    write_text(tmp_path / "broken", "step,loss\n10\n")

    found = compare(tmp_path, GOAL)

    (swept,) = found.sweeps
    assert [batch.tried for batch in swept.batches] == [3, 3, 3]
    assert [name for name, _ in left_out(found)] == ["broken"]


def test_a_run_of_a_workload_without_a_goal_is_left_out(tmp_path: Path) -> None:
    for submission in ("sgd", "adam"):
        write_run(tmp_path / submission / "digits" / "0", 100)
    write_run(tmp_path / "sgd" / "words" / "0", 100)

    found = compare([tmp_path / "sgd", tmp_path / "adam"], {"digits": GOAL})

    ((name, fault),) = left_out(found)
    assert name == "sgd/words/0"
    assert "must name the workload of each run, got digits for" in fault
    with pytest.raises(ValueError, match="must name workloads of runs, got 'text', which no run"):
        compare([tmp_path / "sgd", tmp_path / "adam"], {"digits": GOAL, "text": GOAL})


def test_a_broken_run_beside_those_whose_files_name_submissions_is_left_out(
    tmp_path: Path,
) -> None:
    for root in ("release", "other"):
        for trial in ("1", "2"):
            folder = tmp_path / root / "mnist" / "cnn" / f"sgd-{root}" / "64" / trial
            folder.mkdir(parents=True)
            (folder / "measurements.csv").write_text("step,loss\n10,0.9\n20,0.1\n")
    leave_empty(tmp_path / "release" / "mnist" / "cnn" / "adam")

    for runs in ([tmp_path / "release"], [tmp_path / "release", tmp_path / "other"]):
        found = compare(runs, GOAL)

        ((_, fault),) = left_out(found)
        assert "must have the log of a run, got an empty folder" in fault
        assert found.submissions[0] == "sgd-release"
