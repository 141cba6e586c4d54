# SPDX-License-Identifier: Apache-2.0
"""Rows of numbers on their way across ranks, and from the device to the host."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

Read = list[list[float]]


class ReducedRows:
    """A queue of equally long rows: summed over ranks at once, read by the host when it asks."""

    def __init__(self) -> None:
        self._waiting: list[tuple[Tensor, dist.Work | None]] = []

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, row: Tensor, group: dist.ProcessGroup | None) -> None:
        """Sum a row over the group, asynchronously: one collective, for every rank to issue.

        Args:
            row: Its numbers, on the device; given away to the reduction.
            group: None where one process trains: the row is read as it is.
        """
        work = dist.all_reduce(row, group=group, async_op=True) if group is not None else None
        self._waiting.append((row, work))

    def read(self) -> Read:
        """Return all rows, in order. Waits for the device."""
        for _, work in self._waiting:
            if work is not None:
                work.wait()
        return self._taken(len(self._waiting))

    def read_without_waiting(self) -> Read:
        """Return what needs no other rank, after an error that may have ended them.

        On an accelerator that is nothing: its stream may be stuck behind a lost rank.
        """
        completed = 0
        for row, work in self._waiting:
            if row.device.type != "cpu" or not _has_succeeded(work):
                break
            completed += 1
        return self._taken(completed)

    def _taken(self, count: int) -> Read:
        taken, self._waiting = self._waiting[:count], self._waiting[count:]
        if not taken:
            return []
        values: Read = torch.stack([row for row, _ in taken]).tolist()
        return values


def _has_succeeded(work: dist.Work | None) -> bool:
    if work is None:
        return True
    if not work.is_completed():
        return False
    try:
        work.wait()
    except RuntimeError:  # completed by failing
        return False
    return True
