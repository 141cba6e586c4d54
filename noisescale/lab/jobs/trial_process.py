# SPDX-License-Identifier: Apache-2.0
"""A running training: a process, or one for each device."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

from noisescale.lab.jobs.jobs import Record
from noisescale.printable import printable

SPEC, RESULT, LIMIT, PRINTED = "task.json", "result.json", "limit", "output.txt"
"""The files of a training's folder."""

IMPORTS = "imports.json"
"""The file that tells what a training has imported."""

WATCHED = "NOISESCALE_ENDS_WITH_STDIN"
"""The environment variable that makes a process end when its standard input does."""

IMPORTS_WANTED = "NOISESCALE_IMPORTS_WANTED"
"""The environment variable that has a training tell its imports, see `trial_imports`."""

REPORT = "NOISESCALE_IMPORTS"
"""The environment variable that has the fork server import what a training has told."""

PATIENCE = 10.0
"""Seconds that a process has to end by itself."""


class Running(Protocol):
    """A process that trains."""

    def wait(self, seconds: float) -> bool:
        """Wait for some seconds, and return whether the process has ended."""

    @property
    def code(self) -> int:
        """The code with which the process has ended, or minus the signal that ended it."""

    def kill(self) -> None:
        """End the process at once."""


class ColdProcess:
    """A process of its own from the beginning, or one for each device.

    The process ends when this one ends, also if this one is killed: its standard input is a pipe,
    and it watches for the end of the pipe.

    Args:
        folder: Of the training.
        devices: Number of processes; several are started by torchrun.
        environment: Variables beside those of this process.
    """

    def __init__(
        self, folder: Path, devices: int, environment: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        with (folder / PRINTED).open("wb") as printed:
            self._process = subprocess.Popen(
                command_of(folder, devices),
                stdin=subprocess.PIPE,
                stdout=printed,
                stderr=subprocess.STDOUT,
                env={**os.environ, WATCHED: "1", **environment},
            )

    def wait(self, seconds: float) -> bool:
        """Wait for some seconds, and return whether the process has ended."""
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True

    @property
    def code(self) -> int:
        """The code with which the process has ended, or minus the signal that ended it."""
        return int(self._process.returncode)

    def kill(self) -> None:
        """End the process, and those that it has started."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        if not self.wait(PATIENCE):
            self._process.kill()
            self._process.wait()


class TrialProcess:
    """A running training.

    Args:
        folder: Of this training alone, see `new_folder`: of two trainings in one folder each would
            have the other's result.
        spec: What is trained.
        devices: Devices that it takes.
        start: Starts a process that trains the task in a folder.
        limit: The step after which the training cannot win.
        sharing: Number of trainings that share the devices, itself among them.
    """

    def __init__(
        self,
        folder: Path,
        spec: Record,
        devices: int,
        start: Callable[[Path], Running],
        *,
        limit: float = math.inf,
        sharing: int = 1,
    ) -> None:
        self.folder, self._devices, self._sharing = folder, devices, sharing
        folder.mkdir(parents=True, exist_ok=True)
        (folder / SPEC).write_text(json.dumps(dict(spec), indent=1))
        self._limit = math.inf
        self.set_limit(limit)
        self._told: float | None = None
        self._ended: float | None = None
        self._started = time.monotonic()
        self.process = start(folder)

    def set_limit(self, steps: float) -> None:
        """Have the training stop at a number of steps. A limit is never raised."""
        if steps >= self._limit:
            return
        self._limit = steps
        _write(str(steps), self.folder / LIMIT)

    def lingers(self) -> bool:
        """Return whether the result has been there for `PATIENCE`, and the process goes on."""
        now = time.monotonic()
        if self._told is None and (self.folder / RESULT).exists():
            self._told = now
        if self._told is None or now - self._told <= PATIENCE:
            return False
        self._ended = self._told  # what it did afterwards was no training
        return True

    def result(self) -> dict[str, Any] | None:
        """Return what the training has found; None if it failed."""
        path = self.folder / RESULT
        if not path.exists():  # it is written last: a crash at the exit of a process does no harm
            return None
        found: dict[str, Any] = json.loads(path.read_text())
        ended = time.monotonic() if self._ended is None else self._ended
        spent = self._devices * (ended - self._started) / self._sharing
        return {**found, "devices": self._devices, "device_seconds": round(spent, 3)}

    def reason(self) -> str:
        """Return why the training failed: its own last line, or the signal that ended it."""
        return reason_in(self.folder, self.process.code)


def write_result(found: Record, folder: Path) -> None:
    """Write what a training has found, whole or not at all."""
    _write(json.dumps(found), folder / RESULT)


def _write(text: str, path: Path) -> None:
    part = path.with_name(f"{path.name}.part")
    part.write_text(text)
    part.replace(path)


def new_folder(parent: Path, key: str) -> Path:
    """Make a folder for a training, and return it: `key`, or `key-2` and so on.

    Making a folder is one step also on a shared disk. So no other worker has the same one.
    """
    parent.mkdir(parents=True, exist_ok=True)
    folder, number = parent / key, 1
    while True:
        with suppress(FileExistsError):
            folder.mkdir()
            return folder
        number += 1
        folder = parent / f"{key}-{number}"


def command_of(folder: Path, devices: int) -> list[str]:
    """Return the command that trains the task in a folder."""
    command = [sys.executable, "-m"]
    if devices > 1:
        command += ["torch.distributed.run", "--standalone", f"--nproc-per-node={devices}", "-m"]
    return [*command, "noisescale.lab.jobs.trial", str(folder)]


def reason_in(folder: Path, code: int) -> str:
    """Return why a training failed, from what it printed."""
    text = (folder / PRINTED).read_text(errors="replace")
    who = "it"
    if first := _RANK.search(text):  # torchrun has only its own code and error
        text, code, rank = text[: first.start()], int(first[1]), first[2]
        who = f"rank {rank}"
        lines = [line for line in text.splitlines() if "torch/distributed/elastic" not in line]
        own = [line for line in lines if line.startswith(f"[rank{rank}]:")]
        text = "\n".join(own or lines)
    lines = [_OF_A_RANK.sub("", line.strip()) for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if _is_error(line)]
    said = printable((errors or lines or ["it printed nothing"])[-1])[:300]
    by = f"signal {-code}" if code < 0 else f"code {code}"
    return f"{said} ({who} ended with {by}; see {printable(folder / PRINTED)})"


_RANK = re.compile(r"failed \(exitcode: (-?\d+)\) local_rank: (\d+)")
"""What torchrun prints of the rank that failed first."""

_OF_A_RANK = re.compile(r"^\[rank\d+\]:\s*")
"""What torch puts before the lines of a traceback."""


def _is_error(line: str) -> bool:
    name = line.split(":")[0].split(".")[-1]
    ours = line.startswith("noisescale: ")
    return ours or (name.endswith(("Error", "Exception", "Interrupt")) and " " not in name)


def end_with_stdin(*, gently: bool = False) -> None:
    """End this process when its standard input ends, if its parent asked for that.

    Args:
        gently: Whether a signal ends it, so that it can put things in order.
    """
    if not os.environ.pop(WATCHED, ""):
        return

    def watch() -> None:
        while os.read(0, 1024):
            pass
        if not gently:
            os._exit(1)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, daemon=True).start()
