# SPDX-License-Identifier: Apache-2.0
"""The device that tests run on, of each rank: `--device` says which."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

name = "cpu"


def of_rank(rank: int = 0) -> "torch.device":
    """Ranks beyond the devices that there are share them."""
    import torch  # not for tests that need none

    if name in ("cpu", "mps"):
        return torch.device(name)
    return torch.device(name, rank % torch.get_device_module(name).device_count())


def most_ranks() -> int:
    """How many ranks tests may start. CUDA's need a device each; of the fake one two will do."""
    if name == "cuda":
        import torch

        return torch.cuda.device_count()
    return {"cpu": 4, "fake": 2, "mps": 1}[name]


def forks() -> bool:
    """Whether tests and their ranks are forked from a process that never uses the device.

    No process can fork ranks after it has had a backward pass with an accelerator. MPS does not
    stand any fork.
    """
    return name in ("fake", "cuda")
