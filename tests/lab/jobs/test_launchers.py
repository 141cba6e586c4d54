# SPDX-License-Identifier: Apache-2.0
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from noisescale.lab.jobs import launchers
from noisescale.lab.jobs.launchers import Workers, launch

WORK = "import os, sys, time; open(sys.argv[1] + str(os.getpid()), 'w').close()"
WAIT = f"{WORK}; sys.stdin.read()"
FAIL = "raise SystemExit('no such job')"


def started(launcher: str, tmp_path: Path, code: str, *, count: int = 2, **options: Any) -> Workers:
    command = [sys.executable, "-c", code, str(tmp_path / "worker-")]
    return launch(launcher, command, count, tmp_path / "logs", options=options)


def ended(workers: Workers) -> None:
    until = time.monotonic() + 100
    while workers.running():
        assert time.monotonic() < until
        time.sleep(0.1)


OPTIONS: dict[str, dict[str, Any]] = {
    "local": {},
    "slurm": {"cluster": "local", "timeout_min": 5},
    "ray": {"num_cpus": 2},
}


@pytest.mark.parametrize("launcher", OPTIONS)
@pytest.mark.filterwarnings("ignore")  # of submitit, and of Ray
def test_workers_run_end_and_say_why_they_failed(launcher: str, tmp_path: Path) -> None:
    """Slurm is submitit's executor on this machine; Ray is a cluster of two CPUs here."""
    # A shell's background job, as the suite may be, ignores SIGINT, and so would what it starts.
    # Submitit's executor ends its processes by SIGINT.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        working = started(launcher, tmp_path, WORK, **OPTIONS[launcher])
        assert working.running() <= 2
        ended(working)
        assert len(list(tmp_path.glob("worker-*"))) == 2
        assert working.last_output() == ""
        working.stop()

        failing = started(launcher, tmp_path, FAIL, count=1, **OPTIONS[launcher])
        ended(failing)
        assert "no such job" in failing.last_output()
        failing.stop()

        waiting = started(launcher, tmp_path, WAIT, count=1, **OPTIONS[launcher])
        while len(list(tmp_path.glob("worker-*"))) < 3:
            time.sleep(0.1)
        assert waiting.running() == 1
        waiting.stop()
        ended(waiting)
    finally:
        signal.signal(signal.SIGINT, before)
        if launcher == "ray":
            import ray

            ray.shutdown()


def test_each_worker_has_gpus_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    show = "import os, sys; open(sys.argv[1] + os.environ['CUDA_VISIBLE_DEVICES'], 'w').close()"
    command = [sys.executable, "-c", show, str(tmp_path / "gpus-")]

    workers = launch("local", command, 2, tmp_path / "logs", devices=2)

    ended(workers)
    workers.stop()
    assert {path.name for path in tmp_path.glob("gpus-*")} == {"gpus-4,5", "gpus-6,7"}
    with pytest.raises(ValueError, match="`workers` must have 2 of the 4 GPUs each, got 3 workers"):
        launch("local", command, 3, tmp_path / "logs", devices=2)
    on_cpu = launch(
        "local", [sys.executable, "-c", ""], 3, tmp_path / "c", devices=2, accelerator="cpu"
    )
    ended(on_cpu)
    on_cpu.stop()


def test_bad_launchers_and_options_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="`launcher` must be one of local, slurm, ray, got 'pbs'"):
        started("pbs", tmp_path, WORK)
    with pytest.raises(ValueError, match=r"`launcher_option` must be left out for local, got a\."):
        started("local", tmp_path, WORK, a=1)
    with pytest.raises(ValueError, match="`launcher_option` must be a parameter of submitit's"):
        started("slurm", tmp_path, WORK, cluster="local", no_such_thing=1)
    with pytest.raises(
        ValueError, match=r"`launcher_option` must be an argument of ray\.init, got"
    ):
        started("ray", tmp_path, WORK, no_such_thing=1)


def test_without_slurm_nothing_is_trained_in_silence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))  # no srun

    with pytest.raises(ValueError, match=r'for slurm, got Could not detect "srun"'):
        started("slurm", tmp_path, WORK, slurm_partition="gpu")
    assert not list(tmp_path.glob("worker-*"))


@pytest.mark.parametrize(
    ("accelerator", "options", "asked"),
    [
        ("gpu", {}, {"--gpus-per-node=3"}),
        (
            "gpu",
            {"gpus_per_node": 1, "slurm_partition": "a"},
            {"--gpus-per-node=1", "--partition=a"},
        ),
        ("auto", {}, set()),
        ("cpu", {}, set()),
    ],
)
@pytest.mark.filterwarnings("ignore")  # of submitit
def test_slurm_is_asked_for_the_devices_of_a_training(
    accelerator: str,
    options: dict[str, Any],
    asked: set[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Slurm's commands are scripts here. What is submitted is a file with its settings."""
    for name in ("srun", "sbatch", "sacct", "scancel"):
        script = tmp_path / name
        script.write_text(f'#!/bin/sh\ncp "$1" {tmp_path}/submitted; echo Submitted batch job 1\n')
        script.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)

    launch(
        "slurm",
        [sys.executable, "-c", ""],
        1,
        tmp_path / "logs",
        devices=3,
        accelerator=accelerator,
        options=options,
    )

    lines = (tmp_path / "submitted").read_text().splitlines()
    found = {line.removeprefix("#SBATCH ") for line in lines if line.startswith("#SBATCH")}
    assert asked <= found
    assert any("gpus" in line for line in found) == any("gpus" in line for line in asked)


def test_without_cuda_no_gpu_is_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")

    assert launchers._gpus() == []
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")  # CUDA ends the list there
    assert launchers._gpus() == []
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2, 0")
    assert launchers._gpus() == ["2", "0"]


def test_two_commands_in_one_folder_have_files_of_their_own(tmp_path: Path) -> None:
    first = started("local", tmp_path, FAIL, count=1)
    second = started("local", tmp_path, "raise SystemExit('nor such a one')", count=2)
    for workers in (first, second):
        ended(workers)
        workers.stop()

    assert "no such job" in first.last_output()
    assert "nor such a one" in second.last_output()
    printed = {path.name for path in (tmp_path / "logs").iterdir()}
    assert printed == {"worker-0.txt", "worker-1.txt", "worker-2.txt"}
