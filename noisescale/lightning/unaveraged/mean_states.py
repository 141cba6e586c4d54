# SPDX-License-Identifier: Apache-2.0
"""One state of an optimizer in place of several: the mean of their moments."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from noisescale.large_batch.across_ranks.wrapped_optimizer import WrappedOptimizer


def mean_of_states_(
    optimizer: WrappedOptimizer, states: list[dict[str, Any]], *, counts_own: bool
) -> None:
    """Replace the moments of the optimizer by their mean over the states of all ranks.

    Local steps since the last reduction are forgotten. All ranks must call this function.

    Args:
        optimizer: With the state of the checkpoint, the same on all ranks.
        states: More states, read on this rank alone.
        counts_own: Whether the optimizer's present state is one of them: on one rank.
    """
    base = copy.deepcopy(optimizer.state_between_rounds())
    optimizer.load_state_dict(base)
    sums = [torch.zeros_like(each, dtype=torch.float64) for each in _moments(optimizer)]
    count = torch.zeros(1, dtype=torch.float64, device=sums[0].device if sums else "cpu")
    for state in [*([base] if counts_own else []), *states]:
        optimizer.load_state_dict(copy.deepcopy(state))
        for total, each in zip(sums, _moments(optimizer), strict=True):
            total += each
        count += 1
    optimizer.load_state_dict(base)
    if dist.is_initialized():
        for total in [*sums, count]:
            dist.all_reduce(total)
    with torch.no_grad():
        for each, total in zip(_moments(optimizer), sums, strict=True):
            each.copy_(total / count.item())


def _moments(optimizer: WrappedOptimizer) -> Iterator[Tensor]:
    """All floating-point tensors of the state, in an order that all ranks share."""
    for group in optimizer.param_groups:
        for p in group["params"]:
            for _, value in sorted(optimizer.state.get(p, {}).items()):
                if isinstance(value, Tensor) and value.is_floating_point():
                    yield value
