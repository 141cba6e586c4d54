# SPDX-License-Identifier: Apache-2.0
import json
import subprocess
import sys
from pathlib import Path

import pytest
from lab.jobs.jobs_for_tests import write_script

from noisescale.history.metrics import Goal
from noisescale.lab.jobs.jobs import Training
from noisescale.lab.jobs.trial import train_trial
from noisescale.lab.sweep.search import Search
from noisescale.lab.sweep.settings import Own, SweepJob


def test_repetitions_differ_though_the_user_s_function_sets_a_seed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_script(tmp_path, monkeypatch)
    monkeypatch.setenv("SEEDS", "1")
    for name in ("PL_GLOBAL_SEED", "PL_SEED_WORKERS"):
        monkeypatch.setenv(name, "0")
    training, goal = Training("train.py:make", accelerator="cpu"), Goal.read("val_loss<=0")
    job = SweepJob(training, Own(256, 8, 0.02), goal, (8, 16), Search((), 3, 2), epochs=0.2)

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


@pytest.mark.slow
def test_a_training_that_says_nothing_prints_nothing() -> None:
    """What Python says of a module that is imported before it is run would read as its reason."""
    program = [sys.executable, "-m", "noisescale.lab.jobs.trial", "no-such-folder"]

    ended = subprocess.run(program, capture_output=True, text=True, stdin=subprocess.DEVNULL)

    assert ended.returncode == 2
    assert ended.stderr.startswith("noisescale: ")
    assert len(ended.stderr.splitlines()) == 1
