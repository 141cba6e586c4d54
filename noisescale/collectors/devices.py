# SPDX-License-Identifier: Apache-2.0
"""What differs between devices: streams, and what is on several devices."""

from __future__ import annotations

import platform
from collections.abc import Hashable, Iterable, Iterator, Sequence
from functools import cache
from itertools import islice
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor


def current_stream(device: torch.device) -> torch.Stream | None:
    """Return the stream on which a device works for this thread.

    None: it has no streams, and all of its work is in one order.
    """
    return torch.accelerator.current_stream(device) if _has_streams(device.type) else None


@cache
def _has_streams(kind: str) -> bool:
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or accelerator.type != kind:
        return False
    try:
        torch.accelerator.current_stream()
    except NotImplementedError:
        return False
    return True


def keep_from(stream: torch.Stream | None, tensors: Iterable[Tensor]) -> None:
    """Have the allocator reuse the memory of tensors only after the current stream has read them.

    Without that it may once they are freed and the stream that they were made on goes on.

    Args:
        stream: The one that they were made on; None: another one than the current one.
        tensors: Those of one device.
    """
    current = None
    for tensor in tensors:
        current = current or current_stream(tensor.device)
        if current is None or current == stream:
            return
        tensor.record_stream(current)


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
    """Return what is in vectors. The host reads each device once."""
    values: dict[int, list[float]] = {}
    for _, (there,) in by_device([tensors]):
        joined = there[0] if len(there) == 1 else torch.cat(list(there))
        numbers = iter(joined.tolist())
        values |= {id(x): list(islice(numbers, len(x))) for x in there}
    return [values[id(x)] for x in tensors]


class OnItsWay:
    """What is in a vector, on its way to the host: copied as soon as the device has it.

    Where a device has streams, the host waits for that copy, and for nothing that it has asked the
    device to do since.
    """

    def __init__(self, vector: Tensor) -> None:
        stream = None if vector.is_cpu else current_stream(vector.device)
        self._vector = vector if stream is None else vector.to("cpu", non_blocking=True)
        self._copied = None if stream is None else stream.record_event()

    def read(self) -> list[float]:
        """Wait for the copy, and return what is in the vector."""
        if self._copied is not None:
            self._copied.synchronize()
        numbers: list[float] = self._vector.tolist()
        return numbers


def device_name(device: torch.device) -> str:
    """Return the name of a device, by which times of other devices are told from its own.

    Examples:
        >>> device_name(torch.device("cpu")).startswith("CPU")
        True
    """
    if device.type == "cpu":
        return f"CPU ({platform.machine()}, {torch.get_num_threads()} threads)"
    of_kind = getattr(getattr(torch, device.type), "get_device_name", None)
    return device.type if of_kind is None else str(of_kind(device))


class Memory(NamedTuple):
    """The memory of an accelerator, in bytes."""

    peak: float
    """The most that tensors of this process have had at once."""
    total: float
    """What the device has."""


def memory_of(device: torch.device) -> Memory | None:
    """Return the memory of a device; None on the CPU, and where torch does not count it.

    The host asks its own allocator, and does not wait for the device.
    """
    of_kind: Any = getattr(torch, device.type, None)
    try:
        return Memory(
            float(of_kind.max_memory_allocated(device)),
            float(of_kind.get_device_properties(device).total_memory),
        )
    except (AttributeError, NotImplementedError):  # CPU, MPS
        return None


def reset_peak_memory(device: torch.device) -> None:
    """Have the peak of `memory_of` begin anew."""
    if memory_of(device) is not None:
        getattr(torch, device.type).reset_peak_memory_stats(device)


T = TypeVar("T")

MOST_ELEMENTS = 2**23
"""The most that is copied at once: 32 MB in float32."""


def together(items: Iterable[tuple[T, Hashable, int]]) -> Iterator[list[T]]:
    """Yield lists of items of one kind, with `MOST_ELEMENTS` at most if they hold several.

    Args:
        items: Each with its kind and its elements.
    """
    kept: dict[Hashable, tuple[int, list[T]]] = {}
    for item, kind, elements in items:
        held, some = kept.get(kind, (0, []))
        if some and held + elements > MOST_ELEMENTS:
            yield some
            held, some = 0, []
        some.append(item)
        kept[kind] = held + elements, some
    for _, some in kept.values():
        yield some
