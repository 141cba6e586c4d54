# SPDX-License-Identifier: Apache-2.0
from pathlib import Path

import pytest

from noisescale.lab.compare.reading import read_trials


def test_a_path_without_trials_is_refused_with_the_formats(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").touch()

    for path in (tmp_path, tmp_path / "notes.txt"):
        with pytest.raises(
            ValueError, match=r"must contain trials, got none.*CSVLogger"
        ) as refused:
            read_trials(path, "loss")
        assert str(refused.value).startswith(f"`{path}` must")
        assert "\n" not in str(refused.value)


def test_a_path_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"`.*nowhere` must be a folder or a file"):
        read_trials(tmp_path / "nowhere", "loss")


def test_runs_in_files_of_a_tracker_are_refused_with_the_command(tmp_path: Path) -> None:
    (tmp_path / "run-5fxl0acw.wandb").touch()

    for path in (tmp_path, tmp_path / "run-5fxl0acw.wandb"):
        with pytest.raises(ValueError, match=r"got a run of W&B\. Run `python -c"):
            read_trials(path, "loss")


def test_formats_beside_each_other_are_read_together(tmp_path: Path) -> None:
    study, run = tmp_path / "mnist/cnn/adam/64/0", tmp_path / "version_0"
    study.mkdir(parents=True)
    run.mkdir()
    (study / "measurements.csv").write_text("step,err\n1,0.5\n")
    (run / "metrics.csv").write_text("step,loss\n1,0.5\n")

    trials = read_trials(tmp_path, "err")

    assert [(t.name, len(t.measurements)) for t in trials] == [
        ("version_0", 0),
        ("mnist/cnn/adam/64/0", 1),
    ]
    with pytest.raises(ValueError, match=r"'acc'\. Its metrics: err, loss"):
        read_trials(tmp_path, "acc")
