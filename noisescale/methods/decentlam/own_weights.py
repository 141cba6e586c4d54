# SPDX-License-Identifier: Apache-2.0
"""What validating and saving need of an optimizer whose ranks have weights of their own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from noisescale.methods.across_ranks.mean_weights import MeanWeights, consensus_distance
from noisescale.methods.across_ranks.wrapped_optimizer import WrappedOptimizer


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
