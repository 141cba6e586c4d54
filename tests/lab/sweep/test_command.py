# SPDX-License-Identifier: Apache-2.0
"""`noisescale sweep`, `work` and `status`, with trainings in processes of their own."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import pytest
from lab.jobs.jobs_for_tests import CPU, TRAIN, trained_here, write_script
from lab.jobs.jobs_for_tests import ended as in_ledger
from program import ended, refused, run
from scripts import SERVER, Forked, started
from tiers import slow

from noisescale.lab.jobs import trial_process
from noisescale.lab.jobs.jobs import FAILED, Entry, Task
from noisescale.lab.jobs.ledger import Ledger
from noisescale.lab.jobs.trial_process import ColdProcess, TrialProcess, command_of
from noisescale.lab.jobs.workers import Place
from noisescale.lab.sweep.answer import Sweep, doubts_before
from noisescale.lab.sweep.make_job import SweepOptions, sweep_job
from noisescale.lab.sweep.settings import SweepJob
from noisescale.tradeoff.sweep_files import read_sweeps

SWEEP = ("--goal", "val_loss<=1.1", "--batch-sizes", "8,32", "--trials", "3", "--repeats", "1")
RATES = "learning_rate=0.03..1"
SHORT = ("--accelerator", "cpu", "--epochs", "20", "--search", RATES)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return write_script(tmp_path, monkeypatch)


def sweep(*arguments: object, target: str = "train.py:make") -> tuple[int, str, str]:
    return ended("sweep", target, *SWEEP, *SHORT, *arguments)


def trials_of(sweep: int | None) -> list[psutil.Process]:
    """The processes that the workers have started of the one process that the sweep started."""
    try:
        workers = [each for one in psutil.Process(sweep).children() for each in one.children()]
        return [trial for worker in workers for trial in worker.children()]
    except psutil.Error:  # one has ended
        return []


def swept_here(job: SweepJob, folder: Path) -> dict[str, Entry]:
    """The entries of a sweep, by trainings in this process, one after the other."""
    entries: dict[str, Entry] = {}
    folder.mkdir()
    while wanted := job.next_tasks(entries):
        for task in wanted:
            (folder / "limit").write_text(str(job.limit_of(task.spec, entries)))
            entries[task.key] = in_ledger(task, trained_here(task.spec, folder))
    return entries


def output_of_sweep_with_killed_worker(here: Path) -> str:
    """Two workers share a device; one of them is killed in its first training."""
    words = ["-m", "noisescale", "sweep", "train.py:make", *SWEEP, *SHORT, "--per-device", 2]
    with started(*words, "--lease", 2, cwd=here, output=here / "output.txt") as process:
        while not (trials := trials_of(process.pid)):
            assert process.is_alive(), (here / "output.txt").read_text()
            time.sleep(0.05)
        shown = json.loads(run("status", "--storage", "sweep/sweep.journal", "--json"))
        victim = trials[0].parent()
        assert victim is not None
        os.kill(victim.pid, signal.SIGKILL)
        process.join(300)
    output = (here / "output.txt").read_text()
    assert process.exitcode == 0, output
    assert len(list((here / "sweep/trials").glob("*-2"))) == 1
    assert {worker["process"] for worker in shown["workers"]} >= {victim.pid}
    assert {each["device"] for each in shown["workers"]} == {"CPU"}
    return output


@pytest.mark.timeout(400)
@pytest.mark.parametrize("killed", [False, slow(True)])
def test_a_sweep_by_workers_has_the_table_of_trainings_here_also_if_one_is_killed(
    here: Path, killed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = settings()
    alone = swept_here(job, here / "here")
    Sweep.of(job, alone, Place("sweep", "")).write_files(here / "here")
    known = list(alone.values())[: -3 if killed else -1]  # the others are trained by the workers
    ledger = Ledger.begin("sweep/sweep.journal", "sweep", job)
    ledger.take((Task(entry.key, entry.spec), entry.result) for entry in known)

    if killed:
        output = output_of_sweep_with_killed_worker(here)
    else:
        with monkeypatch.context() as patch:
            patch.setattr(subprocess, "Popen", Forked)
            code, shown, said = sweep("--workers", 1)
        output = said + shown
        assert code == 0, output

    table = (here / "sweep/sweep.csv").read_text()
    assert table == (here / "here/sweep.csv").read_text()
    assert table.startswith("batch_size,steps,learning_rate,seed\n8,")
    assert re.search(r"^batch_size=\S+: (reached|stopped early), \d+ s, on \S+", output, re.M)
    for said in (
        "What each device did",
        "trainings done",
        "Critical batch size",
        "noisescale work --storage sweep/sweep.journal",
        "noisescale fit sweep/sweep.csv",
    ):
        assert said in output

    again, _, _ = sweep("--workers", 0)  # nothing is left to train
    status = json.loads(run("status", "--storage", "sweep/sweep.journal", "--json"))
    assert again == 0
    assert status["finished"]
    assert status["done"] == status["expected"] >= 2 * 5
    assert [size["finished"] for size in status["batch_sizes"]] == [True, True]
    assert status["device_hours"] > 0
    assert status["workers"] == []
    assert len(read_sweeps("sweep/sweep.csv")[""].measured) == 2
    goal = ("--goal", "val_loss<=1.1")
    compared = json.loads(run("compare", "sweep/trials.csv", *goal, "--by", "steps", "--json"))
    steps = {line.split(",")[0] for line in table.splitlines()[1:]}
    assert {f"{batch['batch_size']:g}" for batch in compared["sweeps"][0]["batches"]} == steps
    assert "Steps to val_loss <= 1.1" in run("status", "--storage", "sweep/sweep.journal")


@pytest.mark.slow
def test_two_ranks_train_a_trial_and_one_that_dies_fails_it(here: Path) -> None:
    two = replace(CPU, devices=2, strategy="ddp")
    job = replace(settings(), training=two, max_device_batch_size=8)
    task = job.task(32, {"learning_rate": 0.05}, 0)
    (here / "dies.py").write_text("import os\nif os.environ['RANK'] == '1': os._exit(3)\n")

    process = SERVER.Process(target=train_on_two_ranks, args=(here, task.spec))
    process.start()
    process.join(220)
    process.kill()
    (found, _), (none, reason) = json.loads((here / "both.json").read_text())

    assert (task.spec["device_batch_size"], task.spec["accumulation"]) == (8, 2)
    assert found["ended"] == "reached"
    assert found["devices"] == 2
    assert none is None
    assert "rank 1 ended with code 3; see" in reason


def train_on_two_ranks(here: Path, spec: dict[str, Any]) -> None:
    """Train a task, and then let a rank die; save what each has found, and why it failed."""
    os.chdir(here)
    sys.path.insert(0, str(here))
    found = []
    with mock.patch.object(subprocess, "Popen", Forked):
        commands = {
            "task": command_of(here / "task", 2),
            "dies": [*command_of(here, 2)[:-3], "dies.py"],
        }
        for name, command in commands.items():
            with mock.patch.object(trial_process, "command_of", lambda *_, words=command: words):
                process = TrialProcess(here / name, spec, 2, lambda folder: ColdProcess(folder, 2))
            process.process.wait(100)
            process.process.kill()
            found.append((process.result(), process.reason()))
    (here / "both.json").write_text(json.dumps(found))


def test_a_goal_that_nobody_reaches_ends_with_code_1(here: Path) -> None:
    ledger = Ledger.begin("sweep/sweep.journal", "sweep", begun := settings())
    while wanted := begun.next_tasks(ledger.entries()):
        missed = {"steps": [1], "values": [2.0], "seconds": [1.0], "ended": "out of steps"}
        ledger.take((task, missed) for task in wanted)

    code, output, _ = sweep("--workers", 0)

    assert code == 1
    assert "No run reached the goal at batch size 8, 32." in output
    assert "`--epochs 20`" in output
    assert "noisescale compare" not in output


def test_a_seed_in_the_script_and_a_goal_of_a_batch_are_told(here: Path) -> None:
    import torch

    seeded = TRAIN.replace("FAILS, ", "torch.manual_seed(0)\nFAILS, ", 1)
    logged = seeded.replace('self.log("val_loss"', 'self.log("of_all"').replace(
        "return loss", 'self.log("loss", torch.tensor(9.0))\n        return loss'
    )
    (here / "own_seed.py").write_text(logged)
    torch.manual_seed(0)  # what was set before is not the script's

    found = [
        doubts_before(settings(f"{script}.py:make", goal, repeats))
        for script, goal, repeats in (
            ("train", "val_loss<=1", 3),
            ("own_seed", "of_all<=1", 3),
            ("train", "val_loss<=900", 3),
            ("own_seed", "loss<=1", 1),
        )
    ]

    none, (seed,), (met,), (of_batch,) = found
    assert none == []
    assert "sets a seed" in seed
    assert met.startswith("A single step")
    assert of_batch.startswith("loss is logged")


def settings(target: str = CPU.target, goal: str = "val_loss<=1.1", repeats: int = 1) -> SweepJob:
    """The job of a sweep with the options of these tests."""
    asked = SweepOptions(goal, "8,32", [RATES], 3, repeats, 20.0, 0, None)
    return sweep_job(replace(CPU, target=target), asked)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("broken.py:make", "`broken.py:make` must be importable, got ModuleNotFoundError"),
        ("train.py:make --goal val_los<=1", "`--goal` must be about a metric that the"),
        ("train.py:make --batch-sizes 8", "`--batch-sizes` must be two batch sizes or more"),
        ("train.py:make --epochs inf", "`--epochs` must be positive and finite"),
        ("train.py:make --seed -1", "`--seed` must be from 0 to below 2,147,483,648"),
        ("train.py:make --search dropout=0..1", "`--search` must name learning_rate"),
        ("train.py:make --lease inf", "`--lease` must be at least 1 second"),
        ("train.py:make --trials 2", "`--trials` must be at least 3"),
        ("train.py:make --output notes.txt", "`--output` must be a folder"),
        ("train.py:make --storage .", "`--storage` must be a file"),
        ("train.py:make --storage notes.txt", "`--storage` must be a journal of Optuna"),
    ],
)
def test_bad_options_are_refused(here: Path, words: str, message: str) -> None:
    (here / "broken.py").write_text("import nowhere_at_all\n")
    (here / "notes.txt").write_text("no journal\n")
    target, *others = words.split()

    code, output, said = sweep(*others, target=target)

    assert (code, output) == (2, "")
    assert said.splitlines()[-1].startswith(f"noisescale: {message}")


def test_a_training_step_that_fails_is_shown_before_anything_is_begun(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAILS", "all")

    code, _, said = sweep()

    assert code == 1
    assert "ArithmeticError" in said
    assert not (here / "sweep").exists()


@pytest.mark.slow
def test_what_a_script_does_to_folder_and_streams_stays_out_of_the_answer(here: Path) -> None:
    """As with `os.chdir`, a print, and a logger that takes stdout to a file."""
    (here / "runs").mkdir()
    disturbing = """
import io, os, sys
print("dataset ready")
os.chdir("runs")
sys.stdout = io.StringIO()
"""
    (here / "train.py").write_text(TRAIN + disturbing)

    code, output, _ = sweep("--workers", "1", "--json", "--lease", "20")

    assert json.loads(output)["goal"]
    assert code == 0
    assert (here / "sweep/sweep.csv").exists()


def test_a_storage_of_another_sweep_is_refused_and_one_that_is_gone_too(here: Path) -> None:
    Ledger.begin("sweep/sweep.journal", "sweep", settings())
    there = ("--storage", "sweep/sweep.journal")

    _, _, said = sweep("--goal", "val_loss<=1.2")
    assert "differs in `--goal` (val_loss <= 1.1 before, val_loss <= 1.2 now). Give" in said
    _, _, said = sweep("--trials", 5, "--epochs", 3)
    assert "differs in `--epochs` (20 before, 3 now), `--trials` (3 before, 5 now). Give" in said
    assert refused("work", *there, "--lease", 0).startswith("`--lease` must be at least 1 second")
    os.chdir(here / "sweep")
    assert "in the folder of the worker" in refused("work", "--storage", "sweep.journal")
    os.chdir(here)
    for command in ("work", "status"):
        assert "`--storage` must exist" in refused(command, "--storage", "none.journal")
        assert "`--storage` must have the job 'x'" in refused(command, *there, "--name", "x")


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_where_all_trainings_fail_their_reason_is_the_last_line(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step of the first look does not fail: it trains with the module's own learning rate."""
    monkeypatch.setenv("FAILS", "rate")
    begun = settings()
    ledger = Ledger.begin("sweep/sweep.journal", "sweep", begun)
    ledger.take(
        (task, {FAILED: "it is the third that counts"}) for task in begun.next_tasks({})[:2]
    )

    code, _, said = sweep()

    assert code == 2
    assert "`TARGET` must train, got only trainings that failed. The last one: Arith" in said
    assert "All workers have stopped" in said
