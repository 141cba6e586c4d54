# SPDX-License-Identifier: Apache-2.0
"""The branches of a run as a job of many trainings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from noisescale.lab.branch.planning import BranchOptions
from noisescale.lab.jobs.jobs import FAILED, Entry, Job, Record, Task, Training, results_of


@dataclass(frozen=True)
class BranchJob(Job):
    """The branches that `noisescale branch` trains.

    The first branch of a batch size also finds the factor on its learning rate. The others begin
    with this factor, so they wait for it.
    """

    asked: BranchOptions
    """The options, with whole names of files, and the rule and batch sizes of the plan."""
    begun: Mapping[str, Any]
    """The record of the run without branches, from `BranchedRun`."""
    loss_examples: int

    kind: ClassVar[str] = "branch"

    @classmethod
    def from_dict(cls, read: Mapping[str, Any]) -> BranchJob:
        """Return what `as_dict` was called on."""
        training, asked = Training(**read["training"]), BranchOptions(**read["asked"])
        return cls(**{**read, "training": training, "asked": asked})

    def next_tasks(self, entries: Mapping[str, Entry]) -> list[Task]:
        """Return the branches that can be trained now, see `Job`."""
        results = results_of(entries)
        tasks = []
        for order in range(self.asked.orders):
            for number, size in enumerate(self.asked.batch_sizes):
                first = results.get(branch_name(size, 0))
                key = branch_name(size, order)
                if key in results or (order > 0 and first is None):
                    continue
                known = first if order > 0 and first is not None and FAILED not in first else None
                tasks.append(Task(key, self._spec(number, order, known)))
        return tasks

    def _spec(self, number: int, order: int, known: Record | None) -> dict[str, Any]:
        return {
            "kind": self.kind,
            **self.as_dict(),
            "plan": number,
            "order": order,
            "known": None if known is None else dict(known["branch"]),
        }


def branch_name(size: float | str, order: int) -> str:
    """Return the name of a branch, which its folder has too.

    Examples:
        >>> branch_name(64.0, 1)
        'batch_size=64,order=1'
    """
    return f"batch_size={float(size):.10g},order={order}"
