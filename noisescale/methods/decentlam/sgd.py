# SPDX-License-Identifier: Apache-2.0
"""What DecentLaM takes from SGD: its options, and the part of a step that is each rank's own.

Parameters of one dtype are in a row, so that one message carries all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import SGD

from noisescale.checks import refuse
from noisescale.methods.adasum.fused import as_real, kinds_of
from noisescale.methods.decentlam.mixing import Rooms
from noisescale.refusal import TypeRefusal

LR_OF_U = "lr_of_u"
"""The key in a parameter group of the learning rate in its u."""


@dataclass
class Flat:
    """Two buffers of the length of all parameters of one dtype and device.

    Args:
        tensors: Dense real tensors of one dtype on one device.
        indices: Their places among all parameters.
        groups: The parameter group of each, in rising order.
    """

    tensors: list[Tensor]
    indices: list[int]
    groups: list[int]

    def __post_init__(self) -> None:
        lengths = [each.numel() for each in self.tensors]
        self.u = self.tensors[0].new_zeros(sum(lengths))
        """u = lr·m, what is taken from the weights in a step."""
        self.z = torch.empty_like(self.u)
        """z = x - lr·gradient, what neighbours get."""
        self.rooms = Rooms()
        self.u_views = self.in_shape(self.u)
        self.z_views = self.in_shape(self.z)
        self.parts: list[tuple[int, slice, slice]] = []
        """The index, the elements and the tensors of each parameter group in the buffers."""
        start = first = 0
        for group in dict.fromkeys(self.groups):
            count = self.groups.count(group)
            stop = start + sum(lengths[first : first + count])
            self.parts.append((group, slice(start, stop), slice(first, first + count)))
            start, first = stop, first + count

    def in_shape(self, buffer: Tensor) -> list[Tensor]:
        """View parts of a buffer of this length in the shapes of the tensors."""
        parts = buffer.split([each.numel() for each in self.tensors])
        return [part.view(each.shape) for part, each in zip(parts, self.tensors, strict=True)]


def flats_of(tensors: Sequence[Tensor], groups: Sequence[int]) -> list[Flat]:
    """Return a `Flat` for each dtype and device."""
    return [
        Flat([tensors[i] for i in indices], indices, [groups[i] for i in indices])
        for indices in kinds_of(tensors)
    ]


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
