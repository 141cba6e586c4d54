# SPDX-License-Identifier: Apache-2.0
"""`noisescale sweep`, `work` and `status`, with trainings in processes of their own."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import pytest
import torch
from lab.jobs.jobs_for_tests import ended as in_ledger
from program import ended, refused, run
from scripts import SERVER, Forked, started

from noisescale.history.metrics import Goal
from noisescale.lab.jobs import launchers, trial_process
from noisescale.lab.jobs.jobs import FAILED, Entry, Task, Training
from noisescale.lab.jobs.ledger import Ledger
from noisescale.lab.jobs.trial_process import ColdProcess, TrialProcess, command_of
from noisescale.lab.jobs.workers import Place
from noisescale.lab.sweep.doubts import doubts_before
from noisescale.lab.sweep.files import write_files
from noisescale.lab.sweep.make_job import sweep_job
from noisescale.lab.sweep.search import Search
from noisescale.lab.sweep.settings import Own, SweepJob
from noisescale.lab.sweep.sweep_record import sweep_record
from noisescale.lab.sweep.trial_fit import Made, train_task
from noisescale.lightning.training import seed_all
from noisescale.made.targets import module_and_data
from noisescale.tradeoff.sweep_files import read_sweeps

TRAIN = """
import os
import torch
from pytorch_lightning import LightningModule
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

class Line(LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(4, 1, bias=False)

    def training_step(self, batch, batch_idx):
        if FAILS == "all" or (FAILS == "rate" and self.global_step):
            raise ArithmeticError("no such luck")
        return nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def validation_step(self, batch, batch_idx):
        loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
        self.log("val_loss", loss, sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.02)

FAILS = os.environ.get("FAILS", "")
generator = torch.Generator().manual_seed(0)
x = torch.randn(256, 4, generator=generator)
y = x.sum(1, keepdim=True) + torch.randn(256, 1, generator=generator)
data = TensorDataset(x, y)

def make():
    return Line(), (DataLoader(data, batch_size=8, shuffle=True), DataLoader(data, batch_size=64))
"""

SWEEP = ("--goal", "val_loss<=1.1", "--batch-sizes", "8,32", "--trials", "3", "--repeats", "1")
RATES = "learning_rate=0.03..1"
CPU = ("--accelerator", "cpu", "--epochs", "20", "--search", RATES)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "train.py").write_text(TRAIN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "train", raising=False)
    monkeypatch.syspath_prepend(str(Path(launchers.__file__).parents[3]))
    package = str(Path(launchers.__file__).parents[3])
    monkeypatch.setenv("PYTHONPATH", package)  # of the workers too
    return tmp_path


def sweep(*arguments: object, target: str = "train.py:make") -> tuple[int, str, str]:
    return ended("sweep", target, *SWEEP, *CPU, *arguments)


def trials_of(sweep: int | None) -> list[psutil.Process]:
    """The processes that the workers have started of the one process that the sweep started."""
    try:
        workers = [each for one in psutil.Process(sweep).children() for each in one.children()]
        return [trial for worker in workers for trial in worker.children()]
    except psutil.Error:  # one has ended
        return []


def trained_here(job: SweepJob, folder: Path) -> dict[str, Entry]:
    """The entries of a sweep, by trainings in this process, one after the other."""
    entries: dict[str, Entry] = {}
    while wanted := job.next_tasks(entries):
        for task in wanted:
            limit = job.limit_of(task.spec, entries)
            (folder / "limit").write_text(str(limit))
            seed_all(task.spec["seed"])
            made = Made(*module_and_data("train.py:make", None))
            seed_all(task.spec["seed"])
            train_task(made, task.spec, folder)
            result = json.loads((folder / "result.json").read_text())
            entries[task.key] = in_ledger(task, result)
    return entries


@pytest.mark.timeout(400)
def test_a_sweep_of_which_a_worker_is_killed_has_the_table_of_one_that_is_not(here: Path) -> None:
    """Two workers share a device."""
    (here / "here").mkdir()
    job = settings(here)
    alone = trained_here(job, here / "here")
    write_files(sweep_record(job, alone, Place("sweep", "")), here / "here")
    *known, _, _, _ = alone.values()  # the last three are trained by the workers
    ledger = Ledger.begin("sweep/sweep.journal", "sweep", job)
    ledger.take((Task(entry.key, entry.spec), entry.result) for entry in known)
    words = ["-m", "noisescale", "sweep", "train.py:make", *SWEEP, *CPU, "--per-device", 2]
    with started(*words, "--lease", 5, cwd=here, output=here / "output.txt") as process:
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
    table = (here / "sweep/sweep.csv").read_text()
    assert table == (here / "here/sweep.csv").read_text()
    assert table.startswith("batch_size,steps,learning_rate,seed\n8,")
    assert len(list((here / "sweep/trials").glob("*-2"))) == 1
    assert {worker["process"] for worker in shown["workers"]} >= {victim.pid}
    (shared,) = {each["device"] for each in shown["workers"]}
    assert shared == "CPU"
    assert re.search(r"^batch_size=\S+: (reached|stopped early), \d+ s, on \S+", output, re.M)
    assert "What each device did" in output
    assert "trainings done" in output
    assert "Critical batch size" in output
    assert "Further workers join with: noisescale work --storage sweep/sweep.journal" in output
    assert "See how well the law fits: noisescale fit sweep/sweep.csv" in output

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
    listed = run("status", "--storage", "sweep/sweep.journal")
    assert "Steps to val_loss <= 1.1" in listed


def job(**training: Any) -> SweepJob:
    return SweepJob(
        Training("train.py:make", accelerator="cpu", **training),
        Own(256, 8, 0.02),
        Goal.read("val_loss<=1.1"),
        (8, 32),
        Search((), 3, 1),
        20,
        8,
    )


def test_two_ranks_train_a_trial_and_one_that_dies_fails_it(here: Path) -> None:
    task = job(devices=2, strategy="ddp").task(32, {"learning_rate": 0.05}, 0)
    (here / "dies.py").write_text("import os\nif os.environ['RANK'] == '1': os._exit(3)\n")

    process = SERVER.Process(target=train_on_two_ranks, args=(here, task.spec))
    process.start()
    process.join(100)
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
            process.wait(50)
            process.stop()
            found.append((process.result(), process.reason()))
    (here / "both.json").write_text(json.dumps(found))


def test_a_goal_that_nobody_reaches_ends_with_code_1(here: Path) -> None:
    ledger = Ledger.begin("sweep/sweep.journal", "sweep", begun := settings(here))
    while wanted := begun.next_tasks(ledger.entries()):
        missed = {"steps": [1], "values": [2.0], "seconds": [1.0], "ended": "out of steps"}
        ledger.take((task, missed) for task in wanted)

    code, output, _ = sweep("--workers", 0)

    assert code == 1
    assert "No run reached the goal at batch size 8, 32." in output
    said_once = " ".join(output.split())
    assert "Batch size 8, 32: trainings ended before the goal, by `--epochs 20`." in said_once
    assert "another `--output`" in said_once
    assert "noisescale compare" not in output


def test_a_seed_in_the_script_and_a_goal_of_a_batch_are_told(here: Path) -> None:
    script = here / "train.py"
    seeded = script.read_text().replace("FAILS = ", "torch.manual_seed(0)\nFAILS = ", 1)
    logged = seeded.replace('self.log("val_loss"', 'self.log("of_all"')
    logged = logged.replace("return nn", 'self.log("loss", torch.tensor(9.0))\n        return nn')
    (here / "own_seed.py").write_text(logged)
    options = {"trials": 3, "seed": 0, "epochs": 20, "max_device_batch_size": None}
    torch.manual_seed(0)  # what was set before is not the script's
    found = [
        doubts_before(
            sweep_job(Training(target, accelerator="cpu"), goal, "8,32", [], repeats=n, **options)
        )  # type: ignore[arg-type]  # of several types
        for target, goal, n in (
            ("train.py:make", "val_loss<=1", 3),
            ("own_seed.py:make", "of_all<=1", 3),
            ("train.py:make", "val_loss<=900", 3),
            ("own_seed.py:make", "loss<=1", 1),
        )
    ]

    assert found[0] == []
    assert [len(each) for each in found[1:]] == [1, 1, 1]
    assert found[1][0].startswith(
        "own_seed.py:make sets a seed: all repetitions begin with the same"
    )
    assert found[2][0].startswith("A single step has met val_loss <= 900.")
    assert found[3][0].startswith("loss is logged by the training step: it is that of one batch")


def settings(here: Path) -> SweepJob:
    """The job of a sweep with the options of these tests."""
    options = {"trials": 3, "repeats": 1, "seed": 0, "epochs": 20, "max_device_batch_size": None}
    training = Training("train.py:make", accelerator="cpu")
    return sweep_job(training, "val_loss<=1.1", "8,32", [RATES], **options)  # type: ignore[arg-type]  # of several types


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("no.py:make",), "must be a Python file, got a path without a file"),
        (("train.py:no",), "must name an object that exists, got no 'no' in train"),
        (("broken.py:make",), "must be importable, got ModuleNotFoundError"),
        (("train.py:make", "--goal", "val_loss=1"), "`--goal` must say whether the metric is"),
        (("train.py:make", "--goal", "val_los<=1"), "`--goal` must be about a metric that the"),
        (
            ("train.py:make", "--batch-sizes", "8"),
            "two batch sizes or more, got '8', which is 8 alone.",
        ),
        (("train.py:make", "--batch-sizes", "64..8"), "got '64..8', which ends before it begins."),
        (
            ("train.py:make", "--goal", "val_loss <"),
            "Write, for example, val_loss<=0.15 or val_acc",
        ),
        (("train.py:make", "--epochs", "inf"), "`--epochs` must be positive and finite, got inf."),
        (
            ("train.py:make", "--seed", -1),
            "`--seed` must be from 0 to below 2,147,483,648, got -1.",
        ),
        (
            ("train.py:make", "--search", "momentum"),
            "must be written as name=values, got 'momentum'",
        ),
        (("train.py:make", "--lease", "inf"), "at least 1 second, and finite, got inf. Give 60."),
        (("train.py:make", "--batch-sizes", "8,512"), "be at most the number of examples, 256"),
        (("train.py:make", "--search", "dropout=0..1"), "`--search` must name learning_rate"),
        (("train.py:make", "--trials", 2), "`--trials` must be at least 3, got 2."),
        (("train.py:make", "--workers", -1), "`--workers` must not be negative, got -1."),
        (("train.py:make", "--launcher", "pbs"), "`--launcher` must be one of local, slurm, ray"),
        (("train.py:make", "--output", "notes.txt"), "`--output` must be a folder that can be"),
        (("train.py:make", "--storage", "."), "`--storage` must be a file, got the folder"),
        (("train.py:make", "--storage", "notes.txt"), "`--storage` must be a journal of Optuna"),
        (
            ("train.py:make", "--lease", 0),
            "`--lease` must be at least 1 second, and finite, got 0.",
        ),
    ],
)
def test_bad_options_are_refused(here: Path, arguments: tuple[str, ...], message: str) -> None:
    (here / "broken.py").write_text("import nowhere_at_all\n")
    (here / "notes.txt").write_text("no journal\n")
    target, *others = arguments

    code, output, said = sweep(*others, target=target)

    assert (code, output) == (2, "")
    assert message in said.splitlines()[-1]


def test_a_training_step_that_fails_is_shown_before_anything_is_begun(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAILS", "all")

    code, _, said = sweep()

    assert code == 1
    assert "ArithmeticError: no such luck" in said
    assert not (here / "sweep").exists()


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
    Ledger.begin("sweep/sweep.journal", "sweep", settings(here))

    _, _, said = sweep("--goal", "val_loss<=1.2")
    assert "differs in `--goal` (val_loss <= 1.1 before, val_loss <= 1.2 now). Give" in said
    _, _, said = sweep("--trials", 5, "--epochs", 3)
    assert "with the job 'sweep', which differs in `--epochs` (20 before, 3 now)," in said
    assert "`--trials` (3 before, 5 now). Give the settings from before. For a new job" in said
    assert "`--lease` must be at least 1 second, and finite, got 0." in refused(
        "work", "--storage", "sweep/sweep.journal", "--lease", 0
    )
    os.chdir(here / "sweep")
    assert "in the folder of the worker, got" in refused("work", "--storage", "sweep.journal")
    os.chdir(here)
    for command in ("work", "status"):
        assert "`--storage` must exist, got" in refused(command, "--storage", "none.journal")
        assert "`--storage` must have the job 'x', got 'sweep'." in refused(
            command, "--storage", "sweep/sweep.journal", "--name", "x"
        )


@pytest.mark.timeout(400)
def test_where_all_trainings_fail_their_reason_is_the_last_line(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step of the first look does not fail: it trains with the module's own learning rate."""
    monkeypatch.setenv("FAILS", "rate")
    begun = settings(here)
    ledger = Ledger.begin("sweep/sweep.journal", "sweep", begun)
    ledger.take(
        (task, {FAILED: "it is the third that counts"}) for task in begun.next_tasks({})[:2]
    )

    code, _, said = sweep()

    assert code == 2
    assert "`TARGET` must train, got only trainings that failed. The last one: Arith" in said
    assert "All workers have stopped. Finished trainings are kept: the same command goes" in said
