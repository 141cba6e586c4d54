# SPDX-License-Identifier: Apache-2.0
"""Parameters of one dtype in a row, so that one message carries all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from noisescale.methods.decentlam.mixing import Rooms


@dataclass
class Flat:
    """Two buffers of the length of all parameters of one dtype and device.

    Args:
        tensors: Dense real tensors of one dtype on one device.
        indices: Their places among all parameters.
        groups: The parameter group of each, in rising order.
    """

    tensors: list[Tensor]
    indices: list[int]
    groups: list[int]

    def __post_init__(self) -> None:
        lengths = [each.numel() for each in self.tensors]
        self.u = self.tensors[0].new_zeros(sum(lengths))
        """u = lr·m, what is taken from the weights in a step."""
        self.z = torch.empty_like(self.u)
        """z = x - lr·gradient, what neighbours get."""
        self.rooms = Rooms()
        self.u_views = self.in_shape(self.u)
        self.z_views = self.in_shape(self.z)
        self.parts: list[tuple[int, slice, slice]] = []
        """The index, the elements and the tensors of each parameter group in the buffers."""
        start = first = 0
        for group in dict.fromkeys(self.groups):
            count = self.groups.count(group)
            stop = start + sum(lengths[first : first + count])
            self.parts.append((group, slice(start, stop), slice(first, first + count)))
            start, first = stop, first + count

    def in_shape(self, buffer: Tensor) -> list[Tensor]:
        """View parts of a buffer of this length in the shapes of the tensors."""
        parts = buffer.split([each.numel() for each in self.tensors])
        return [part.view(each.shape) for part, each in zip(parts, self.tensors, strict=True)]


def flats_of(tensors: Sequence[Tensor], groups: Sequence[int]) -> list[Flat]:
    """Return a `Flat` for each dtype and device."""
    kinds: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for index, each in enumerate(tensors):
        kinds.setdefault((each.dtype, each.device), []).append(index)
    return [
        Flat([tensors[i] for i in indices], indices, [groups[i] for i in indices])
        for indices in kinds.values()
    ]
