# SPDX-License-Identifier: Apache-2.0
"""What a job of many trainings has to say: its next tasks, from the results so far."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from enum import Enum
from typing import Any, ClassVar, TypeVar

from noisescale.user_code.targets import text_of

Record = Mapping[str, Any]
"""What JSON can hold."""

FAILED = "failed"
"""The key of a result that says why a task was given up."""


TOO_LARGE = "Give a smaller number: larger batches are then accumulated."
"""The remedy if batches do not fit in the memory of a device."""


R = TypeVar("R")


def options_of(kind: type[R], given: Mapping[str, Any]) -> R:
    """Return a record of those arguments of a function that have the names of its fields."""
    names = [each.name for each in fields(kind)]  # type: ignore[arg-type]  # of a dataclass
    return kind(**{name: given[name] for name in names if name in given})


@dataclass(frozen=True)
class Training:
    """How each training of a job is run. All values come from the command line."""

    target: str
    data: str | None = None
    devices: int = 1
    accelerator: str = "auto"
    strategy: str = "auto"
    precision: str | None = None
    gradient_clip_val: float | None = None
    gradient_clip_algorithm: str | None = None

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Training:
        """Return the training of the arguments of a function. Its target and data get names."""
        data = given["data"]
        named = {
            "target": text_of(given["target"], "target"),
            "data": None if data is None else text_of(data, "data"),
        }
        return options_of(cls, {**given, **named})

    @property
    def trainer_options(self) -> dict[str, Any]:
        """The arguments of the Trainer."""
        left_out = ("target", "data")
        return {name: value for name, value in asdict(self).items() if name not in left_out}


@dataclass(frozen=True)
class Task:
    """One training of a job."""

    key: str
    """Unique within the job. It also names the folder of the training."""
    spec: Record
    """What the training needs to know."""


class State(Enum):
    """The state of a task."""

    WAITING = "waiting"
    RUNNING = "running"
    DONE = "done"
    GIVEN_UP = "given up"
    FAILED = "failed"
    """The last attempt failed, and another one is to be added."""


@dataclass(frozen=True)
class Entry:
    """A task in the ledger, with its latest attempt."""

    key: str
    state: State
    trial_id: int
    """The number of the attempt's trial in the storage."""
    attempt: int
    """The number of the attempt, from 1."""
    spec: Record
    worker: Record
    """Host, process and name of the worker."""
    started: float
    """Seconds since the epoch, by the clock of the worker; NaN if it was not begun."""
    result: Record
    """What came of it; empty before it is known. If the task was given up, `FAILED` says why."""


def results_of(entries: Mapping[str, Entry]) -> dict[str, Record]:
    """Return the results of tasks that are done or given up, by their keys."""
    return {key: each.result for key, each in entries.items() if each.result}


def device_hours(entries: Iterable[Entry]) -> float:
    """Return what trainings have taken, with the starts of processes and with evaluations.

    The imports of a worker's fork server are no part of any training.
    """
    return sum(float(e.result.get("device_seconds", 0.0)) for e in entries) / 3600


@dataclass(frozen=True)
class Job(ABC):
    """A job of many trainings. It is the same for all workers, and never changes."""

    training: Training

    kind: ClassVar[str]
    """The name of the kind of job."""
    adjustable: ClassVar[tuple[str, ...]] = ()
    """Settings that the command may change when it goes on, such as a budget."""

    @property
    def devices(self) -> int:
        """Devices of each training."""
        return self.training.devices

    def as_dict(self) -> dict[str, Any]:
        """Return the job as JSON can hold it."""
        return asdict(self)

    @abstractmethod
    def next_tasks(self, entries: Mapping[str, Entry]) -> list[Task]:
        """Return the tasks that can be trained now and have no result. None left: the job is done.

        The answer of a sweep depends on the results alone, not on their order. So one worker and
        many train the same tasks. A search that learns from each training also looks at what is
        under way.

        Args:
            entries: All tasks of the ledger, by their keys.
        """

    def is_finished(self, entries: Mapping[str, Entry]) -> bool:
        """Return whether nothing is left to train."""
        return not self.next_tasks(entries)

    def limit_of(self, spec: Record, entries: Mapping[str, Entry]) -> float:
        """Return the steps after which a training cannot win any more; infinite for no limit."""
        return math.inf
