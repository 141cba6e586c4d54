# SPDX-License-Identifier: Apache-2.0
"""Runs of W&B and MLflow: named as what they are, with a command that fetches what is needed."""

import re
import shlex
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from noisescale.history.following import FollowedRun
from noisescale.history.reading import read_run
from noisescale.lab.compare.reading import read_trials


def refusal(path: Path) -> str:
    with pytest.raises(ValueError, match="must") as refused:
        read_run(path)
    assert "\n" not in str(refused.value)
    return str(refused.value)


OF_WANDB = (
    "python -c 'import wandb;"
    ' wandb.Api().run("ENTITY/PROJECT/{run}").file("noise_scale.jsonl").download()\''
)


@pytest.fixture
def wandb(tmp_path: Path) -> Path:
    folder = tmp_path / "wandb/offline-run-20240101_120000-5fxl0acw"
    folder.mkdir(parents=True)
    (folder / "run-5fxl0acw.wandb").write_bytes(b":W&B")
    (tmp_path / "wandb/latest-run").symlink_to(folder.name)
    return folder


def test_a_run_of_wandb_without_a_record_names_the_command_that_fetches_it(wandb: Path) -> None:
    paths = (wandb.parent, wandb, wandb / "run-5fxl0acw.wandb", wandb.parent / "latest-run")

    for path in paths:
        assert refusal(path) == (
            f"`{path}` must have the file noise_scale.jsonl, got a run of W&B without it. Run"
            f" `{OF_WANDB.format(run='5fxl0acw')}` and pass noise_scale.jsonl instead."
        )


def test_a_run_of_wandb_is_compared_by_its_exported_history(
    wandb: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command is run, against a server of W&B with two rows."""
    asked, written = [], []

    def run_of(path: str) -> Any:
        asked.append(path)
        return SimpleNamespace(scan_history=lambda: iter([{"loss": 1.0}]))

    def frame_of(rows: Any) -> Any:
        return SimpleNamespace(to_csv=lambda path: written.append((path, list(rows))))

    monkeypatch.setitem(sys.modules, "pandas", SimpleNamespace(DataFrame=frame_of))
    server = SimpleNamespace(Api=lambda: SimpleNamespace(run=run_of))
    monkeypatch.setitem(sys.modules, "wandb", server)

    with pytest.raises(ValueError, match="got a run of W&B") as refused:
        read_trials(wandb, "loss")

    said = str(refused.value)
    assert f"Run `wandb sync {wandb}`, then `python -c '" in said
    (command,) = re.findall(r"`(python -c '[^`]*')` and pass history.csv instead\.$", said)
    exec(shlex.split(command)[2], {})
    assert asked == ["ENTITY/PROJECT/5fxl0acw"]
    assert written == [("history.csv", [{"loss": 1.0}])]


@pytest.mark.parametrize("trainer", ["", "train/"])
def test_a_chart_of_wandb_is_no_history(tmp_path: Path, trainer: str) -> None:
    chart = tmp_path / "chart.csv"
    names = [f"my run - {trainer}noise_scale/simple{end}" for end in ("", "__MIN", "__MAX")]
    chart.write_text(",".join(["trainer/global_step", *names]) + "\n9,192,192,192\n")

    said = refusal(chart)

    assert said.startswith(f"`{chart}` must have all columns of a history, got the export of a W&B")
    assert OF_WANDB.format(run="RUN") in said


def test_a_run_of_mlflow_without_a_record_names_the_command_that_fetches_it(
    tmp_path: Path,
) -> None:
    run = tmp_path / "mlruns/1/b118"
    (run / "metrics/noise_scale").mkdir(parents=True)
    (run / "metrics/noise_scale/batch_size").write_text("1 10 9\n")
    of_others = refusal(tmp_path / "mlruns")
    (run / "meta.yaml").touch()

    said = refusal(tmp_path / "mlruns")

    assert "no event file of TensorBoard" in of_others
    assert "got a run of MLflow without it. Run `mlflow artifacts download -r b118 -a noise" in said


def test_a_run_that_is_read_goes_before_what_a_tracker_has(tmp_path: Path) -> None:
    """With two loggers, TensorBoard's or a CSVLogger's files are there too."""
    (tmp_path / "wandb/run-1").mkdir(parents=True)
    (tmp_path / "wandb/run-1/run-1.wandb").touch()
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs/metrics.csv").write_text(
        "noise_scale/step,noise_scale/examples,noise_scale/batch_size\n10,640,64\n"
    )

    assert read_run(tmp_path)["step"].tolist() == [10]


def test_a_run_of_wandb_is_not_waited_for(tmp_path: Path) -> None:
    (tmp_path / "run-1.wandb").touch()

    with pytest.raises(ValueError, match="got a run of W&B"):
        FollowedRun(tmp_path)
