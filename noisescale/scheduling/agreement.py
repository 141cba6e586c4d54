# SPDX-License-Identifier: Apache-2.0
"""Whether all ranks have decided alike."""

from __future__ import annotations

import torch
import torch.distributed as dist


class Agreement:
    """Compare what the ranks want, in the background until somebody waits for it.

    One that changes its batch size alone, or fails alone, would leave the others waiting in a
    collective for ever.

    Args:
        device: One that the process group's backend reduces on.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pending: _Range | None = None

    def propose(self, batch_size: float) -> None:
        """Tell the other ranks what this one wants. All of them have to call it.

        Raises:
            RuntimeError: If they differed the time before, and nobody has waited for it.
        """
        self.settle()
        if _several_ranks():
            self._pending = _Range(batch_size, self._device)

    def settle(self) -> None:
        """Raise unless all ranks wanted the same batch size.

        Raises:
            RuntimeError: If they differ.
        """
        if self._pending is None:
            return
        pending, self._pending = self._pending, None
        least, most = pending.read()
        if most != least:
            raise RuntimeError(
                "`policy` must give the same batch size on all ranks, got"
                f" {least:g} to {most:g}. Let it depend on what all ranks know: its three"
                " arguments, no random numbers, no clock, nothing of a rank's own data."
            )


def check_same_schedule(checksum: int, device: torch.device) -> None:
    """Raise on all ranks unless all have the schedule of this checksum, of at most 32 bits.

    What a schedule by steps gives needs no agreement then, as ranks step together.

    Raises:
        RuntimeError: If they differ.
    """
    if not _several_ranks():
        return
    least, most = _Range(checksum, device).read()
    if most != least:
        raise RuntimeError(
            "`policy` must be the same schedule on all ranks, got different ones. Make it of what"
            " all ranks know."
        )


class _Range:
    """The least and the most that a number is on any rank, on its way."""

    def __init__(self, value: float, device: torch.device) -> None:
        self._ends = torch.tensor([value, -value], dtype=torch.float64, device=device)
        self._work = dist.all_reduce(self._ends, dist.ReduceOp.MAX, async_op=True)

    def read(self) -> tuple[float, float]:
        """Return both; waits for ranks and device."""
        if self._work is not None:
            self._work.wait()
        most, negative_least = self._ends.tolist()
        return -negative_least, most


def _several_ranks() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
