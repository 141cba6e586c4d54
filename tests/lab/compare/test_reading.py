# SPDX-License-Identifier: Apache-2.0
from pathlib import Path

import pytest
from refused import refused

from noisescale.lab.compare.reading import read_trials


def test_a_path_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    with refused(str(tmp_path / "nowhere"), error=FileNotFoundError):
        read_trials(tmp_path / "nowhere", "loss")


@pytest.mark.parametrize(
    ("name", "got", "remedy"),
    [("notes.txt", "none", "CSVLogger"), ("run-5fxl0acw.wandb", "a run of W&B", "Run `python -c")],
)
def test_without_trials_what_helps_is_said(
    tmp_path: Path, name: str, got: str, remedy: str
) -> None:
    (tmp_path / name).touch()

    for path in (tmp_path, tmp_path / name):
        with refused(str(path), got=got, remedy=remedy) as error:
            read_trials(path, "loss")
        assert "\n" not in str(error.value)


def test_formats_beside_each_other_are_read_together(tmp_path: Path) -> None:
    study, run = tmp_path / "mnist/cnn/adam/64/0", tmp_path / "version_0"
    study.mkdir(parents=True)
    run.mkdir()
    (study / "measurements.csv").write_text("step,err\n1,0.5\n")
    (run / "metrics.csv").write_text("step,loss\n1,0.5\n")

    assert [(t.name, len(t.measurements)) for t in read_trials(tmp_path, "err")] == [
        ("version_0", 0),
        ("mnist/cnn/adam/64/0", 1),
    ]
    with refused("goal", remedy="err, loss"):
        read_trials(tmp_path, "acc")
