# SPDX-License-Identifier: Apache-2.0
"""Collectives beside the collectives of the training: on which device, and what waits for them."""

from __future__ import annotations

import torch
import torch.distributed as dist


def rank() -> int:
    """Return the number of this process; 0 if it trains alone."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def world_size() -> int:
    """Return the number of processes that train together."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def device_for(group: dist.ProcessGroup | None, wanted: torch.device) -> torch.device:
    """Return `wanted` if the group's backend takes its tensors, else a device that it takes.

    NCCL takes no tensors of the CPU, where parameters are that FSDP offloads.
    """
    types = [pair.split(":")[0] for pair in dist.get_backend_config(group).split(",")]
    return wanted if wanted.type in types else torch.device(types[0])


def let_stream_wait(work: dist.Work, device: torch.device) -> None:
    """Have the current stream of an accelerator wait for a collective that was just begun.

    Otherwise it may run at the same time as collectives of the training, and where these have
    another communicator, NCCL promises nothing ("Using multiple NCCL communicators concurrently" in
    its user guide). The host goes on: `WorkNCCL::wait` in torch's ProcessGroupNCCL.cpp has the
    current stream wait for an event, and ProcessGroupXCCL.cpp does the same. If
    TORCH_NCCL_BLOCKING_WAIT is set the host waits too, as in all collectives of the training. On a
    CPU the host alone could wait, so nothing does.
    """
    if device.type != "cpu":
        work.wait()


def any_rank(here: bool, device: torch.device) -> bool:
    """Return whether something is so on any rank. A collective, of all ranks."""
    flag = torch.tensor(float(here), device=device_for(None, device))
    dist.all_reduce(flag, dist.ReduceOp.MAX)
    return bool(flag)
