# SPDX-License-Identifier: Apache-2.0
"""`noisescale predict` of a folder of runs."""

import json
import os
import re
import shlex
import shutil
from pathlib import Path

import pytest
from logged_runs import log_run, record
from program import refused, run

from noisescale import History, predict
from noisescale.history.reading import read_run
from noisescale.history.record import Recorder
from noisescale.history.trackers import RECORD
from noisescale.report.records import finite


@pytest.fixture
def logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Runs of all kinds, "b" being the oldest, "a" the newest."""
    monkeypatch.chdir(tmp_path)
    folder = Path("my logs")
    log_run(folder / "b")
    log_run(folder / "unresolved", resolved=False, noise_scale=1000.0)
    history = History()
    history.why_nothing = "One process trains."
    Recorder(folder / "unmeasured").note(history)
    log_run(folder / "damaged")
    header, *rest = (folder / "damaged" / RECORD).read_text().splitlines(keepends=True)
    (folder / "damaged" / RECORD).write_text("".join([header.replace("0.95", "null"), *rest]))
    (folder / "none").mkdir()
    (folder / "none" / RECORD).touch()
    record(folder / "odd", step=[10, 20], examples=[640, 320], batch_size=[64, 64])
    log_run(folder / "wide", monitor="wide")
    log_run(folder / "a", noise_scale=96.0)
    names = ("b", "unresolved", "unmeasured", "damaged", "none", "odd", "wide", "a")
    for age, name in enumerate(reversed(names)):
        for file in (folder / name).iterdir():
            os.utime(file, (1e9 - age, 1e9 - age))
    return folder


def test_runs_are_a_table_from_the_oldest_to_the_newest(logs: Path) -> None:
    output = run("predict", logs, "--calibration", 2)

    lines = [" ".join(line.split()) for line in output.splitlines()]
    first = next(k for k, line in enumerate(lines) if line.startswith("b "))
    assert output.startswith("8 runs in my logs")
    assert [line for line in lines[first:-2] if re.match("[a-z]", line)] == [
        "b 1,000 64 2 192 384 larger: 128",
        "unresolved 1,000 64 2 >= 800 >= 1,600 larger: 256",
        "unmeasured unmeasured",
        "damaged damaged",
        "none empty",
        "odd unusable",
        "wide absent",
        "a 1,000 64 2 96.0 192 keep or larger",
    ]
    assert "154–250" in output  # bounds of the first one


def test_runs_that_have_one_and_the_same_fault_do_not_hide_the_others(logs: Path) -> None:
    shutil.copytree(logs / "odd", logs / "odd too")

    output = run("predict", logs)

    assert output.count("unusable") == 2
    assert "76.8–125" in output


def test_the_command_at_the_end_is_whole_and_of_the_newest_run_that_is_predicted(
    logs: Path,
) -> None:
    logs = logs.rename("my logs of " + "many " * 20)
    os.utime(next((logs / "unmeasured").iterdir()))

    *_, reason, last = run("predict", logs).splitlines()

    refusal = shlex.split(reason.partition("reason: ")[2])[1:]
    assert "One process trains." in refused(*refusal)
    program, *words = shlex.split(last.partition(": ")[2])
    assert (program, words) == ("noisescale", ["predict", f"{logs}/a"])
    assert "Critical batch size" in run(*words)


def test_where_nothing_can_be_predicted_the_command_says_why(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / name).mkdir()
        (tmp_path / name / RECORD).touch()

    last = run("predict", tmp_path).splitlines()[-1]

    command = last.partition("reason: ")[2]
    assert "Wait until the monitor has logged once." in refused(*shlex.split(command)[1:])


def test_json_has_every_run(logs: Path) -> None:
    found = json.loads(run("predict", logs, "--json", "--devices", "1,2"))["runs"]

    assert [Path(each["run"]).name for each in found][::7] == ["b", "a"]
    of = {Path(each["run"]).name: each for each in found}
    expected = predict(read_run(logs / "a"), devices=[1, 2])
    assert of["a"]["prediction"] == finite(expected.to_dict())
    assert (of["a"]["word"], of["a"]["reason"]) == (None, None)
    assert (of["unmeasured"]["prediction"], of["unmeasured"]["word"]) == (None, "unmeasured")
    assert "One process trains." in of["unmeasured"]["reason"]


def test_a_folder_of_one_run_is_that_run(tmp_path: Path) -> None:
    log_run(tmp_path / "lightning_logs/version_0")

    assert run("predict", tmp_path) == run("predict", tmp_path / "lightning_logs/version_0")


@pytest.mark.parametrize(
    ("words", "argument"),
    [("--calibration -1", "--calibration"), ("--step-times gone.csv", "gone.csv")],
)
def test_what_is_wrong_for_every_run_is_one_line(logs: Path, words: str, argument: str) -> None:
    assert refused("predict", logs, *words.split()).startswith(f"`{argument}` must be ")
