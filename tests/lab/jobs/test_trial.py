# SPDX-License-Identifier: Apache-2.0
import json
import subprocess
import sys
from pathlib import Path

import pytest

from noisescale.history.metrics import Goal
from noisescale.lab.jobs.jobs import Training
from noisescale.lab.jobs.trial import train_trial
from noisescale.lab.sweep.search import Search
from noisescale.lab.sweep.settings import Own, SweepJob

SEEDED = """
import torch
from pytorch_lightning import LightningModule, seed_everything
from torch.utils.data import DataLoader, TensorDataset

class Line(LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(1, 1)

    def training_step(self, batch, batch_idx):
        return (self.net(batch[0]) - batch[1]).square().mean()

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.training_step(batch, batch_idx))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)

def make():
    seed_everything(42, verbose=False)
    data = TensorDataset(torch.randn(64, 1), torch.randn(64, 1))
    return Line(), (DataLoader(data, 8, shuffle=True), DataLoader(data, 64))
"""


def test_repetitions_differ_though_the_user_s_function_sets_a_seed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "seeded.py").write_text(SEEDED)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "seeded", raising=False)
    for name in ("PL_GLOBAL_SEED", "PL_SEED_WORKERS"):
        monkeypatch.setenv(name, "0")
    training, goal = Training("seeded.py:make", accelerator="cpu"), Goal.read("val_loss<=0")
    job = SweepJob(training, Own(64, 8, 0.01), goal, (8, 16), Search((), 3, 2), epochs=0.5)

    def values(folder: str, seed: int) -> list[float]:
        task = job.task(8, {"learning_rate": 0.01}, seed)
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "task.json").write_text(json.dumps(dict(task.spec)))
        train_trial(tmp_path / folder)
        found: list[float] = json.loads((tmp_path / folder / "result.json").read_text())["values"]
        return found

    first, again, other = values("first", 0), values("again", 0), values("other", 1)

    assert first == again
    assert first != other


def test_a_training_that_says_nothing_prints_nothing() -> None:
    """What Python says of a module that is imported before it is run would read as its reason."""
    program = [sys.executable, "-m", "noisescale.lab.jobs.trial", "no-such-folder"]

    ended = subprocess.run(program, capture_output=True, text=True, stdin=subprocess.DEVNULL)

    assert ended.returncode == 2
    assert ended.stderr.startswith("noisescale: ")
    assert len(ended.stderr.splitlines()) == 1
