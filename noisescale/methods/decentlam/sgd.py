# SPDX-License-Identifier: Apache-2.0
"""What DecentLaM takes from SGD: its options, and the part of a step that is each rank's own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import SGD

from noisescale.checks import refuse
from noisescale.methods.adasum.fused import as_real
from noisescale.methods.decentlam.flat import Flat
from noisescale.refusal import TypeRefusal

LR_OF_U = "lr_of_u"
"""The key in a parameter group of the learning rate in its u."""


class Settings(NamedTuple):
    """The settings of a parameter group in one step."""

    lr: float
    momentum: float
    weight_decay: float
    kept: float
    """What u is multiplied by: the momentum, times lr over the learning rate in u."""


def check_sgd(optimizer: object) -> None:
    """Raise a TypeError unless the optimizer is torch's SGD itself."""
    if type(optimizer) is not SGD:
        remedy = (
            "DecentLaM is a way of momentum SGD: pass `torch.optim.SGD(model.parameters(), lr=0.1,"
            " momentum=0.9)`. `AdasumOptimizer` takes any optimizer."
        )
        got = type(optimizer).__name__
        refuse("optimizer", "be a torch.optim.SGD", got, remedy, error=TypeRefusal)


def check_sgd_groups(groups: Sequence[dict[str, Any]], largest_momentum: float) -> None:
    """Raise a ValueError if a parameter group has options that DecentLaM has not."""
    for group in groups:
        for name in ("nesterov", "dampening", "maximize", "differentiable"):
            if group.get(name):
                off = "0" if name == "dampening" else "False"
                remedy = f"DecentLaM is defined without: leave `{name}` out of the SGD."
                refuse(name, f"be {off}", repr(group[name]), remedy)
        if not 0 <= group["momentum"] < 1:
            remedy = "Pass 0.9, or 0 for decentralized SGD without momentum."
            refuse("momentum", "be at least 0 and below 1", repr(group["momentum"]), remedy)
        if group["momentum"] >= largest_momentum:
            needed = f"be below {largest_momentum:.3g} with this `topology`"
            remedy = (
                "The matrix is not symmetric, and with more momentum it drives ranks apart. Pass"
                " the symmetric one: (W + W.T)/2."
            )
            refuse("momentum", needed, repr(group["momentum"]), remedy)


def rescale(group: dict[str, Any], frozen: Sequence[Tensor] = ()) -> Settings:
    """Return the settings of a step, and note in the group that u now has its learning rate.

    u = lr·m, so it is scaled as the learning rate is. After a learning rate of 0 it stays as it is.

    Args:
        group: A parameter group.
        frozen: u of its frozen parameters, which no step scales: it is done here.
    """
    lr, momentum = float(group["lr"]), float(group["momentum"])
    before = group.get(LR_OF_U, lr)
    group[LR_OF_U] = lr
    factor = lr / before if before else 1.0
    if factor != 1:
        for u in frozen:
            u.mul_(factor)
    return Settings(lr, momentum, float(group["weight_decay"]), momentum * factor)


def local_step_(
    flat: Flat,
    parameters: Sequence[Tensor],
    gradients: Sequence[Tensor | None],
    settings: Sequence[Settings],
) -> None:
    """Let u be kept·u + lr·(gradient + decay·x), and z what plain SGD would make of x."""
    torch._foreach_copy_(flat.z_views, list(parameters))
    for group, elements, tensors in flat.parts:
        lr, _, decay, kept = settings[group]
        u = flat.u[elements]
        u.mul_(kept) if kept else u.zero_()
        some = zip(flat.u_views[tensors], flat.z_views[tensors], gradients[tensors], strict=True)
        known = [(u, z, _dense(gradient)) for u, z, gradient in some if gradient is not None]
        if not known:
            continue
        us, zs, found = (list(each) for each in zip(*known, strict=True))
        if decay:
            torch._foreach_add_(us, zs, alpha=lr * decay)
            torch._foreach_mul_(zs, 1 - lr * decay)
        torch._foreach_add_(us, found, alpha=lr)
        torch._foreach_add_(zs, found, alpha=-lr)


def _dense(gradient: Tensor) -> Tensor:
    return as_real(gradient.to_dense() if gradient.layout != torch.strided else gradient)
