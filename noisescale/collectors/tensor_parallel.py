# SPDX-License-Identifier: Apache-2.0
"""Gradients of tensor parallelism: which part of one a rank has, and how many ranks have it.

Where a gradient lies is told by its own placements. A parameter may be replicated while its
gradient is partial, as that of a norm in a sequence-parallel part: each rank then has a summand.

DistributedDataParallel trains the local parts: plain tensors, which note where each lies
(`_st_info`, as of torch 2.13). Autograd brings their gradients there. From the first forward pass
on, the model shows other tensors in their place.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from noisescale.collectors.averaged_gradient import AveragedPieces
from noisescale.collectors.collector import ACCUMULATE
from noisescale.collectors.ddp import DdpCollector
from noisescale.collectors.gradient_norms import GradientNorms, Piece
from noisescale.collectors.micro_batch import MicroBatchCollector
from noisescale.guard import NotMeasured

NOTHING_TO_COMPARE = (
    "A step of one micro-batch has nothing to be compared with if no other rank has a batch of its"
    " own. It is not measured."
)


def shards_in(mesh: Any, placements: Iterable[Any]) -> int:
    """Return the number of different parts of a tensor on a mesh."""
    sizes = (mesh.size(i) for i, where in enumerate(placements) if not where.is_replicate())
    return math.prod(sizes)


def is_tensor(x: Tensor) -> bool:
    """Return whether a tensor is no DTensor."""
    return not hasattr(x, "placements")


def is_whole(p: Tensor) -> bool:
    """Return whether a parameter is whole on this rank: no DTensor, and no local part of one."""
    return is_tensor(p) and not is_local_part(p)


def is_local_part(p: Tensor) -> bool:
    """Return whether a parameter is the local part of a DTensor, which DDP trains in its place."""
    return hasattr(p, "_st_info")


def piece_of(index: int, p: Any, gradient: Any, holders: int) -> Piece:
    """Return the part of a gradient that this rank has.

    A partial gradient is summed over the ranks first, which is a collective.

    Args:
        index: Of the parameter.
        p: The parameter.
        gradient: A tensor that all ranks have, a local part, or a DTensor.
        holders: The ranks whose norms are summed.
    """
    if is_tensor(gradient):
        lies = getattr(p, "_st_info", None)
        shards = 1 if lies is None else shards_in(lies.mesh, lies.placements)
        return Piece(index, gradient, holders=holders // shards)
    if any(where.is_partial() for where in gradient.placements):
        from torch.distributed.tensor import Replicate

        gradient = gradient.redistribute(
            placements=[Replicate() if p.is_partial() else p for p in gradient.placements]
        )
    shards = shards_in(gradient.device_mesh, gradient.placements)
    return Piece(index, gradient.to_local(), holders=holders // shards)


def tensor_parallel_group(parameters: Iterable[Any]) -> dist.ProcessGroup | None:
    """Return the group of a model that is tensor parallel alone; None if no parameter is a DTensor.

    Raises:
        NotMeasured: If parameters are on several meshes, or on a mesh of several dimensions.
    """
    meshes: list[Any] = [p.device_mesh for p in parameters if not is_tensor(p)]
    if not meshes:
        return None
    if others := [mesh for mesh in meshes if mesh != meshes[0] or mesh.ndim > 1]:
        raise NotMeasured(
            "`model` must be parallel over one mesh of one dimension, or sharded by `fully_shard`,"
            f" got {others[0]}. Apply `fully_shard` for data parallelism."
        )
    group: dist.ProcessGroup = meshes[0].get_group()
    return group


def ranks_of_local_parts(ddp: DistributedDataParallel) -> int:
    """Return the ranks that together hold the model that DDP trains; 1 if each has all of it.

    Raises:
        NotMeasured: If the model no longer shows its parameters, if some are DTensors beside local
            parts, or if the ranks are not those of data parallelism times those of the mesh.
    """
    parameters: list[Any] = ddp._module_parameters
    where = [p._st_info.mesh for p in parameters if is_local_part(p)]
    if not where:
        return 1
    shown = {id(p) for p in ddp.parameters()}
    if any(id(p) not in shown for p in parameters):
        raise NotMeasured(
            "`model` must not have run yet if it is DistributedDataParallel over tensor"
            " parallelism, got one that has: its parameters are no longer in it. Make the meter"
            " before the first forward pass."
        )
    if tied := [name for name, p in ddp.named_parameters() if not is_tensor(p)]:
        raise NotMeasured(
            "`model` must not have tied weights if it is DistributedDataParallel over tensor"
            f" parallelism, got {tied[0]!r}, which torch would train apart from its twin. Use"
            " `fully_shard` or `replicate`, or untie the weights."
        )
    tensor: int = where[0].size()
    data = dist.get_world_size(ddp.process_group)
    if any(mesh != where[0] for mesh in where) or data * tensor != dist.get_world_size():
        raise NotMeasured(
            "`model` must be data parallel times tensor parallel over all processes, got"
            f" {data} x {tensor} ranks in {dist.get_world_size()} processes. Use one mesh of two"
            " dimensions."
        )
    return tensor


class AveragedParts(AveragedPieces):
    """|g|² of this rank's parts of the gradients, by how many ranks have them."""

    def _pieces(self) -> Iterator[Piece]:
        for index, p in enumerate(self._norms.parameters):
            if p.grad is not None and p.requires_grad:
                yield piece_of(index, p, p.grad, self._ranks)
            elif p.requires_grad:
                self.gone |= {index} & self.came


class TensorParallelCollector(MicroBatchCollector):
    """Squared norms of each micro-batch's gradient where the ranks have parts of one model.

    Args:
        norms: See `Collector`.
        group: The ranks of tensor parallelism.
    """

    nothing_to_compare, how_to_compare = NOTHING_TO_COMPARE, f"{ACCUMULATE}."

    def __init__(self, norms: GradientNorms, group: dist.ProcessGroup) -> None:
        super().__init__(norms, group)
        self.least_micro_batches = 2
        self._average = AveragedParts(norms, group)
        self.sharing = dist.get_world_size(group)

    def _capture(self, index: int, gradient: Tensor) -> None:
        p = self.norms.parameters[index]
        piece = piece_of(index, p, gradient.detach(), self.sharing)
        self.norms.add(self._step.captured.found, [piece])


class DdpOfPartsCollector(DdpCollector):
    """Squared norms as `DdpCollector` finds them, where each model is held by several ranks.

    Args:
        ddp: The model of local parts.
        norms: See `Collector`.
        sharing: The ranks of tensor parallelism, see `ranks_of_local_parts`.
    """

    def __init__(self, ddp: DistributedDataParallel, norms: GradientNorms, sharing: int) -> None:
        super().__init__(ddp, norms)
        self.group = dist.distributed_c10d._get_default_group()
        self._average = AveragedParts(norms, self.group)
        self.sharing = sharing

    def _piece(self, index: int, gradient: Tensor) -> Piece:
        return piece_of(index, self.norms.parameters[index], gradient, self.sharing)
