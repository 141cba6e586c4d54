# SPDX-License-Identifier: Apache-2.0
"""Runs of W&B and MLflow: named as what they are, with a command that gets them out."""

import csv
import re
import shlex
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from noisescale import predict
from noisescale.history.following import FollowedRun
from noisescale.history.reading import read_metric, read_run

ROWS = [
    {"step": 10 * k, "examples": 640 * k, "batch_size": 64, "lower_bound": 100.0, "simple": 192.0,
     "simple_high": 250.0, "seconds_per_step": 0.1, "devices": 2, "accumulation": 1}
    for k in range(1, 31)
]  # fmt: skip


class DataFrame:
    """As much of pandas as the commands take."""

    def __init__(self, content: Any) -> None:
        if isinstance(content, dict):  # columns, by index
            index = sorted({at for column in content.values() for at in column})
            self.rows = [{name: column.get(at, "") for name, column in content.items()}
                         for at in index]  # fmt: skip
        else:
            self.rows, index = list(content), None
        self.index = index or range(len(self.rows))

    def to_csv(self, path: str, index_label: str = "") -> None:
        names = list(dict.fromkeys(name for row in self.rows for name in row))
        with Path(path).open("w", newline="") as file:
            writer = csv.DictWriter(file, [index_label, *names])
            writer.writeheader()
            for at, row in zip(self.index, self.rows, strict=True):
                writer.writerow({index_label: at} | row)


def history_of_wandb() -> list[dict[str, Any]]:
    """As `scan_history` has it: a row for each call of `log`, and what the page became."""
    rows: list[dict[str, Any]] = []
    for row in ROWS:
        step = {"trainer/global_step": row["step"] - 1, "_timestamp": 1.7e9, "_runtime": 0.5}
        rows.append({"loss": 1 / row["step"]} | step)
        rows.append({f"noise_scale/{name}": value for name, value in row.items()} | step)
    rows.append({"noise_scale/report": {"_type": "html-file", "size": 8}, "_runtime": 1.0})
    return [row | {"_step": number} for number, row in enumerate(rows)]


def refusal(path: Path) -> str:
    with pytest.raises(ValueError, match="must") as refused:
        read_run(path)
    assert "\n" not in str(refused.value)
    return str(refused.value)


def run_command(said: str) -> str:
    """Run the Python command of a message, and return it."""
    (command,) = re.findall(r"`(python -c '[^`]*')` and pass history.csv instead\.$", said)
    program, option, code = shlex.split(command)
    assert (program, option) == ("python", "-c")
    exec(code, {})
    return code


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """A server of W&B, and the runs that it was asked for."""
    asked: list[str] = []

    def run(path: str) -> Any:
        asked.append(path)
        return SimpleNamespace(scan_history=lambda: iter(history_of_wandb()))

    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "pandas", SimpleNamespace(DataFrame=DataFrame))
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(Api=lambda: SimpleNamespace(run=run)))
    return asked


def test_the_command_for_a_run_of_wandb_makes_a_file_that_is_read(wandb: list[str]) -> None:
    folder = Path("wandb/run-20240101_120000-5fxl0acw")
    folder.mkdir(parents=True)
    (folder / "run-5fxl0acw.wandb").write_bytes(b":W&B")
    Path("wandb/latest-run").symlink_to(folder.name)

    said = [refusal(path) for path in (Path("wandb"), folder, folder / "run-5fxl0acw.wandb")]
    run_command(said[0])

    for text in (*said, refusal(Path("wandb/latest-run"))):
        assert "got a run of W&B. Run `python -c '" in text
        assert "run-" not in text.partition("Run ")[2]
    assert wandb == ["ENTITY/PROJECT/5fxl0acw"]
    read = read_run("history.csv")
    assert read["step"].tolist() == [row["step"] for row in ROWS]
    assert predict(read).critical_batch_size.value == pytest.approx(192)
    steps, losses = read_metric("history.csv", "loss")
    assert steps.tolist() == read["step"].tolist()
    assert losses == pytest.approx(1 / steps)


def test_a_run_of_wandb_that_is_not_on_a_server_is_synced_first(tmp_path: Path) -> None:
    folder = tmp_path / "wandb/offline-run-20240101_120000-5fxl0acw"
    folder.mkdir(parents=True)
    (folder / "run-5fxl0acw.wandb").write_bytes(b":W&B")
    link = tmp_path / "wandb/latest-run"
    link.symlink_to(folder.name)

    assert f"Run `wandb sync {folder}`, then `python -c '" in refusal(folder)
    assert f"Run `wandb sync {link}`, then `python -c '" in refusal(link)


@pytest.mark.parametrize("trainer", ["", "train/"])
def test_a_chart_of_wandb_is_no_history(wandb: list[str], tmp_path: Path, trainer: str) -> None:
    chart = tmp_path / "chart.csv"
    names = [f"my run - {trainer}noise_scale/simple{end}" for end in ("", "__MIN", "__MAX")]
    chart.write_text(",".join(["trainer/global_step", *names]) + "\n9,192,192,192\n")

    said = refusal(chart)
    run_command(said)

    assert said.startswith(f"`{chart}` must have all metrics of a run, got the export of a W&B ch")
    assert wandb == ["ENTITY/PROJECT/RUN"]


def test_the_command_for_a_run_of_mlflow_makes_a_file_that_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "mlruns/1/b118"
    (run / "metrics/noise_scale").mkdir(parents=True)
    (run / "metrics/noise_scale/step").write_text("1 10 9\n")
    metrics = {"loss": [(row["step"] - 1, 1 / row["step"]) for row in ROWS]}
    for name in ROWS[0]:
        metrics[f"noise_scale/{name}"] = [(row["step"] - 1, row[name]) for row in ROWS]

    class Client:
        def get_run(self, run_id: str) -> Any:
            assert run_id == "b118"
            return SimpleNamespace(data=SimpleNamespace(metrics=dict.fromkeys(metrics)))

        def get_metric_history(self, run_id: str, key: str) -> Any:
            assert run_id == "b118"
            return [SimpleNamespace(step=step, value=value) for step, value in metrics[key]]

    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "pandas", SimpleNamespace(DataFrame=DataFrame))
    monkeypatch.setitem(sys.modules, "mlflow", SimpleNamespace(MlflowClient=Client))

    of_others = refusal(tmp_path / "mlruns")
    (run / "meta.yaml").touch()
    said = refusal(tmp_path / "mlruns")
    run_command(said)

    assert "got no event file" in of_others
    assert "got a run of MLflow." in said
    assert read_run("history.csv")["step"].tolist() == [row["step"] for row in ROWS]
    assert read_metric("history.csv", "loss")[1] == pytest.approx([1 / r["step"] for r in ROWS])


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
