# SPDX-License-Identifier: Apache-2.0
"""Whether all ranks have decided alike."""

from __future__ import annotations

import torch
import torch.distributed as dist


def check_agreement(batch_size: float, device: torch.device) -> None:
    """Raise on all ranks unless all of them want the same batch size.

    All ranks have to call it, whatever they want: one that changes its batch size alone, or fails
    alone, would leave the others waiting in a collective for ever.

    Raises:
        RuntimeError: If they differ.
    """
    least, most = _range_over_ranks(batch_size, device)
    if most != least:
        raise RuntimeError(
            f"`policy` must give the same batch size on all ranks, got {least:g} to {most:g}."
            " Let it depend on what all ranks know: its three arguments, no random numbers, no"
            " clock, nothing of a rank's own data."
        )


def check_same_schedule(checksum: int, device: torch.device) -> None:
    """Raise on all ranks unless all have the schedule of this checksum, of at most 32 bits.

    What a schedule by steps gives needs no agreement then, as ranks step together.

    Raises:
        RuntimeError: If they differ.
    """
    least, most = _range_over_ranks(checksum, device)
    if most != least:
        raise RuntimeError(
            "`policy` must be the same schedule on all ranks, got different ones. Make it of what"
            " all ranks know."
        )


def _range_over_ranks(value: float, device: torch.device) -> tuple[float, float]:
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return value, value
    ends = torch.tensor([value, -value], dtype=torch.float64, device=device)
    dist.all_reduce(ends, dist.ReduceOp.MAX)
    most, negative_least = ends.tolist()
    return -negative_least, most
