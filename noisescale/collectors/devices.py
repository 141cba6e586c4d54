# SPDX-License-Identifier: Apache-2.0
"""What differs between devices: streams, and what is on several devices."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

_HAVE_STREAMS: dict[str, bool] = {}
"""By type of device."""


def current_stream(device: torch.device) -> torch.Stream | None:
    """Return the stream on which a device works for this thread; None: it has no streams.

    A type of device is asked for streams once. If it has none, all of its work is in one order.
    """
    if _HAVE_STREAMS.get(device.type, True):
        try:
            return torch.accelerator.current_stream(device)
        except (RuntimeError, ValueError):  # ValueError: torch does not know it as an accelerator
            _HAVE_STREAMS[device.type] = False
    return None


def keep_for(stream: torch.Stream, tensors: Iterable[Tensor]) -> None:
    """Have the allocator reuse the memory of tensors only after a stream is done with them.

    Without that it may once they are freed and the stream that they were made on goes on.
    """
    for tensor in tensors:
        tensor.record_stream(stream)


def by_device(
    lists: Sequence[Sequence[Tensor]],
) -> Iterator[tuple[torch.device, Sequence[Sequence[Tensor]]]]:
    """Yield each device with what is there of some lists of tensors. The CPU comes first."""
    indices = {x.get_device() for some in lists for x in some}
    for index in sorted(indices):  # -1 is the CPU; a process has one type of other devices
        there = lists
        if len(indices) > 1:
            there = [[x for x in some if x.get_device() == index] for some in lists]
        yield next(x.device for some in there for x in some), there


def read(tensors: Sequence[Tensor]) -> list[list[float]]:
    """Return what is in vectors of one length. The host reads each device once."""
    values = {
        id(x): numbers
        for _, (there,) in by_device([tensors])
        for x, numbers in zip(there, torch.stack(list(there)).tolist(), strict=True)
    }
    return [values[id(x)] for x in tensors]
