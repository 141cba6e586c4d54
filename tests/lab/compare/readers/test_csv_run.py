# SPDX-License-Identifier: Apache-2.0
"""Runs of CSVLogger are read in test_logged_run.py too, beside event files of the same training."""

from pathlib import Path

import pytest
from refused import refused

from noisescale.lab.compare.measurements import Trial
from noisescale.lab.compare.reading import read_trials

WANDB = """\
,_step,trainer/global_step,_runtime,_timestamp,loss,val_loss,epoch,seed,noise_scale/report
0,0,9,10.0,1700000010,3,,0,1,
1,1,19,20.0,1700000020,2,,0,1,"{'_type': 'html-file', 'size': 8}"
2,2,19,25.0,1700000025,,0.5,0,1,
3,3,39,50.0,1700000050,,NaN,1,1,
"""


def write(folder: Path, text: str, name: str = "history.csv") -> Path:
    folder.mkdir(exist_ok=True, parents=True)
    file = folder / name
    file.write_text(text)
    return file


def read(folder: Path, text: str, metric: str = "val_loss", *, name: str = "history.csv") -> Trial:
    (trial,) = read_trials(write(folder, text, name), metric, submission="adam")
    return trial


@pytest.mark.parametrize(
    ("runtime", "seconds"),
    [("_runtime", [25, 50]), ("_unknown", [15, 40])],
    ids=["", "time stamps"],
)
def test_a_history_from_wandb_is_a_run(tmp_path: Path, runtime: str, seconds: list[float]) -> None:
    """Without the runtime, seconds count from the first time stamp."""
    trial = read(tmp_path, WANDB.replace("_runtime", runtime))

    assert (trial.name, trial.submission) == ("history", "adam")
    assert trial.measurements.steps.tolist() == [20, 40]
    assert trial.measurements.values.tolist() == pytest.approx([0.5, float("nan")], nan_ok=True)
    assert trial.measurements.seconds == pytest.approx(seconds)
    assert trial.measurements.epochs == pytest.approx([1, 2])
    assert trial.diverged


@pytest.mark.parametrize(
    ("text", "steps"),
    [
        (WANDB.replace("trainer/global_step", "train/global_step"), [19, 39]),
        (WANDB.replace("trainer/global_step", "_"), [2, 3]),
        ("_step,trainer/global_step,loss,val_loss\n0,9,1,\n1,,,5\n", [1]),
    ],
    ids=["as logged", "those of wandb", "those of wandb, where the metric has no other"],
)
def test_steps_of_others(tmp_path: Path, text: str, steps: list[int]) -> None:
    assert read(tmp_path, text).measurements.steps.tolist() == steps


def test_an_epoch_in_which_the_log_ends_is_as_long_as_those_before(tmp_path: Path) -> None:
    rows = [f"{step - 1},{(step - 1) // 40},1" for step in (20, 40, 60, 80, 90)]
    (tmp_path / "hparams.yaml").write_text("{}")

    trial = read(tmp_path, "\n".join(["step,epoch,val_loss", *rows, ""]), name="metrics.csv")

    assert trial.measurements.epochs == pytest.approx([0.5, 1, 1.5, 2, 2.25])


def test_a_folder_of_versions_has_a_trial_for_each(tmp_path: Path) -> None:
    """Lightning, which leaves an hparams.yaml, counts steps from 0."""
    for version in (0, 1):
        folder = tmp_path / f"lightning_logs/version_{version}"
        write(folder, "epoch,step,val_loss\n0,9,0.5\n1,19,0.25\n", "metrics.csv")
        write(folder, f"seed: {version}\nlr: 1e-3\nbatch_size: 32\n", "hparams.yaml")
    write(tmp_path / "other", "step,val_loss\n9,0.5\n", "metrics.csv")

    *trials, other = read_trials(tmp_path, "val_loss")

    assert [t.name for t in trials] == ["lightning_logs/version_0", "lightning_logs/version_1"]
    assert [dict(t.hyperparameters) for t in trials] == [{"seed": 0}, {"seed": 1}]
    for trial in trials:
        assert (trial.batch_size, trial.learning_rate) == (32, 0.001)
        assert trial.measurements.steps.tolist() == [10, 20]
        assert trial.measurements.seconds is None
    assert other.measurements.steps.tolist() == [9]


@pytest.mark.parametrize(
    ("text", "argument", "got", "line"),
    [
        (WANDB.replace("val_loss", "acc"), "goal", "'val_loss'", None),
        (WANDB.replace(",0.5,", ",low,"), "val_loss", "'low'", 4),
        ("_runtime,val_loss\n1,2\n", "metrics.csv", "_runtime, val_loss", None),
        # After such a step those before it would look as if they had been trained again.
        ("step,val_loss\n100,0.5\n200,0.1\nnan,0.3\n300,0.1\n", "step", "no number", 4),
        # An evaluation without a step may be the one that reached the goal.
        ("step,epoch,val_loss\n100,0,0.5\n,1,0.1\n,2,\n300,3,0.1\n", "step", "no number", 3),
    ],
)
def test_what_cannot_be_read_is_refused_with_the_place(
    tmp_path: Path, text: str, argument: str, got: str, line: int | None
) -> None:
    name = str(tmp_path / argument) if "." in argument else argument

    with refused(name, at=line and (str(tmp_path / "metrics.csv"), line)) as error:
        read(tmp_path, text, name="metrics.csv")

    assert error.value.got.startswith(got)


def test_a_metrics_csv_with_a_column_of_trials_is_no_run(tmp_path: Path) -> None:
    file = write(tmp_path, "step,trial,loss\n1,2,3\n", "metrics.csv")

    with refused(str(file), requirement="have one run"):
        read_trials(tmp_path, "loss")
    assert len(read_trials(file, "loss")) == 1
