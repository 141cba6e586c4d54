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


def test_a_chart_of_wandb_is_refused_with_the_command_that_exports_the_whole_history(
    tmp_path: Path,
) -> None:
    file = tmp_path / "wandb_export.csv"
    names = [f"run-1 - val_loss{end}" for end in ("", "__MIN", "__MAX")]
    file.write_text(",".join(["Step", *names]) + "\n1,2,2,2\n")

    with refused(str(file), got="a chart of W&B", remedy='run("ENTITY/PROJECT/RUN").scan_history'):
        read_trials(file, "val_loss")


def test_runs_of_other_metrics_beside_each_other_are_read_together(tmp_path: Path) -> None:
    for name, metric in (("1", "err"), ("2", "loss")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.csv").write_text(f"step,{metric}\n1,0.5\n")

    assert [len(t.measurements) for t in read_trials(tmp_path, "err")] == [1, 0]
    with refused("goal", remedy="err, loss"):
        read_trials(tmp_path, "acc")
