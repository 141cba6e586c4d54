# SPDX-License-Identifier: Apache-2.0
"""Check that all ranks have decided the same."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from noisescale.batches.to_device import to_device
from noisescale.collectives import device_for, let_stream_wait, world_size
from noisescale.collectors.devices import OnItsWay
from noisescale.collectors.squared_norms import wide_dtype


class Agreement:
    """Compare the batch sizes that the ranks want, in the background until a rank waits.

    A rank that alone changes its batch size, or fails, would leave the others waiting in a
    collective for ever.

    Args:
        device: A device to compare on, if the process group's backend reduces there.
        checksum: Checksum of a schedule, see `Policy.checksum`. Ranks step together, so it is
            compared only once. None: the wanted batch sizes are compared each time.
    """

    def __init__(self, device: torch.device, checksum: int | None = None) -> None:
        self.same_schedule = False
        """Whether all ranks are known to have the same schedule."""
        self._device, self._checksum = device, checksum
        self._pending: _Range | None = None

    def check(self, wanted: float, *, in_background: bool = False) -> None:
        """Raise unless all ranks want the same, or have the same schedule. All ranks must call it.

        Args:
            wanted: The batch size that this rank wants; 0 if it has failed.
            in_background: Do not wait now; the next call raises if the ranks differ.

        Raises:
            RuntimeError: If the ranks differ, or differed in the call before.
        """
        if self._checksum is not None:
            if not self.same_schedule:
                self.check_schedule()
            return
        self.settle()
        if world_size() > 1:
            self._pending = _Range(wanted, self._device)
        if not in_background:
            self.settle()

    def settle(self) -> None:
        """Raise a RuntimeError unless all ranks wanted the same batch size."""
        if self._pending is None:
            return
        pending, self._pending = self._pending, None
        least, most = pending.read()
        if most != least:
            raise RuntimeError(
                f"`policy` must give the same batch size on all ranks, got {least:g} to {most:g}."
                " Compute it from its three arguments alone, which are equal on all ranks: not from"
                " random numbers, a clock, or a rank's own data."
            )

    def check_schedule(self) -> None:
        """Raise a RuntimeError on all ranks unless all have the same schedule, if there is one."""
        if self._checksum is None:
            return
        if world_size() > 1:
            least, most = _Range(self._checksum, self._device).read()
            if most != least:
                raise RuntimeError(
                    "`policy` must be the same schedule on all ranks, got different ones. Make it"
                    " from values that are equal on all ranks."
                )
        self.same_schedule = True


class Reduction:
    """Numbers of the host that are reduced over all ranks, on their way. All ranks must begin it.

    Each number is reduced in two parts, as the 32 bits of some devices are too few for it.

    Args:
        numbers: The numbers of this rank.
        device: A device to reduce on, if the process group's backend reduces there.
        op: How they are reduced.
    """

    def __init__(
        self, numbers: Sequence[float], device: torch.device, op: dist.ReduceOp.RedOpType
    ) -> None:
        device = device_for(None, device)
        dtype = wide_dtype(device)
        rounded = torch.tensor(numbers, dtype=dtype, device="cpu").tolist()
        rests = [number - near for number, near in zip(numbers, rounded, strict=True)]
        on_device = to_device(torch.tensor([*rounded, *rests], dtype=dtype, device="cpu"), device)
        self._work = dist.all_reduce(on_device, op, async_op=True)
        if self._work is not None:
            let_stream_wait(self._work, device)
        self._reduced = OnItsWay(on_device)

    def read(self) -> list[float]:
        """Return the numbers, once the ranks and the device have them."""
        if self._work is not None:
            self._work.wait()
        reduced = self._reduced.read()
        half = len(reduced) // 2
        return [near + rest for near, rest in zip(reduced[:half], reduced[half:], strict=True)]


class _Range:
    """The least and the most that a number is on any rank, on its way."""

    def __init__(self, value: float, device: torch.device) -> None:
        self._ends = Reduction([value, -value], device, dist.ReduceOp.MAX)

    def read(self) -> tuple[float, float]:
        """Return the least and the most, once the ranks and the device have them."""
        most, negative_least = self._ends.read()
        return 0.0 - negative_least, most  # of 0 without a sign
