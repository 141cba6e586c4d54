# SPDX-License-Identifier: Apache-2.0
"""The device that tests run on, of each rank: `--device` says which."""

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

name = "cpu"
shared = ""
"""The backend by which ranks beyond the devices that there are share them: `--share-device`."""


def of_rank(rank: int = 0) -> "torch.device":
    """Ranks beyond the devices that there are share them."""
    import torch  # not for tests that need none

    if name in ("cpu", "mps"):
        return torch.device(name)
    return torch.device(name, rank % torch.get_device_module(name).device_count())


def most_ranks() -> int:
    """How many ranks tests may start.

    CUDA's need a device each, unless they share one; of the fake one two will do.
    """
    if name == "cuda":
        import torch

        return max(torch.cuda.device_count(), 2 * bool(shared))
    return {"cpu": 4, "fake": 2, "mps": 1}[name]


def forks() -> bool:
    """Whether tests and their ranks are forked from a process that never uses the device.

    No process can fork ranks after it has had a backward pass with an accelerator. MPS does not
    stand any fork.
    """
    return name in ("fake", "cuda")


def backend(rank: int) -> str:
    """Of a rank's process group.

    NCCL refuses two ranks on one device of a host. Ranks that share a device are of two hosts to
    it, which find each other by loopback.
    """
    if name != "cuda":
        return "gloo"
    if shared == "nccl":
        os.environ.update(NCCL_HOSTID=str(rank), NCCL_SOCKET_IFNAME="lo", NCCL_IB_DISABLE="1")
    return shared or "nccl"
