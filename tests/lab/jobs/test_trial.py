# SPDX-License-Identifier: Apache-2.0
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from lab.jobs.jobs_for_tests import SWEEP, trained_here, write_script

from noisescale.history.metrics import Goal


def test_repetitions_differ_though_the_user_s_function_sets_a_seed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_script(tmp_path, monkeypatch)
    monkeypatch.setenv("SEEDS", "1")
    job = replace(SWEEP, goal=Goal.read("val_loss<=0"), batch_sizes=(8, 16), epochs=0.1)

    first, again, other = (
        trained_here(job.task(8, {"learning_rate": 0.01}, seed).spec, tmp_path / folder)["values"]
        for folder, seed in (("first", 0), ("again", 0), ("other", 1))
    )

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
