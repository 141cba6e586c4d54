# SPDX-License-Identifier: Apache-2.0
"""Runs of CSVLogger are read in test_event_run.py too, beside event files of the same training."""

from pathlib import Path

import pytest

from noisescale.lab.compare.reading import read_trials

WANDB = """\
,_step,trainer/global_step,_runtime,_timestamp,loss,val_loss,epoch,seed,noise_scale/report
0,0,9,10.0,1700000010,3,,0,1,
1,1,19,20.0,1700000020,2,,0,1,"{'_type': 'html-file', 'size': 8}"
2,2,19,25.0,1700000025,,0.5,0,1,
3,3,39,50.0,1700000050,,NaN,1,1,
"""


def write(folder: Path, text: str, name: str = "history.csv") -> Path:
    file = folder / name
    file.write_text(text)
    return file


def test_a_history_from_wandb_is_a_run(tmp_path: Path) -> None:
    (trial,) = read_trials(write(tmp_path, WANDB), "val_loss", submission="adam")

    assert (trial.name, trial.submission) == ("history", "adam")
    assert trial.measurements.steps.tolist() == [20, 40]
    assert trial.measurements.values.tolist() == pytest.approx([0.5, float("nan")], nan_ok=True)
    assert trial.measurements.seconds is not None
    assert trial.measurements.seconds.tolist() == [25, 50]
    assert trial.measurements.epochs is not None
    assert trial.measurements.epochs.tolist() == [1, 2]
    assert trial.diverged


def test_without_the_runtime_seconds_count_from_the_first_time_stamp(tmp_path: Path) -> None:
    file = write(tmp_path, WANDB.replace("_runtime", "_unknown"))

    (trial,) = read_trials(file, "val_loss")

    assert trial.measurements.seconds is not None
    assert trial.measurements.seconds.tolist() == [15, 40]


@pytest.mark.parametrize(("clock", "steps"), [("train/global_step", [19, 39]), ("_", [2, 3])])
def test_transformers_logs_the_optimizer_step_and_wandb_its_own(
    tmp_path: Path, clock: str, steps: list[int]
) -> None:
    file = write(tmp_path, WANDB.replace("trainer/global_step", clock))

    (trial,) = read_trials(file, "val_loss")

    assert trial.measurements.steps.tolist() == steps


def test_a_metric_that_was_logged_without_the_trainers_step_has_that_of_wandb(
    tmp_path: Path,
) -> None:
    file = write(tmp_path, "_step,trainer/global_step,loss,mine\n0,9,1,\n1,,,5\n")

    (trial,) = read_trials(file, "mine")

    assert trial.measurements.steps.tolist() == [1]


def test_an_epoch_in_which_the_log_ends_is_as_long_as_those_before(tmp_path: Path) -> None:
    rows = [f"{step - 1},{(step - 1) // 40},1" for step in (20, 40, 60, 80, 90)]
    (tmp_path / "hparams.yaml").write_text("{}")
    write(tmp_path, "\n".join(["step,epoch,loss", *rows, ""]), "metrics.csv")

    (trial,) = read_trials(tmp_path, "loss")

    assert trial.measurements.epochs == pytest.approx([0.5, 1, 1.5, 2, 2.25])


def test_the_monitor_says_the_steps_examples_and_time_of_a_history(tmp_path: Path) -> None:
    ours = ("step", "examples", "batch_size", "seconds_per_step")
    header = ",".join(["step", "loss", *(f"noise_scale/{name}" for name in ours)])
    file = write(tmp_path, f"{header}\n9,,10,640,64,0.5\n19,,20,1280,64,0.5\n14,2,,,,\n")

    (trial,) = read_trials(file, "loss")

    assert trial.measurements.steps.tolist() == [15]
    assert trial.measurements.clock("examples").tolist() == [960]  # type: ignore[union-attr]
    assert trial.measurements.clock("seconds").tolist() == [7.5]  # type: ignore[union-attr]
    assert trial.batch_size == 64


def test_a_folder_of_versions_has_a_trial_for_each(tmp_path: Path) -> None:
    for version in (0, 1):
        folder = tmp_path / f"lightning_logs/version_{version}"
        folder.mkdir(parents=True)
        write(folder, "epoch,step,val_loss\n0,9,0.5\n1,19,0.25\n", "metrics.csv")
        (folder / "hparams.yaml").write_text(f"seed: {version}\nlr: 1e-3\nbatch_size: 32\n")

    trials = read_trials(tmp_path, "val_loss")

    assert [t.name for t in trials] == ["lightning_logs/version_0", "lightning_logs/version_1"]
    assert [dict(t.hyperparameters) for t in trials] == [{"seed": 0}, {"seed": 1}]
    for trial in trials:
        assert (trial.batch_size, trial.learning_rate) == (32, 0.001)
        assert trial.measurements.steps.tolist() == [10, 20]
        assert trial.measurements.seconds is None


def test_what_cannot_be_read_is_refused_with_the_place(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"`goal` must name a metric of .*history.csv, got 'acc'"):
        read_trials(write(tmp_path, WANDB), "acc")
    with pytest.raises(ValueError, match=r"`val_loss` must be a number, got 'low' in line 4 of "):
        read_trials(write(tmp_path, WANDB.replace(",0.5,", ",low,")), "val_loss")
    with pytest.raises(
        ValueError, match=r"must have the step of each loss in a column step, .*_ru"
    ):
        read_trials(write(tmp_path, "_runtime,loss\n1,2\n"), "loss")

    write(tmp_path, "step,trial,loss\n1,2,3\n", "metrics.csv")
    with pytest.raises(ValueError, match=r"metrics.csv` must have one run, got the columns trial "):
        read_trials(tmp_path, "loss")
    assert len(read_trials(tmp_path / "metrics.csv", "loss")) == 1


def test_a_step_that_is_no_number_hides_no_evaluation_before_it(tmp_path: Path) -> None:
    """After such a step those before it would look as if they had been trained again."""
    file = write(tmp_path, "step,loss\n100,0.5\n200,0.1\nnan,0.3\n300,0.1\n", "metrics.csv")

    with pytest.raises(ValueError, match=r"`step` must be known of each loss, .* in line 4 of"):
        read_trials(file, "loss")


def test_an_evaluation_without_a_step_is_refused_beside_others_that_have_one(
    tmp_path: Path,
) -> None:
    """It may be the one that reached the goal."""
    file = write(tmp_path, "step,epoch,loss\n100,0,0.5\n,1,0.1\n,2,\n300,3,0.1\n", "metrics.csv")

    with pytest.raises(ValueError, match=r"`step` must be known of each loss, .* in line 3 of"):
        read_trials(file, "loss")
