# SPDX-License-Identifier: Apache-2.0
import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from program import ended
from refused import refused
from scripts import ROOT

import noisescale
from noisescale.prediction.branches import BranchedRun
from noisescale.user_code.targets import text_of

MODEL = """
from lab.branch.regression import Regression, examples

def make():
    return Regression(), examples()

def other():
    return Regression(features=8), examples()
"""

RUN = ("lightning_logs/version_0", "saved", "branched_model:make", "--accelerator", "cpu")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from lab.branch.regression import train

    folder = tmp_path_factory.mktemp("trained")
    (folder / "branched_model.py").write_text(MODEL)
    train(folder)
    return folder


@pytest.fixture(autouse=True)
def there(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(trained)
    monkeypatch.syspath_prepend(trained)
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{ROOT / 'tests'}")  # of workers and ranks


OPTIONS = ("--batch-sizes", "4x", "--loss-examples", 100)


def test_branches_are_trained_shown_and_predicted_from(tmp_path: Path) -> None:
    file = tmp_path / "my branches.json"
    options = [*OPTIONS, "--orders", 2, "--output", file]

    code, shown, progress = ended("branch", *RUN, *options)

    assert code == 0
    said = " ".join(progress.split())
    assert re.search(r"start at step 40 .* step 80, 2 at each batch", said)
    assert re.search(r"Branches cost about .* device-(milli)?seconds", said)
    assert said.count("batch size 32, order ") == 2
    assert shown.startswith("Critical batch size: ")
    assert f"noisescale predict {RUN[0]} --branches '{file}'" in " ".join(shown.split())
    code, again, nothing_new = ended("branch", *RUN, *options)
    assert (code, again) == (0, shown)
    assert ", order " not in nothing_new
    code, shown, errors = ended("predict", RUN[0], "--branches", file, "--json")
    assert (code, errors) == (0, "")
    assert "branches at 32" in json.loads(shown)["assumptions"][1]


def test_the_function_trains_what_the_command_trains(tmp_path: Path) -> None:
    import branched_model  # type: ignore[import-not-found]

    alone = tmp_path / "alone.json"
    code, shown, _ = ended("branch", *RUN, *OPTIONS, "--orders", 1, "--output", alone, "--json")
    assert code == 0
    lines: list[str] = []

    found = noisescale.branch(
        *RUN[:2], branched_model.Regression(), branched_model.examples(),
        batch_sizes=["4x"], orders=1, loss_examples=100, accelerator="cpu",
        output=tmp_path / "here.json", progress=lines.append,
    )  # fmt: skip

    (here,), (there,) = found.branched.branches, BranchedRun.from_file(alone).branches
    assert replace(here, seconds=0.0) == replace(there, seconds=0.0)
    record, expected = json.loads(found.to_json()), json.loads(shown)
    assert [each["batch_size"] for each in expected["branches"]] == [32]
    assert expected["critical_batch_size"]["low"] > 0
    assert len(expected["course"]) == 3
    for each in (record, expected):
        del each["branches"]  # with their seconds
        del each["answer"]["next"]  # with the name of the file
    assert record == expected
    assert lines[0].startswith("Branches cost about")
    assert lines[-1].startswith("Branch 1 of 1: batch size 32, order 1: loss ")
    assert found.to_text().startswith("Critical batch size: ")
    assert "<b>Critical batch size: " in found._repr_html_()


def test_workers_need_a_target_that_they_can_import(tmp_path: Path) -> None:
    import branched_model

    with refused("target", requirement="processes of the workers"):
        noisescale.branch(
            *RUN[:2], branched_model.Regression(), launcher="local", output=tmp_path / "b.json"
        )
    assert text_of(branched_model.make, "target") == "branched_model:make"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_branches_by_workers_are_those_that_are_trained_here(tmp_path: Path) -> None:
    file, alone = tmp_path / "branches.json", tmp_path / "alone.json"
    journal = ("--storage", tmp_path / "branches.journal")
    options = [*OPTIONS, "--orders", 2, "--output"]
    ended("branch", *RUN, *options, alone)
    known = BranchedRun.from_file(alone)
    replace(known, branches=known.branches[:1]).to_file(file)  # the second one is missing

    words = (*options, file, "--launcher", "local", "--workers", 1)
    code, told, progress = ended("branch", *RUN, *words)

    assert code == 0, progress
    assert "batch size 32, order 2: loss" in progress
    assert "order 1: loss" not in progress
    assert "Critical batch size" in told
    here, there = (
        [replace(branch, seconds=0.0) for branch in BranchedRun.from_file(each).branches]
        for each in (alone, file)
    )
    assert here == there
    assert (tmp_path / "branches_trials/trials/batch_size=32,order=1/result.json").exists()
    status = json.loads(ended("status", *journal, "--json")[1])
    assert (status["kind"], status["done"]) == ("branch", 2)
    assert ended("status", *journal)[1].startswith("2 trainings done, ")


@pytest.mark.slow
def test_two_processes_share_the_examples_and_one_of_them_writes(tmp_path: Path) -> None:
    """As people start it: Lightning starts the command again for the second device."""
    files = tmp_path / "branches.json", tmp_path / "alone.json"
    words = ["branch", *RUN, "--batch-sizes", "4x", "--orders", 1, "--output"]
    program = [Path(sys.executable).with_name("noisescale"), *words, files[0]]

    done = subprocess.run(
        list(map(str, [*program, "--devices", 2, "--strategy", "ddp"])),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    ended(*words, files[1])
    ((branch,), (other,)) = (json.loads(file.read_text())["branches"] for file in files)
    assert branch["losses"][0] == pytest.approx(other["losses"][0])
    assert branch["losses"] != other["losses"]
    assert branch["steps"][-1] < 2 * other["steps"][-1]


def test_a_branch_is_stopped_and_goes_on_with_the_same_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from noisescale.lab.branch import train_branches

    file, train = tmp_path / "branches.json", train_branches.fit_to_loss
    options = [*OPTIONS, "--orders", 2, "--output", file]

    def stopped(*arguments: Any) -> Any:
        if arguments[3] == 1:
            raise KeyboardInterrupt
        return train(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(train_branches, "fit_to_loss", stopped)
        code, _, errors = ended("branch", *RUN, *options)
    assert code != 0
    assert str(file) in errors
    code, _, errors = ended("branch", *RUN, *options)
    assert code == 0
    assert "order 1:" not in errors
    assert "order 2:" in errors


def test_a_dry_run_says_what_it_would_cost_and_trains_nothing(tmp_path: Path) -> None:
    code, shown, progress = ended("branch", *RUN, "--dry-run", "--output", tmp_path / "b.json")

    assert (code, progress) == (0, "")
    assert shown.startswith("Branches cost about ")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("gone saved branched_model:make", "`RUN` must be a folder or a file"),
        (f"{RUN[0]} gone branched_model:make", "`CHECKPOINT` must be a file, got gone"),
        (f"{RUN[0]} weights branched_model:make", "`CHECKPOINT` must contain the optimizer's"),
        (f"{RUN[0]} saved branched_model:gone", "`branched_model:gone` must name an object"),
        (f"{RUN[0]} saved branched_model:other --accelerator cpu", "`CHECKPOINT` must be of this"),
        ("RUN --batch-sizes x", "`--batch-sizes` must be numbers of examples"),
        ("RUN --learning-rate x", "`--learning-rate` must be one of auto, linear"),
        ("RUN --devices 0", "`--devices` must be a positive whole"),
        ("RUN --loss-examples 0", "`--loss-examples` must be at least 1"),
        ("RUN --max-device-batch-size -3", "`--max-device-batch-size` must be a positive"),
        ("RUN --strategy ddp_fork", "`--strategy` must start the whole command again"),
        ("RUN --lease 0", "`--lease` must be at least 1 second"),
        ("RUN --workers -1", "`--workers` must not be negative"),
        ("RUN --launcher pbs", "`--launcher` must be one of local, slurm, ray"),
        ("RUN --until gone", "`--until` must be a file"),
        ("RUN --output gone/b.json", "`--output` must be in a folder that exists"),
        ("RUN --output branched_model.py", "`branched_model.py` must be a file of `noises"),
    ],
)
def test_bad_input_is_one_line(words: str, message: str, tmp_path: Path) -> None:
    output = [] if "--output" in words else ["--output", tmp_path / "b.json"]

    code, told, errors = ended("branch", *words.replace("RUN", " ".join(RUN)).split(), *output)

    assert (code, told) == (2, "")
    assert errors.splitlines()[-1].startswith(f"noisescale: {message}")
