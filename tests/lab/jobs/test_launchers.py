# SPDX-License-Identifier: Apache-2.0
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from refused import refused
from tiers import slow, slow_but

from noisescale.lab.jobs import launchers
from noisescale.lab.jobs.launchers import Workers, launch

WORK = "import os, sys, time; open(sys.argv[1] + str(os.getpid()), 'w').close()"
WAIT = f"{WORK}; sys.stdin.read()"
FAIL = "raise SystemExit('no such job')"


def started(launcher: str, tmp_path: Path, code: str, count: int = 2, **asks: Any) -> Workers:
    command = [sys.executable, "-c", code, str(tmp_path / "worker-")]
    return launch(launcher, command, count, tmp_path / "logs", **asks)


def ended(workers: Workers) -> Workers:
    until = time.monotonic() + 100
    while workers.running():
        assert time.monotonic() < until
        time.sleep(0.02)
    return workers


OPTIONS: dict[str, dict[str, Any]] = {
    "local": {},
    "slurm": {"cluster": "local", "timeout_min": 5},
    "ray": {"num_cpus": 2},
}


@pytest.fixture
def cluster(launcher: str) -> Iterator[dict[str, Any]]:
    """What a launcher is asked: Slurm is submitit's executor here, Ray a cluster of two CPUs."""
    # A shell's background job, as the suite may be, ignores SIGINT, and so would what it starts.
    # Submitit's executor ends its processes by SIGINT.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield {"options": OPTIONS[launcher]}
    signal.signal(signal.SIGINT, before)
    if launcher == "ray":
        import ray

        ray.shutdown()


@pytest.mark.parametrize("launcher", slow_but(OPTIONS, "local"))
@pytest.mark.filterwarnings("ignore")  # of submitit, and of Ray
def test_workers_run_end_and_say_why_they_failed(
    launcher: str, cluster: dict[str, Any], tmp_path: Path
) -> None:
    working = started(launcher, tmp_path, WORK, **cluster)
    assert working.running() <= 2
    ended(working)
    assert len(list(tmp_path.glob("worker-*"))) == 2
    assert working.last_output() == ""
    working.stop()

    failing = ended(started(launcher, tmp_path, FAIL, 1, **cluster))
    assert "no such job" in failing.last_output()
    failing.stop()

    waiting = started(launcher, tmp_path, WAIT, 1, **cluster)
    while len(list(tmp_path.glob("worker-*"))) < 3:
        time.sleep(0.02)
    assert waiting.running() == 1
    waiting.stop()
    ended(waiting)


def test_each_worker_has_gpus_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    show = "import os, sys; open(sys.argv[1] + os.environ['CUDA_VISIBLE_DEVICES'], 'w').close()"

    ended(started("local", tmp_path, show, devices=2)).stop()

    assert {path.name for path in tmp_path.glob("worker-*")} == {"worker-4,5", "worker-6,7"}
    with refused("workers", got="3 workers"):
        started("local", tmp_path, show, 3, devices=2)
    ended(started("local", tmp_path, "", 3, devices=2, accelerator="cpu")).stop()


@pytest.mark.parametrize(
    ("launcher", "options", "argument", "requirement"),
    [
        ("pbs", {}, "launcher", "one of local, slurm, ray"),
        ("local", {"a": 1}, "launcher_option", "left out for local"),
        slow("slurm", {"cluster": "local", "x": 1}, "launcher_option", "a parameter of submitit"),
        slow("slurm", {"slurm_partition": "gpu"}, "launcher", "where Slurm's commands are"),
        slow("ray", {"x": 1}, "launcher_option", "an argument of ray.init"),
    ],
)
def test_bad_launchers_and_options_are_refused(
    launcher: str,
    options: dict[str, Any],
    argument: str,
    requirement: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))  # without srun

    with refused(argument, requirement=requirement):
        started(launcher, tmp_path, WORK, options=options)
    assert not list(tmp_path.glob("worker-*"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("accelerator", "options", "asked"),
    [
        ("gpu", {}, ["gpus-per-node=3"]),
        ("gpu", {"gpus_per_node": 1, "slurm_partition": "a"}, ["gpus-per-node=1", "partition=a"]),
        ("auto", {}, []),
        ("cpu", {}, []),
    ],
)
@pytest.mark.filterwarnings("ignore")  # of submitit
def test_slurm_is_asked_for_the_devices_of_a_training(
    accelerator: str,
    options: dict[str, Any],
    asked: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Slurm's commands are scripts here. What is submitted is a file with its settings."""
    for name in ("srun", "sbatch", "sacct", "scancel"):
        script = tmp_path / name
        script.write_text(f'#!/bin/sh\ncp "$1" {tmp_path}/submitted; echo Submitted batch job 1\n')
        script.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)

    started("slurm", tmp_path, "", 1, devices=3, accelerator=accelerator, options=options)

    lines = (tmp_path / "submitted").read_text().splitlines()
    found = {line.removeprefix("#SBATCH --") for line in lines if line.startswith("#SBATCH")}
    assert found >= set(asked)
    assert any("gpus" in line for line in found) == any("gpus" in line for line in asked)


def test_without_cuda_no_gpu_is_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    # At -1 CUDA ends the list.
    for visible, found in {"": [], "-1": [], "2, 0": ["2", "0"]}.items():
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert launchers._gpus() == found


def test_two_commands_in_one_folder_have_files_of_their_own(tmp_path: Path) -> None:
    first = started("local", tmp_path, FAIL, 1)
    second = started("local", tmp_path, "raise SystemExit('nor such a one')", 2)
    for workers in (first, second):
        ended(workers).stop()

    assert "no such job" in first.last_output()
    assert "nor such a one" in second.last_output()
    printed = {path.name for path in (tmp_path / "logs").iterdir()}
    assert printed == {"worker-0.txt", "worker-1.txt", "worker-2.txt"}
