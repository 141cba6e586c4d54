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
    return torch.device(name, rank % getattr(torch, name).device_count())
