# SPDX-License-Identifier: Apache-2.0
"""A job whose trainings are short scripts, for tests of workers."""

import json
import math
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from noisescale.history.metrics import Goal
from noisescale.lab.jobs import launchers, trial_process, worker
from noisescale.lab.jobs.jobs import Entry, Job, Record, State, Task, Training, results_of
from noisescale.lab.jobs.ledger import Ledger
from noisescale.lab.jobs.trial import train_trial
from noisescale.lab.sweep.search import Search
from noisescale.lab.sweep.settings import ModuleDefaults, SweepJob

SCRIPT = """
import json, math, sys, time
from pathlib import Path
folder = Path(sys.argv[1])
spec = json.loads((folder / "task.json").read_text())
{body}
(folder / "result.json").write_text(json.dumps({result}))
"""
SQUARE = '{"ended": "reached", "square": spec["n"] ** 2}'


TRAIN = """
import os
import torch
from pytorch_lightning import LightningModule, seed_everything
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

FAILS, SEEDS = os.environ.get("FAILS", ""), os.environ.get("SEEDS", "")

class Line(LightningModule):
    def __init__(self, width=0, bias=False):
        super().__init__()
        self.width = width
        self.net = nn.Linear(width or 4, 1, bias=bias)
        if width:
            self.net = nn.Sequential(nn.Linear(4, width, bias=bias), self.net)

    def training_step(self, batch, batch_idx):
        if FAILS == "all" or (FAILS == "rate" and self.global_step):
            raise ArithmeticError("no such luck")
        loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
        if self.width:
            self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
        self.log("val_loss", loss, sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.02, momentum=0.9 if self.width else 0)

generator = torch.Generator().manual_seed(0)
x = torch.randn(256, 4, generator=generator)
y = x.sum(1, keepdim=True) + torch.randn(256, 1, generator=generator)
data = TensorDataset(x, y)

def make():
    if SEEDS:
        seed_everything(42, verbose=False)
    return Line(), (DataLoader(data, batch_size=8, shuffle=True), DataLoader(data, batch_size=64))
"""
"""A user's script."""

CPU = Training("train.py:make", accelerator="cpu")
SWEEP = SweepJob(
    CPU,
    ModuleDefaults(1000.0, 32, 0.1),
    Goal.read("loss<=0.1"),
    (16, 64, 256),
    Search((), 3, 3),
    10,
)


def write_script(folder: Path, monkeypatch: pytest.MonkeyPatch, text: str = TRAIN) -> Path:
    """Let the script be `train.py` of the current folder, for workers too."""
    package = str(Path(launchers.__file__).parents[3])
    (folder / "train.py").write_text(text)
    monkeypatch.chdir(folder)
    monkeypatch.delitem(sys.modules, "train", raising=False)
    monkeypatch.syspath_prepend(package)
    monkeypatch.setenv("PYTHONPATH", package)
    return folder


@dataclass(frozen=True)
class Squares(Job):
    """Two rounds of tasks: 0 to `count` - 1, and then their sum."""

    training: Training = field(default=CPU, init=False)
    count: int = 3
    kind = "squares"

    def as_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def next_tasks(self, entries: Mapping[str, Entry]) -> list[Task]:
        results = results_of(entries)
        first = [Task(f"n={n}", {"n": n}) for n in range(self.count)]
        missing = [task for task in first if task.key not in results]
        if missing:
            return missing
        total = sum(results[task.key].get("square", 0) for task in first)
        last = Task(f"sum={total}", {"n": total})
        return [] if last.key in results else [last]

    def limit_of(self, spec: Record, entries: Mapping[str, Entry]) -> float:
        return 1000.0 + len(results_of(entries))


SQUARES = Squares()


def begun(place: Path | str, job: Job = SQUARES, lease: float = 60.0) -> Ledger:
    """A ledger in which the first tasks of a job are waiting."""
    ledger = Ledger.begin(str(place), "test", job, lease)
    ledger.want(job.next_tasks({}))
    return ledger


def claimed(ledger: Ledger, key: str, **worker: Any) -> Entry:
    entry = ledger.claim([key], {"host": "here", "process": 1} | worker)
    assert entry is not None
    return entry


def trained_here(spec: Record, folder: Path) -> dict[str, Any]:
    """The result of a training in this process."""
    folder.mkdir(exist_ok=True)
    (folder / "task.json").write_text(json.dumps(dict(spec)))
    with mock.patch.dict(os.environ):
        train_trial(folder)
    found: dict[str, Any] = json.loads((folder / "result.json").read_text())
    return found


def ended(task: Task, result: Record) -> Entry:
    """What a ledger has of a task once it has a result."""
    return Entry(task.key, State.DONE, 0, 1, task.spec, {}, math.nan, result)


def script(path: Path, body: str = "", result: str = SQUARE) -> list[str]:
    """The command of a training that does something before its result is written."""
    path.write_text(SCRIPT.format(body=body, result=result))
    return [sys.executable, str(path)]


def scripted(
    folder: Path, monkeypatch: pytest.MonkeyPatch, body: str, result: str = SQUARE
) -> None:
    """Let trainings be such a script."""
    command = script(folder / "train_one.py", body, result)
    monkeypatch.setattr(trial_process, "command_of", lambda place, _: [*command, str(place)])
    monkeypatch.setattr(worker, "IDLE", 0.05)


def squares_in(results: Mapping[str, Record]) -> dict[str, int]:
    return {key: json.loads(json.dumps(result))["square"] for key, result in results.items()}
