# SPDX-License-Identifier: Apache-2.0
"""The groups that the rows of a batch belong to: rows of one group are not independent."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from noisescale.batches.to_device import to_device
from noisescale.checks import refuse

RowGroupsLike = Tensor | Iterable[Hashable]
"""The group of each row: numbers, names, or whatever tells groups apart."""

_REMEDY = (
    "Give the group of each row of the batch: a number or a name, the same for all rows of a group."
)


class RowGroups(NamedTuple):
    """The group of each row."""

    of_rows: Tensor
    """The index of each row's group, from 0 on, on the host."""
    number: int
    """The number of groups."""
    names: tuple[Hashable, ...]
    """What the groups were called, in the order of their indices."""
    apart: bool = False
    """Whether rows of one group are known not to act on each other in the loss."""

    @property
    def numbered_in_batch(self) -> bool:
        """Whether groups are numbered from 0 on: in each batch anew, as far as one can tell."""
        return set(self.names) == set(range(self.number))

    def sums(self, rows: Tensor) -> Tensor:
        """Sum numbers of rows over each group."""
        total = torch.zeros(self.number, dtype=torch.float32, device=rows.device)
        return total.index_add_(0, to_device(self.of_rows, rows.device), rows.float())


def checked_row_groups(groups: RowGroupsLike, name: str = "row_groups") -> RowGroups:
    """Return the groups of rows as indices; raise a ValueError unless each row has a group.

    A tensor on the device is copied to the host.

    Examples:
        >>> checked_row_groups(["a", "b", "a"])
        RowGroups(of_rows=tensor([0, 1, 0]), number=2, names=('a', 'b'), apart=False)
    """
    if isinstance(groups, RowGroups):
        return groups
    index: dict[Hashable, int] = {}
    try:
        listed: list[Any] = list(groups.tolist() if isinstance(groups, Tensor) else groups)
        listed = [one.item() if isinstance(one, Tensor) else one for one in listed]
        if not any(one is None or one != one for one in listed):  # NaN is no group
            indices = [index.setdefault(one, len(index)) for one in listed]
            of_rows = torch.tensor(indices, device="cpu").long()
            return RowGroups(of_rows, len(index), tuple(index))
    except (TypeError, ValueError, RuntimeError):  # not listed, not one each, not hashable
        pass
    refuse(name, "be one group for each row", repr(groups), _REMEDY)


def check_groups_are_used(name: str, small_batch: str) -> None:
    """Raise a ValueError if the way of measuring compares something else than halves."""
    if small_batch not in ("auto", "half"):
        refuse(
            name,
            f'be None with `small_batch="{small_batch}"`',
            "groups of rows",
            "Only halves of a batch are made of whole groups. Leave `small_batch` out, or have each"
            " small batch hold whole groups and leave the groups out.",
        )
