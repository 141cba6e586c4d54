# SPDX-License-Identifier: Apache-2.0
"""Numbers of the host on their way to a device, which the host does not wait for."""

from __future__ import annotations

from contextlib import suppress
from functools import cache

import torch
from torch import Tensor


def to_device(tensor: Tensor, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """Return a tensor on a device; one of the host by way of pinned memory.

    Without pinned memory the host waits until the device has done all that was asked of it, also
    with `non_blocking`. Where no memory can be pinned it waits: ranks that meet in a collective
    count on this one.
    """
    if tensor.is_cpu and device.type != "cpu":
        with suppress(RuntimeError):
            if _copies_from_pinned(device.type):
                pinned = tensor.to(dtype=dtype or tensor.dtype).pin_memory()
                return pinned.to(device, non_blocking=True)
    return tensor.to(device, dtype)


@cache
def _copies_from_pinned(kind: str) -> bool:
    """Return whether a type of device copies from pinned memory before that is used again."""
    accelerator = torch.accelerator.current_accelerator()
    # On MPS the memory may be freed before it is copied (torch 2.13, pytorch#189690).
    if accelerator is None or accelerator.type != kind or kind == "mps":
        return False
    try:
        torch.empty(1, device="cpu").pin_memory()
    except (NotImplementedError, RuntimeError):  # the device has none
        return False
    return True
