# SPDX-License-Identifier: Apache-2.0
from pathlib import Path

import pytest
from refused import refused

from noisescale.lab.compare.reading import read_trials

RUNS = ("fine-sun-1", "lr 0.1 - adam")


def chart(folder: Path, axis: str, *rows: str, steps: bool = False) -> Path:
    """Columns as W&B's page writes them: each with its range; `_step` unless it is the x-axis."""
    metrics = (["_step"] if steps else []) + ["val_loss"]
    columns = [f"{run} - {metric}" for run in RUNS for metric in metrics]
    names = [axis, *(f"{column}{end}" for column in columns for end in ("", "__MIN", "__MAX"))]
    file = folder / "wandb_export.csv"
    file.write_text("\n".join([",".join(f'"{name}"' for name in names), *rows]))
    return file


@pytest.mark.parametrize(("axis", "behind"), [("Step", 0), ("trainer/global_step", 1)])
def test_each_run_of_a_chart_is_a_trial(tmp_path: Path, axis: str, behind: int) -> None:
    rows = ("100,0.5,0.4,0.6,0.7,0.7,0.7", "200,,,,0.3,0.3,0.3")

    first, second = read_trials(chart(tmp_path, axis, *rows), "val_loss", submission="sweep")

    assert (first.name, second.name) == RUNS
    assert first.submission == "sweep"
    for trial, steps, values in ((first, [100], [0.5]), (second, [100, 200], [0.7, 0.3])):
        assert trial.measurements.steps.tolist() == [step + behind for step in steps]
        assert trial.measurements.values.tolist() == values
    assert first.measurements.seconds is None


def test_a_chart_over_time_gives_the_seconds_and_its_own_steps(tmp_path: Path) -> None:
    row = "12.5,100,100,100,0.5,0.5,0.5,90,90,90,0.7,0.7,0.7"

    first, second = read_trials(
        chart(tmp_path, "Relative Time (Process)", row, steps=True), "val_loss"
    )

    assert (first.measurements.steps, second.measurements.steps) == ([100], [90])
    assert first.measurements.seconds == [12.5]


def test_a_chart_without_steps_or_the_metric_is_refused(tmp_path: Path) -> None:
    file = chart(tmp_path, "epoch", "1,0.5,0.5,0.5,0.7,0.7,0.7")

    with refused(
        str(file), requirement="have the steps of fine-sun-1", got="the x-axis 'epoch' alone"
    ):
        read_trials(file, "val_loss")
    with refused("goal", got="'loss'", remedy="val_loss"):
        read_trials(file, "loss")
