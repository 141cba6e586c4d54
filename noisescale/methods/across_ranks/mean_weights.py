# SPDX-License-Identifier: Apache-2.0
"""The mean of the weights of all ranks, for a while in place of each rank's own."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from noisescale.collectors.squared_norms import wide_dtype
from noisescale.methods.adasum.fused import as_real


class MeanWeights:
    """The weights of this rank, and their mean over the ranks of a group.

    Making one is one all-reduce of the weights, in float32 at least, that all ranks have to join.

    Args:
        parameters: Dense parameters, alike on all ranks.
        group: The ranks; None: all.
    """

    def __init__(self, parameters: Sequence[Tensor], group: dist.ProcessGroup | None) -> None:
        self.parameters = list(parameters)
        self.own = [p.detach().clone() for p in parameters]
        self.mean = [p.detach().clone() for p in parameters]
        """Rounded to the dtypes of the parameters, the same on all ranks."""
        self._squares: list[Tensor] = []
        for reals in _kinds(self.mean):
            mean, squares = _mean_of(reals, group)
            self._squares.append(squares)
            parts = mean.split([each.numel() for each in reals])
            for into, part in zip(reals, parts, strict=True):
                into.copy_(part.view(into.shape))

    @property
    def consensus_distance(self) -> float:
        """Mean over ranks of |x_i - mean|², over |mean|²: 0 if all ranks have the same weights."""
        return _relative(self._squares)

    def swap_in(self) -> None:
        """Give this rank the mean."""
        copy_(self.parameters, self.mean)

    def swap_back(self) -> None:
        """Give this rank its own weights again."""
        copy_(self.parameters, self.own)


def consensus_distance(parameters: Sequence[Tensor], group: dist.ProcessGroup | None) -> float:
    """Return the `consensus_distance` of a `MeanWeights`, without keeping one."""
    kinds = _kinds([p.detach() for p in parameters])
    return _relative([_mean_of(reals, group)[1] for reals in kinds])


def copy_(into: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Write values into parameters."""
    if into:
        with torch.no_grad():
            torch._foreach_copy_(list(into), list(values))


def _kinds(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """Return real views of the tensors, in a list for each dtype and device."""
    kinds: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for each in tensors:
        kinds.setdefault((each.dtype, each.device), []).append(as_real(each))
    return list(kinds.values())


def _mean_of(reals: list[Tensor], group: dist.ProcessGroup | None) -> tuple[Tensor, Tensor]:
    """Return the mean over ranks in one row, and two squares: of the distance, of the mean."""
    ranks = dist.get_world_size(group) if dist.is_initialized() else 1
    own = torch.cat([each.reshape(-1) for each in reals])
    mean = own.to(torch.promote_types(own.dtype, torch.float32), copy=True)
    if ranks > 1:
        dist.all_reduce(mean, group=group)
        mean /= ranks
    dtype = wide_dtype(own.device)
    norms = [torch.linalg.vector_norm(each, dtype=dtype) for each in (own - mean, mean)]
    distance, square = torch.stack(norms).square()
    distance = (distance / ranks).reshape(1)
    if ranks > 1:
        dist.all_reduce(distance, group=group)
    return mean, torch.cat([distance, square.reshape(1)])


def _relative(squares: list[Tensor]) -> float:
    known = [each.tolist() for each in squares]
    distance, square = (sum(each[i] for each in known) for i in (0, 1))
    return float(distance / square) if square else 0.0
