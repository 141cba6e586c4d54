# SPDX-License-Identifier: Apache-2.0
"""Record each collective that a rank calls, also those of DDP and FSDP."""

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Collective(NamedTuple):
    """One, as a rank calls it."""

    name: str
    ranks: tuple[int, ...]
    """The group."""
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]
    devices: tuple[str, ...]


class RecordedCollectives(TorchDispatchMode):
    """Keeps them in the order in which this rank calls them, those of a backward pass too.

    Example:
        with RecordedCollectives() as recorded:
            loss.backward()
        print(recorded.collectives)
    """

    def __init__(self) -> None:
        super().__init__()
        self.collectives: list[Collective] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if DTensor in types:
            return NotImplemented  # what it does with its parts comes here again
        if "c10d" in function.namespace:
            arguments = tree_leaves((args, kwargs or {}))
            tensors = [one for one in arguments if isinstance(one, Tensor)]
            self.collectives.append(
                Collective(
                    function._schema.name.split("::")[1].strip("_"),
                    tuple(rank for one in arguments for rank in _ranks_of(one)),
                    tuple(tuple(one.shape) for one in tensors),
                    tuple(one.dtype for one in tensors),
                    tuple(one.device.type for one in tensors),
                )
            )
        return function(*args, **(kwargs or {}))


def _ranks_of(argument: Any) -> list[int]:
    """Those of a group, none of another argument."""
    if not isinstance(argument, torch.ScriptObject):
        return []
    if not argument._type().qualified_name().endswith("ProcessGroup"):
        return []
    return dist.get_process_group_ranks(dist.ProcessGroup.unbox(argument))
