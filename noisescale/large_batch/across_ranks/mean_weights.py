# SPDX-License-Identifier: Apache-2.0
"""The mean of the weights of all ranks, for a while in place of each rank's own."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor


class MeanWeights:
    """The weights of this rank, and their mean over the ranks of a group.

    Making one is one all-reduce of the weights, in float32 at least, that all ranks have to join.

    Args:
        parameters: Dense parameters, alike on all ranks.
        group: The ranks; None: all.
    """

    def __init__(self, parameters: Sequence[Tensor], group: dist.ProcessGroup | None) -> None:
        self._parameters = list(parameters)
        self.own = [p.detach().clone() for p in parameters]
        self.mean = [p.detach().clone() for p in parameters]
        """Rounded to the dtypes of the parameters, the same on all ranks."""
        kinds: dict[tuple[torch.dtype, torch.device], list[int]] = {}
        for index, p in enumerate(parameters):
            kinds.setdefault((p.dtype, p.device), []).append(index)
        sums: list[Tensor] = []
        for indices in kinds.values():
            sums.append(self._average([self.own[i] for i in indices], indices, group))
        self._sums = (
            torch.stack([each.to(sums[0].device) for each in sums]).sum(0) if sums else None
        )

    @property
    def consensus_distance(self) -> float:
        """Mean over ranks of |x_i - mean|², over |mean|²: 0 if all ranks have the same weights."""
        if self._sums is None:
            return 0.0
        square_distance, square = self._sums.tolist()
        return float(square_distance / square) if square else 0.0

    def swap_in(self) -> None:
        """Give this rank the mean."""
        self._give(self.mean)

    def swap_back(self) -> None:
        """Give this rank its own weights again."""
        self._give(self.own)

    def _give(self, values: list[Tensor]) -> None:
        with torch.no_grad():
            torch._foreach_copy_(self._parameters, values)

    def _average(
        self, own: list[Tensor], indices: list[int], group: dist.ProcessGroup | None
    ) -> Tensor:
        """Write the mean, and return the squares of the distance to it and of itself."""
        ranks = dist.get_world_size(group) if dist.is_initialized() else 1
        real = [torch.view_as_real(each) if each.is_complex() else each for each in own]
        flat = torch.cat([each.reshape(-1) for each in real])
        wide = torch.promote_types(flat.dtype, torch.float32)
        mean = flat.to(wide, copy=True)
        if ranks > 1:
            dist.all_reduce(mean, group=group)
            mean /= ranks
        square = torch.linalg.vector_norm(mean, dtype=torch.float64).square()
        distance = torch.linalg.vector_norm(flat - mean, dtype=torch.float64).square() / ranks
        if ranks > 1:
            dist.all_reduce(distance, group=group)
        parts = mean.split([each.numel() for each in real])
        for index, part, each in zip(indices, parts, real, strict=True):
            into = self.mean[index]
            into = torch.view_as_real(into) if into.is_complex() else into
            into.copy_(part.view(each.shape))
        return torch.stack([distance, square])
