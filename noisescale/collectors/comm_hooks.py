# SPDX-License-Identifier: Apache-2.0
"""Which of DDP's comm hooks leave the averaged gradient what it is: the mean over ranks."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

from torch.nn.parallel import DistributedDataParallel

_SPOILING = {
    "powerSGD": "PowerSGD replaces the mean gradient by a low-rank approximation of it",
    "post_localSGD": "post-local SGD stops averaging gradients over all ranks",
}

_REMEDY = "Use a hook that keeps the mean, such as `fp16_compress_hook`, or none."


def spoiling_comm_hook(ddp: DistributedDataParallel) -> tuple[str, str, str] | None:
    """Return the name of a hook that does not keep the mean, the reason and the remedy.

    `DistributedDataParallel._comm_hooks` is private, as of torch 2.13.
    """
    for name in [name for hook, _ in ddp._comm_hooks for name in _names(hook, set())]:
        for part, reason in _SPOILING.items():
            if part in name:
                return name, reason, _REMEDY
    return None


def _names(hook: Any, seen: set[int]) -> Iterator[str]:
    """The names of a comm hook and of the hooks it wraps, as `fp16_compress_wrapper` does."""
    if id(hook) in seen:  # a closure that refers to itself
        return
    seen.add(id(hook))
    yield str(getattr(hook, "__qualname__", hook))
    for value in (
        inspect.getclosurevars(hook).nonlocals.values() if inspect.isfunction(hook) else ()
    ):
        if callable(value):
            yield from _names(value, seen)
