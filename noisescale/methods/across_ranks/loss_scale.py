# SPDX-License-Identifier: Apache-2.0
"""Loss scalers of ranks: a step that one rank cannot take is left out by all."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer


def not_finite_anywhere(
    optimizer: Optimizer, trained: Sequence[Tensor], groups: Sequence[dist.ProcessGroup | None]
) -> bool:
    """Return whether a loss scaler found a gradient that is not finite on any rank; else unscale.

    Args:
        optimizer: A scaler of `torch.amp` has left in it what it found, and its scale.
        trained: The parameters whose gradients are unscaled.
        groups: The ranks that step together.
    """
    found_inf, scale = getattr(optimizer, "found_inf", None), getattr(optimizer, "grad_scale", None)
    if found_inf is None:
        return False
    found = found_inf.detach().clone().reshape(1)
    for group in groups:
        dist.all_reduce(found, dist.ReduceOp.MAX, group=group)
    if found.item():
        return True
    if scale is not None:
        gradients = [p.grad for p in trained if p.grad is not None]
        torch._foreach_div_(gradients, float(scale))
    return False
