# SPDX-License-Identifier: Apache-2.0
"""Gradients of tensor parallelism: which part of one a rank has, and how many ranks have it.

Where a gradient lies is told by its own placements. A parameter may be replicated while its
gradient is partial, as that of a norm in a sequence-parallel part: each rank then has a summand.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

import torch.distributed as dist
from torch import Tensor

from noisescale.collectors.averaged_gradient import AveragedPieces
from noisescale.collectors.gradient_norms import GradientNorms, Piece
from noisescale.collectors.micro_batch import MicroBatchCollector
from noisescale.guard import NotMeasured

NOTHING_TO_COMPARE = (
    "A step of one micro-batch has nothing to be compared with if no other rank has a batch of its"
    " own. It is not measured. Accumulate two or more micro-batches."
)


def shards_in(mesh: Any, placements: Iterable[Any]) -> int:
    """Return the number of different parts of a tensor on a mesh."""
    sizes = (mesh.size(i) for i, where in enumerate(placements) if not where.is_replicate())
    return math.prod(sizes)


def is_tensor(x: Tensor) -> bool:
    """Return whether a tensor is whole on this rank, and no DTensor."""
    return not hasattr(x, "placements")


def piece_of(index: int, gradient: Any, holders: int) -> Piece:
    """Return the part of a gradient that this rank has.

    A partial gradient is summed over the ranks first, which is a collective.

    Args:
        index: Of the parameter.
        gradient: A tensor that all ranks have, or a DTensor.
        holders: The ranks whose norms are summed.
    """
    if is_tensor(gradient):
        return Piece(index, gradient, holders=holders)
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


class AveragedParts(AveragedPieces):
    """|g|² of this rank's parts of the gradients, by how many ranks have them."""

    def _pieces(self) -> Iterator[Piece]:
        for index, p in enumerate(self._norms.parameters):
            if p.grad is not None and p.requires_grad:
                yield piece_of(index, p.grad, self._ranks)
            elif p.requires_grad:
                self.gone |= {index} & self.came


class TensorParallelCollector(MicroBatchCollector):
    """Squared norms of each micro-batch's gradient where the ranks have parts of one model.

    Args:
        norms: See `Collector`.
        group: The ranks of tensor parallelism.
    """

    nothing_to_compare = NOTHING_TO_COMPARE

    def __init__(self, norms: GradientNorms, group: dist.ProcessGroup) -> None:
        super().__init__(norms, group)
        self._average = AveragedParts(norms, group)
        self.sharing = dist.get_world_size(group)

    @property
    def least_micro_batches(self) -> int:
        """Micro-batches that a step needs to be measured."""
        return 2

    def _capture(self, index: int, gradient: Tensor) -> None:
        piece = piece_of(index, gradient.detach(), self.sharing)
        self.norms.add(self._step.captured.found, [piece])
