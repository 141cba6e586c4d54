# SPDX-License-Identifier: Apache-2.0
"""Where workers run: on this machine, on a Slurm cluster by submitit, on a Ray cluster."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from noisescale.checks import refuse
from noisescale.extras import need
from noisescale.lab.jobs.trial_process import PATIENCE, WATCHED
from noisescale.refusal import Refusal

LAUNCHERS = ("local", "slurm", "ray")


class Workers(Protocol):
    """Workers that were started."""

    def running(self) -> int:
        """Return how many have not ended, or have not begun yet."""

    def stop(self) -> None:
        """End all of them, and give back what they used. To be called in any case."""

    def last_output(self) -> str:
        """Return what the last one that failed has printed; "" if none has failed."""


def launch(
    launcher: str,
    command: Sequence[str],
    count: int,
    folder: Path,
    *,
    devices: int = 1,
    accelerator: str = "auto",
    options: Mapping[str, Any] | None = None,
) -> Workers:
    """Start workers.

    Args:
        launcher: One of `LAUNCHERS`.
        command: The command of a worker.
        count: Number of workers.
        folder: For what they print.
        devices: Devices of each training, and so of each worker.
        accelerator: Of each training. On "cpu" no worker has a GPU of its own. Slurm is asked for
            `devices` GPUs a worker on "gpu" and "cuda": on "auto" nobody knows here whether its
            nodes have any.
        options: Of the launcher. Slurm: the parameters of submitit's AutoExecutor, such as
            `timeout_min` or `slurm_partition`; `cluster="local"` runs without Slurm. Ray: the
            arguments of `ray.init`, such as `address`, and `task_num_cpus`, `task_num_gpus`.

    Raises:
        ValueError: If the launcher is unknown, or does not take an option.
        MissingExtraError: If submitit or Ray is not installed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    given = dict(options or {})
    shares = accelerator != "cpu"
    if launcher == "slurm":
        gpus = devices if accelerator in ("gpu", "cuda") else 0
        return _Slurm(command, count, folder, gpus, given)
    if launcher == "ray":
        return _Ray(command, count, devices if shares else 0, given)
    if launcher != "local":
        refuse("launcher", f"be one of {', '.join(LAUNCHERS)}", repr(launcher), "Give local.")
    if given:
        refuse("launcher_option", "be left out for local", ", ".join(given))
    local = _gpus() if shares else []
    if local and count * devices > len(local):
        refuse(
            "workers",
            f"have {devices} of the {len(local)} GPUs each",
            f"{count} workers",
            f"Give {max(1, len(local) // devices)}.",
        )
    own: list[dict[str, str]] = [
        {"CUDA_VISIBLE_DEVICES": ",".join(local[k * devices : (k + 1) * devices])} if local else {}
        for k in range(count)
    ]
    return LocalWorkers(command, folder, own)


class LocalWorkers:
    """Workers on this machine.

    Args:
        command: The command of a worker.
        folder: For what the workers print.
        environments: Of each worker, the variables beside those of this process.
    """

    def __init__(
        self, command: Sequence[str], folder: Path, environments: Sequence[Mapping[str, str]]
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._printed = []
        self._processes = []
        for own in environments:
            environment = {**os.environ, WATCHED: "1", **own}
            with _new_file(folder) as output:
                self._printed.append(Path(output.name))
                self._processes.append(
                    subprocess.Popen(
                        command,
                        stdin=subprocess.PIPE,
                        stdout=output,
                        stderr=subprocess.STDOUT,
                        env=environment,
                    )
                )

    def running(self) -> int:
        """Return how many have not ended."""
        return sum(process.poll() is None for process in self._processes)

    def stop(self) -> None:
        """End all of them."""
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            try:
                process.wait(2 * PATIENCE)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            if process.stdin is not None:
                process.stdin.close()

    def last_output(self) -> str:
        """Return what the last one that failed has printed; "" if none has failed."""
        for process, path in zip(self._processes, self._printed, strict=True):
            if process.poll():
                return path.read_text(errors="replace")
        return ""


def _new_file(folder: Path) -> BinaryIO:
    """Open a file that no other worker writes, of this command or of another one."""
    for number in itertools.count():
        with suppress(FileExistsError):
            return (folder / f"worker-{number}.txt").open("xb")
    raise AssertionError  # the numbers have no end


class _Slurm:
    def __init__(
        self, command: Sequence[str], count: int, folder: Path, gpus: int, options: dict[str, Any]
    ) -> None:
        need("submitit", "`--launcher slurm`")
        import submitit

        cluster = options.pop("cluster", "slurm")  # else submitit takes this machine in silence
        defaults = {"timeout_min": 24 * 60, "name": "noisescale"}
        if gpus:
            defaults["gpus_per_node"] = gpus
        try:
            executor = submitit.AutoExecutor(folder=folder, cluster=cluster)
        except (RuntimeError, ValueError) as error:
            raise Refusal(
                "launcher",
                "be started where Slurm's commands are, for slurm",
                error,
                "Start it on a node of the cluster. --launcher-option cluster=local tries it on"
                " this machine.",
            ) from error
        try:
            executor.update_parameters(**defaults | options)
        except (NameError, TypeError, RuntimeError, ValueError) as error:
            raise Refusal(
                "launcher_option",
                "be a parameter of submitit's AutoExecutor",
                error,
                "Give, for example, slurm_partition=gpu, or cluster=local to try it without Slurm.",
            ) from error
        with executor.batch():
            self._jobs = [
                executor.submit(_run, list(command), str(Path.cwd())) for _ in range(count)
            ]

    def running(self) -> int:
        return sum(not job.done() for job in self._jobs)

    def stop(self) -> None:
        for job in self._jobs:
            if not job.done():
                job.cancel(check=False)

    def last_output(self) -> str:
        for job in self._jobs:
            if job.done() and (error := job.exception()) is not None:
                return job.stderr() or str(error)
        return ""


class _Ray:
    def __init__(
        self,
        command: Sequence[str],
        count: int,
        gpus: int,
        options: dict[str, Any],
    ) -> None:
        need("ray", "`--launcher ray`")
        import ray

        self._ray = ray
        resources = {
            name: options.pop(f"task_{name}")
            for name in ("num_cpus", "num_gpus")
            if f"task_{name}" in options
        }
        if not ray.is_initialized():
            try:
                ray.init(**{"log_to_driver": False, "include_dashboard": False} | options)
            except (TypeError, RuntimeError, ValueError) as error:
                raise Refusal(
                    "launcher_option",
                    "be an argument of ray.init",
                    error,
                    "Give, for example, address=auto.",
                ) from error
        if "num_gpus" not in resources and dict(ray.cluster_resources()).get("GPU"):
            resources["num_gpus"] = gpus
        task = ray.remote(max_retries=0, **{"num_cpus": 1} | resources)(_run)
        self._tasks = [task.remote(list(command), str(Path.cwd())) for _ in range(count)]

    def running(self) -> int:
        _, unfinished = self._ray.wait(self._tasks, num_returns=len(self._tasks), timeout=0)
        return len(unfinished)

    def stop(self) -> None:
        for task in self._tasks:
            self._ray.cancel(task, force=False)
        self._ray.wait(self._tasks, num_returns=len(self._tasks), timeout=2 * PATIENCE)

    def last_output(self) -> str:
        done, _ = self._ray.wait(self._tasks, num_returns=len(self._tasks), timeout=0)
        for task in done:
            try:
                self._ray.get(task)
            except Exception as error:  # whatever the task raised
                return str(error)
        return ""


def _run(command: list[str], folder: str) -> None:
    """Run a worker where the launcher has put it.

    It ends when this process ends, or is interrupted, as its standard input then does. Waiting for
    it is done in short sleeps: the interruption of a Ray task does not wake a longer one.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in the background of a shell
        signal.signal(signal.SIGINT, signal.default_int_handler)  # which submitit and Ray use
    with tempfile.TemporaryFile() as printed:
        process = subprocess.Popen(
            command,
            cwd=folder,
            stdin=subprocess.PIPE,
            stdout=printed,
            stderr=subprocess.STDOUT,
            env=os.environ | {WATCHED: "1"},
        )
        try:
            while process.poll() is None:
                time.sleep(0.2)
        finally:
            if process.stdin is not None:
                process.stdin.close()
            process.wait(2 * PATIENCE)
        if process.returncode:
            printed.seek(0)
            raise RuntimeError(printed.read().decode(errors="replace")[-2000:])


def _gpus() -> list[str]:
    """Return the GPUs that this process may use; none without torch's help."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        shown = [each.strip() for each in visible.split(",")]
        shown = shown[: shown.index("-1")] if "-1" in shown else shown  # as CUDA reads it
        return [each for each in shown if each]
    import torch

    return [str(k) for k in range(torch.cuda.device_count())]
