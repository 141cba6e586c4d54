# SPDX-License-Identifier: Apache-2.0
"""Whether ranks have the same tensors: an error on all of them, never a hang.

Where groups are given, they overlap: each learns what the one before it found. So every rank hears
of a difference anywhere. Groups across nodes come before those within, so that nodes of several
sizes hear of each other.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from noisescale.collectives import device_for
from noisescale.refusal import Refusal

Groups = Sequence[dist.ProcessGroup | None]

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_AT_ONCE = 2**20
"""Elements whose bits are widened to 64 at once."""


def check_alike(
    tensors: Sequence[Tensor], groups: Groups, settings: Mapping[str, object] | None = None
) -> None:
    """Raise a ValueError on all ranks if a setting differs, or tensors in number, shape or dtype.

    All ranks of all groups must call this function. It is one small collective for each group.

    Args:
        tensors: What this rank passes.
        groups: See above.
        settings: What each setting is on this rank, by the name of the argument.
    """
    said = [dict(settings or {}), *map(_describe, tensors)]
    digest = hashlib.blake2b(repr(said).encode(), digest_size=7).digest()
    same, mine = True, int.from_bytes(digest)
    for group in groups:
        found = _gather([mine, int(same)], group)
        same = all(entry == [mine, 1] for entry in found)
    if same:
        return
    one, (set_here, *here), rank, (set_there, *there) = _two_that_differ(_everyone(said, groups))
    for name in {**set_here, **set_there}:
        if set_here.get(name) != set_there.get(name):
            raise Refusal(
                name,
                "be the same on all ranks",
                f"{set_here.get(name)} on rank {one} and {set_there.get(name)} on rank {rank}",
                "Pass the same on each rank, and resume each from the same step.",
            )
    for index, pair in enumerate(zip_longest(here, there, fillvalue="none")):
        if pair[0] != pair[1]:
            raise Refusal(
                "tensors",
                "be the same in number, shape and dtype on all ranks",
                f"{len(here)} on rank {one} and {len(there)} on rank {rank}",
                f"Tensor {index} has {pair[0]} on rank {one}, and {pair[1]} on rank {rank}."
                " Pass the same parameters in the same order on each rank.",
            )


def on_any_rank(here: bool, groups: Groups) -> bool:
    """Return whether `here` is true on any rank. All ranks of all groups must call this."""
    for group in groups:
        here = any(found for (found,) in _gather([int(here)], group))
    return here


def raise_on_all_ranks(error: Exception | None, group: dist.ProcessGroup | None) -> None:
    """Raise the error of the first rank that has one, on all ranks of a group.

    Args:
        error: A ValueError or a TypeError of this rank, or none.
        group: All ranks of it must call this function.
    """
    if not dist.is_initialized() or dist.get_world_size(group) == 1:
        if error is not None:
            raise error
        return
    said = None if error is None else (isinstance(error, TypeError), str(error))
    everyone = _everyone([said], [group])
    failed = [rank for rank, theirs in everyone.items() if theirs != [None]]
    if not failed:
        return
    if error is not None:
        raise error
    is_of_type, text = everyone[min(failed)][0]
    raise (TypeError if is_of_type else ValueError)(f"On rank {min(failed)}: {text}")


def check_same_values(tensors: Sequence[Tensor], groups: Groups) -> None:
    """Raise a ValueError on all ranks if parameters differ between ranks in any bit.

    Of each parameter a sum of its bits is compared, which is exact in any order of addition. So
    devices that add floating-point numbers in other orders agree.

    Args:
        tensors: Parameters that are alike.
        groups: See above.
    """
    said = torch.stack([_sum_of_bits(each).cpu() for each in tensors]).tolist() if tensors else []
    everyone = _everyone(said, groups)
    if all(theirs == said for theirs in everyone.values()):
        return
    one, here, rank, there = _two_that_differ(everyone)
    index = min(i for i in range(len(here)) if here[i] != there[i])
    raise ValueError(
        "The weights must be the same on all ranks at the first step, got other values of parameter"
        f" {index} (shape {tuple(tensors[index].shape)}) on rank {rank} than on rank {one}. Send"
        " rank 0's to all before: `torch.distributed.broadcast(p.data, 0)` for each parameter."
        " Unfreeze parameters before a step begins, not in its closure or `training_step`."
    )


def _sum_of_bits(tensor: Tensor) -> Tensor:
    """Return Σ (2i + 1)·(bits of element i), modulo 2^64: odd factors show any single change."""
    tensor = torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    first = 0
    for piece in tensor.reshape(-1).view(_BITS[tensor.element_size()]).split(_AT_ONCE):
        last = first + len(piece)
        factors = torch.arange(2 * first + 1, 2 * last + 1, 2, device=tensor.device)
        total += (factors * piece).sum()
        first = last
    return total


def _describe(tensor: Tensor) -> str:
    layout = "" if tensor.layout == torch.strided else f" {tensor.layout}"
    return f"shape {tuple(tensor.shape)} and dtype {tensor.dtype}{layout}"


def _two_that_differ(everyone: dict[int, list[Any]]) -> tuple[int, list[Any], int, list[Any]]:
    one = min(everyone)
    other = min(rank for rank, theirs in everyone.items() if theirs != everyone[one])
    return one, everyone[one], other, everyone[other]


def _everyone(said: list[Any], groups: Groups) -> dict[int, list[Any]]:
    """Return what each rank of all groups said."""
    everyone = {dist.get_rank(): said}
    for group in groups:
        found: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(found, everyone, group=group)
        everyone = {rank: theirs for entry in found for rank, theirs in entry.items()}
    return everyone


def _gather(numbers: list[int], group: dist.ProcessGroup | None) -> list[list[int]]:
    mine = torch.tensor(numbers, device=device_for(group, torch.device("cpu")))
    found = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(found, mine, group=group)
    return [list(map(int, each)) for each in torch.stack(found).tolist()]
