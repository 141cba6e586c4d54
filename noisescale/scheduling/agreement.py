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
        self._pending: tuple[dist.Work | None, torch.Tensor] | None = None

    def propose(self, batch_size: float) -> None:
        """Tell the other ranks what this one wants. All of them have to call it.

        Raises:
            RuntimeError: If they differed the time before, and nobody has waited for it.
        """
        self.settle()
        if _several_ranks():
            ends = torch.tensor([batch_size, -batch_size], dtype=torch.float64, device=self._device)
            self._pending = dist.all_reduce(ends, dist.ReduceOp.MAX, async_op=True), ends

    def settle(self) -> None:
        """Raise unless all ranks wanted the same batch size.

        Raises:
            RuntimeError: If they differ.
        """
        if self._pending is None:
            return
        work, ends = self._pending
        self._pending = None
        if work is not None:
            work.wait()
        most, negative_least = ends.tolist()
        if most != -negative_least:
            raise RuntimeError(
                "`policy` must give the same batch size on all ranks, got"
                f" {-negative_least:g} to {most:g}. Let it depend on what all ranks know: its three"
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
    ends = torch.tensor([checksum, -checksum], dtype=torch.float64, device=device)
    dist.all_reduce(ends, dist.ReduceOp.MAX)
    most, negative_least = ends.tolist()
    if most != -negative_least:
        raise RuntimeError(
            "`policy` must be the same schedule on all ranks, got different ones. Make it of what"
            " all ranks know."
        )


def _several_ranks() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
