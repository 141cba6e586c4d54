# SPDX-License-Identifier: Apache-2.0
"""Runs of trackers: named as what they are, with a command that fetches what is needed."""

import re
import shlex
import sqlite3
import sys
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from logged_runs import log_run

from noisescale.history.following import FollowedRun
from noisescale.history.reading import read_run
from noisescale.lab.compare.reading import read_trials
from noisescale.refusal import Refusal


def refusal(path: Path) -> Refusal:
    with pytest.raises(Refusal) as refused:
        read_run(path)
    return refused.value


DOWNLOAD = 'wandb.Api().run("ENTITY/PROJECT/{run}").file("noise_scale.jsonl").download()'


@pytest.fixture
def wandb(tmp_path: Path) -> Path:
    folder = tmp_path / "wandb/offline-run-20240101_120000-5fxl0acw"
    folder.mkdir(parents=True)
    (folder / "run-5fxl0acw.wandb").write_bytes(b":W&B")
    (tmp_path / "wandb/latest-run").symlink_to(folder.name)
    return folder


def test_a_run_of_wandb_without_a_record_names_the_commands_that_fetch_it(
    wandb: Path, tmp_path: Path
) -> None:
    paths = (wandb.parent, wandb, wandb / "run-5fxl0acw.wandb", wandb.parent / "latest-run")
    on_server = tmp_path / "server"
    on_server.mkdir()
    (on_server / "run-5fxl0acw.wandb").touch()

    for path in (*paths, on_server):
        said = refusal(path)
        command = DOWNLOAD.format(run="5fxl0acw") if path == on_server else "`wandb sync "
        assert (said.arguments, said.got) == ((f"{path}",), "a run of W&B without it")
        assert command in said.remedy
    with pytest.raises(Refusal, match="a run of W&B"):  # it is not waited for
        FollowedRun(on_server)


def test_an_offline_run_of_wandb_that_is_still_written_is_read_by_its_record(wandb: Path) -> None:
    log_run(wandb / "files")
    record = wandb / "files/noise_scale.jsonl"
    record.write_bytes(record.read_bytes()[:-60])  # and its last line is cut off

    for path in (wandb.parent, wandb, record):
        with pytest.warns(UserWarning, match="noise_scale.jsonl ends within line 101"):
            assert len(read_run(path)) == 99
    assert refusal(wandb / "run-5fxl0acw.wandb").remedy == f"Name {record}."


FETCHED = "mlflow artifacts download --run-id {run} --artifact-path noise_scale.jsonl"


def test_runs_of_mlflow_are_read_by_their_artifact_or_refused_with_the_command_that_fetches_it(
    tmp_path: Path,
) -> None:
    database = tmp_path / "mlflow.db"
    database.write_bytes(b"SQLite format 3\0...")
    run = tmp_path / "mlruns/1/b118"
    (run / "metrics/noise_scale").mkdir(parents=True)
    (run / "meta.yaml").touch()

    for path, name in ((database, "RUN"), (tmp_path / "mlruns", "b118"), (run, "b118")):
        assert FETCHED.format(run=name) in refusal(path).remedy
    log_run(run / "artifacts")
    assert read_run(tmp_path).source == run / "artifacts"
    assert "MLflow" in refusal(database).got


def test_a_project_of_trackio_names_the_commands_that_fetch_record_and_history(
    tmp_path: Path,
) -> None:
    with closing(sqlite3.connect(tmp_path / "tiny.db")) as database:
        database.execute("CREATE TABLE metrics (id)")
        database.execute("CREATE TABLE configs (id)")

    for path in (tmp_path, tmp_path / "tiny.db"):
        said = refusal(path)
        assert said.got == "a run of trackio without it"
        assert "`trackio list artifacts --project tiny`, then `python" in said.remedy
        assert 'trackio.init("tiny", name="RUN", resume="must")' in said.remedy
    with pytest.raises(Refusal, match=r's.get_logs\("tiny", "RUN"\)'):
        read_trials(tmp_path, "loss")


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

    with pytest.raises(Refusal, match="got a run of W&B") as refused:
        read_trials(wandb, "loss")

    said = refused.value.remedy
    assert f"`wandb sync {wandb}`" in said
    (command,) = re.findall(r"`(python -c '[^`]*')` and pass history.csv instead\.$", said)
    exec(shlex.split(command)[2], {})
    assert asked == ["ENTITY/PROJECT/5fxl0acw"]
    assert written == [("history.csv", [{"loss": 1.0}])]
