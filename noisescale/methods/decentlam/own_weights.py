# SPDX-License-Identifier: Apache-2.0
"""What validating and saving need of an optimizer whose ranks have weights of their own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from noisescale.collectors.squared_norms import wide_dtype
from noisescale.methods.across_ranks.wrapped_optimizer import WrappedOptimizer
from noisescale.methods.adasum.fused import as_real, copy_, kinds_of


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
        mean_of = [as_real(each) for each in self.mean]
        for indices in kinds_of(mean_of):
            reals = [mean_of[i] for i in indices]
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
    reals = [as_real(p) for p in parameters]
    kinds = ([reals[i] for i in indices] for indices in kinds_of(reals))
    return _relative([_mean_of(some, group)[1] for some in kinds])


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


class OwnWeights(WrappedOptimizer):
    """An optimizer around another one, with the mean of the ranks' weights.

    Args:
        optimizer: The inner one.
        group: The ranks; None: all.
    """

    def __init__(self, optimizer: Optimizer, group: Any = None) -> None:
        super().__init__(optimizer)
        self.group = group
        self._swapped: MeanWeights | None = None

    def mean_weights(self) -> MeanWeights:
        """Return the mean of the weights over ranks, in one all-reduce that all have to join.

        Weights that were always frozen are left out: they are the same, and the mean of three equal
        numbers is rounded. Its `consensus_distance` says how far ranks are apart.
        """
        return MeanWeights(self._ever_trained, self.group)

    def consensus_distance(self) -> float:
        """Return the mean over ranks of |x_i - mean|²/|mean|². It is 0 if all weights are equal.

        Weights that were always frozen do not count. One all-reduce of the weights, which all ranks
        have to join, and the host waits for it.
        """
        return consensus_distance(self._ever_trained, self.group)

    @contextmanager
    def use_mean(self) -> Iterator[MeanWeights]:
        """Give all ranks the mean of their weights in a block, and their own after it."""
        self.swap_in_mean()
        try:
            assert self._swapped is not None
            yield self._swapped
        finally:
            self.swap_back()

    def average_(self) -> None:
        """Give all ranks the mean of their weights, for good. All ranks have to join."""
        self.mean_weights().swap_in()

    @property
    def is_swapped(self) -> bool:
        """Whether the mean is swapped in."""
        return self._swapped is not None

    @property
    def own_weights(self) -> list[Tensor]:
        """The weights of this rank, also while the mean is swapped in."""
        swapped = self._swapped
        own = {} if swapped is None else dict(zip(swapped.parameters, swapped.own, strict=True))
        return [own.get(p, p.detach()) for p in self._parameters]

    def swap_in_mean(self) -> MeanWeights:
        """Begin a block of `use_mean()`."""
        if self._swapped is None:
            self._swapped = self.mean_weights()
            self._swapped.swap_in()
        return self._swapped

    def swap_back(self) -> None:
        """End a block of `use_mean()`, on this rank alone."""
        if self._swapped is not None:
            self._swapped.swap_back()
        self._swapped = None

    @property
    def _parameters(self) -> list[Tensor]:
        return [p for group in self.param_groups for p in group["params"]]

    @property
    def _ever_trained(self) -> list[Tensor]:
        """Trained now, or before they were frozen: then they have a state."""
        return [p for p in self._parameters if p.requires_grad or self.state.get(p)]
