# SPDX-License-Identifier: Apache-2.0
"""benchmarks/lib/shallue.py, on trials in the layout of the release."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.lib.shallue import read_shallue
from noisescale import compare

METRIC = "val/classification_error"


def write_trial(folder: Path, metadata: dict[str, Any], errors: dict[int, Any]) -> Path:
    folder.mkdir(parents=True)
    (folder / "metadata.json").write_text(json.dumps(metadata))
    lines = [f"{step},2.5,{error}" for step, error in errors.items()]
    header = f"step,train/cross_entropy_error,{METRIC}"
    (folder / "measurements.csv").write_text("\n".join([header, *lines]) + "\n")
    return folder


@pytest.fixture
def release(tmp_path: Path) -> Path:
    root = tmp_path / "batch_science"
    for optimizer in ("sgd", "nesterov_momentum"):
        for size in (32, 256):
            study = root / f"cifar_10/resnet_8/{optimizer}/{size}"
            for trial in (2, 10):
                parameters = {"learning_rate": 0.1 * trial, "momentum": 0.9}
                about = {"status": "COMPLETE", "steps": 200, "trial_id": trial}
                errors = {0: 0.9, 100: 1 / size, 200: ""}
                write_trial(study / f"{trial}", about | {"parameters": parameters}, errors)
            (study / "study.json").write_text(json.dumps({"batch_size": size}))
    return root


def test_a_tree_is_read_from_any_of_its_folders(release: Path) -> None:
    trials = read_shallue(release, METRIC)
    of_study = read_shallue(release / "cifar_10/resnet_8/sgd/256", METRIC)
    of_trial = read_shallue(release / "cifar_10/resnet_8/sgd/256/10", METRIC)

    assert len(trials) == 8
    place = "cifar_10/resnet_8/sgd/256"
    assert [trial.name for trial in trials][-2:] == [f"{place}/2", f"{place}/10"]
    assert [trial.name for trial in of_study] == ["2", "10"]
    for trial in (trials[-1], of_study[-1], *of_trial):
        assert (trial.submission, trial.workload) == ("sgd", "cifar_10/resnet_8")
        assert (trial.batch_size, trial.learning_rate) == (256, 1.0)
        assert dict(trial.hyperparameters) == {"momentum": 0.9}
        assert trial.measurements.steps.tolist() == [0, 100]
        assert trial.measurements.values.tolist() == [0.9, 1 / 256]
        assert trial.measurements.examples == pytest.approx([0, 25600])


def test_the_trials_are_compared(release: Path) -> None:
    found = compare(read_shallue(release, METRIC), f"{METRIC}<0.1")

    assert [len(each.batches) for each in found.sweeps] == [2, 2]


def test_folders_above_the_data_set_belong_to_the_workload(release: Path) -> None:
    metadata = {"status": "COMPLETE", "hparams": {"lr": 0.5}}
    write_trial(release / "solution_quality/mnist/cnn/sgd/8/0", metadata, {1: 0.5})

    (trial,) = [t for t in read_shallue(release, METRIC) if t.batch_size == 8]

    assert trial.workload == "solution_quality/mnist/cnn"
    assert trial.learning_rate == 0.5


@pytest.mark.parametrize(
    ("status", "feasible"), [("INFEASIBLE", False), ("failed", False), ("DONE", True), (None, True)]
)
def test_the_status_may_be_infeasible(tmp_path: Path, status: str | None, feasible: bool) -> None:
    metadata = {"status": status, "trial_id": 3, "initial_learning_rate": 0.5, "decay": 0.1}
    write_trial(tmp_path / "mnist/cnn/adam/64/3", metadata, {1: 0.5})

    (trial,) = read_shallue(tmp_path, METRIC)

    assert trial.feasible is feasible
    assert trial.batch_size == 64  # from the folder, without study.json
    assert trial.learning_rate == 0.5
    assert dict(trial.hyperparameters) == {"decay": 0.1}


def test_incomplete_trials_are_left_out_as_in_the_paper(release: Path) -> None:
    write_trial(release / "cifar_10/resnet_8/sgd/32/7", {"status": "INCOMPLETE"}, {1: 0.0})

    assert len(read_shallue(release, METRIC)) == 8


def test_a_trial_of_which_something_is_not_known_says_so(release: Path, tmp_path: Path) -> None:
    folder = write_trial(tmp_path / "other/mnist/cnn/adam/all/3", {}, {1: 0.5})

    (without_size,) = read_shallue(tmp_path / "other", METRIC)
    without_metric, *_ = read_shallue(release, "err")

    assert without_size.fault.startswith(f"`{folder.parent}` must be named by the batch size")
    assert "must have a column `err`, got step, train/cross_ent" in without_metric.fault


@pytest.mark.parametrize(
    ("measurements", "metadata", "said"),
    [
        (f"step,{METRIC}\n1,low\n", "{}", "a number, got 'low' in line 2 of"),
        ("", "{}", "an empty file"),
        (f"step,{METRIC}\n1,2\n", "{", "2/metadata.json` must be JSON"),
    ],
)
def test_a_damaged_trial_has_a_fault_and_leaves_the_others(
    release: Path, measurements: str, metadata: str, said: str
) -> None:
    place = "cifar_10/resnet_8/sgd/32/2"
    (release / place / "measurements.csv").write_text(measurements)
    (release / place / "metadata.json").write_text(metadata)

    trials = read_shallue(release, METRIC)

    (broken,) = [trial for trial in trials if trial.fault]
    assert said in broken.fault
    assert (broken.name, broken.submission) == (place, "sgd")
    assert (broken.workload, len(broken.measurements)) == ("cifar_10/resnet_8", 0)
    assert [len(trial.measurements) for trial in trials if trial is not broken] == 7 * [2]
