# SPDX-License-Identifier: Apache-2.0
"""A small net with rows of its own for each rank and step, and what a call raises."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

FEATURES = 5


def model() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(FEATURES, 4), nn.Tanh(), nn.Linear(4, 1))


def this_rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def loss_of(net: nn.Module, step: int, rank: int | None = None) -> Tensor:
    rank = this_rank() if rank is None else rank
    x = torch.randn(8, FEATURES, generator=torch.Generator().manual_seed(100 * rank + step))
    return (net(x) - x.sum(1, keepdim=True)).square().mean()


def sgd(net: nn.Module, **options: Any) -> torch.optim.SGD:
    return torch.optim.SGD(net.parameters(), **{"lr": 0.05, "momentum": 0.9, **options})


def adam(net: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(net.parameters(), lr=0.01)


def steps(net: nn.Module, optimizer: Any, first: int, last: int, rank: int | None = None) -> None:
    for step in range(first, last):
        optimizer.zero_grad()
        loss_of(net, step, rank).backward()
        optimizer.step()


def closure_of(optimizer: Any, net: nn.Module) -> Callable[[], Tensor]:
    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(net, 0)
        loss.backward()
        return loss

    return closure


def values(net: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in net.parameters()]


def with_scaler(optimizer: Any, net: nn.Module, *, unscale: bool) -> list[list[Tensor]]:
    """The weights after each of three steps; in the second the loss of rank 1 is infinite."""
    scaler, found = torch.amp.GradScaler("cpu", init_scale=1024.0), []
    for step in range(3):
        optimizer.zero_grad()
        loss = loss_of(net, step)
        if step == 1 and this_rank() == 1:
            loss = loss * torch.inf
        scaler.scale(loss).backward()
        if unscale:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        found.append(values(net))
    return found


def error_of(call: Callable[[], object]) -> Exception:
    try:
        call()
    except (TypeError, ValueError, RuntimeError) as error:
        return error
    return AssertionError("there was no error")


def equal(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(map(torch.equal, one, other))
