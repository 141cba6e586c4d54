# SPDX-License-Identifier: Apache-2.0
"""One state of an optimizer in place of several: the mean of their moments."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from noisescale.collectors.squared_norms import wide_dtype
from noisescale.methods.across_ranks.wrapped_optimizer import WrappedOptimizer


def mean_of_states_(
    optimizer: WrappedOptimizer, states: list[dict[str, Any]], *, counts_own: bool
) -> None:
    """Replace the moments of the optimizer by their mean over the states of all ranks.

    Local steps since the last reduction are forgotten. A moment that only some ranks have (of
    an expert that only they used) is the mean of theirs if rank 0 has it, and is left out
    otherwise. All ranks must call this function.

    Args:
        optimizer: With the state of the checkpoint, the same on all ranks.
        states: More states, read on this rank alone.
        counts_own: Whether the optimizer's present state is one of them: on one rank.
    """
    base = copy.deepcopy(optimizer.state_between_rounds())
    optimizer.load_state_dict(base)
    # On the parameter's device, where its group has a backend: Adam counts steps on the CPU.
    sums = {
        key: torch.zeros_like(value, dtype=wide_dtype(p.device), device=p.device)
        for key, p, value in _moments(optimizer)
    }
    counts = {key: total.new_zeros(1) for key, total in sums.items()}
    for state in [*([base] if counts_own else []), *states]:
        optimizer.load_state_dict(copy.deepcopy(state))
        for key, _, value in _moments(optimizer):
            if key in sums:
                sums[key] += value.to(sums[key].device)
                counts[key] += 1
    optimizer.load_state_dict(base)
    if dist.is_initialized():
        for key in sums:
            dist.all_reduce(sums[key])
            dist.all_reduce(counts[key])
    with torch.no_grad():
        for key, _, value in _moments(optimizer):
            value.copy_((sums[key] / counts[key]).view_as(value))


def _moments(optimizer: WrappedOptimizer) -> Iterator[tuple[tuple[int, str], Tensor, Tensor]]:
    """Yield the state's floating-point tensors: a key common to all ranks, parameter, value."""
    parameters = (p for group in optimizer.param_groups for p in group["params"])
    for index, p in enumerate(parameters):
        for name, value in sorted(optimizer.state.get(p, {}).items()):
            if isinstance(value, Tensor) and value.is_floating_point():
                yield (index, name), p, value
