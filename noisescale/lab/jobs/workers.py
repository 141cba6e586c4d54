# SPDX-License-Identifier: Apache-2.0
"""Which workers a job starts, and where its state and its trainings are."""

from __future__ import annotations

import math
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

    workers: int = 1
    launcher: str = "local"
    launcher_options: Mapping[str, Any] | None = None
    lease: float = 60.0
    """Seconds of silence after which a worker counts as lost."""
    accelerator: str = "auto"
    """The accelerator of the trainings."""
    cold: bool = False
    """Whether each training imports its packages anew."""
    per_device: int = 1
    """Trainings side by side on each device."""

    def __post_init__(self) -> None:
        """Check the numbers."""
        require_count("per_device", self.per_device, "Give 1.")
        if self.workers < 0:
            raise Refusal("workers", "not be negative", self.workers, "Give 1.")
        if not 1 <= self.lease < math.inf:
            got = f"{self.lease:g}"
            raise Refusal("lease", "be at least 1 second, and finite", got, "Give 60.")

    @property
    def work_options(self) -> list[str]:
        """The options of `noisescale work` that say how these workers train."""
        options = ["--lease", f"{self.lease:g}", "--per-device", str(self.per_device)]
        return [*options, "--cold"] if self.cold else options


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
