# SPDX-License-Identifier: Apache-2.0
"""Which workers a job starts, and where its state and its trainings are."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from noisescale.checks import require_count
from noisescale.lab.jobs.storage import without_password
from noisescale.refusal import Refusal


@dataclass(frozen=True)
class WorkersToStart:
    """The workers that a command or a function starts."""

    workers: int
    launcher: str
    launcher_options: Mapping[str, Any] | None
    lease: float
    accelerator: str
    """The accelerator of the trainings."""
    cold: bool = False
    """Whether each training imports its packages anew."""
    per_device: int = 1
    """Trainings side by side on each device."""

    def __post_init__(self) -> None:
        """Check the numbers."""
        check_workers(self.workers, self.lease, self.per_device)

    @property
    def work_options(self) -> list[str]:
        """The options of `noisescale work` that say how these workers train."""
        return work_options(self.lease, self.per_device, cold=self.cold)


@dataclass(frozen=True)
class Place:
    """Where a job is kept."""

    name: str
    """The name of the job in the storage."""
    storage: str
    """A journal file or a URL, see `open_storage`."""
    output: Path | None = None
    """The folder of the results; None if it is not known."""

    @property
    def work_command(self) -> list[str]:
        """The command by which further workers join."""
        storage = without_password(self.storage)
        output = [] if self.output is None else ["--output", str(self.output)]
        return ["noisescale", "work", "--storage", storage, "--name", self.name, *output]


def work_options(lease: float, per_device: int, *, cold: bool) -> list[str]:
    """Return options of `noisescale work`."""
    options = ["--lease", f"{lease:g}", "--per-device", str(per_device)]
    return [*options, "--cold"] if cold else options


def check_workers(workers: int, lease: float, per_device: int = 1) -> None:
    """Raise a ValueError if a number of workers, or their lease, is impossible."""
    require_count("per_device", per_device, "Give 1.")
    if workers < 0:
        raise Refusal("workers", "not be negative", workers, "Give 1.")
    if not 1 <= lease < math.inf:
        raise Refusal("lease", "be at least 1 second, and finite", f"{lease:g}", "Give 60.")


def device_of_worker(accelerator: str) -> str:
    """Return the name of the devices that a launcher gave to this worker; "" if it gave none."""
    if accelerator == "cpu":
        return "CPU"
    gpus = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    return f"GPU {gpus}" if gpus else ""


def name_by_launcher() -> str:
    """Return the name that the launcher gave to this worker; "" without a launcher."""
    return os.environ.get("SLURM_JOB_ID", "")
