# SPDX-License-Identifier: Apache-2.0
"""Losses that see the rows of other ranks are not measured under DDP, and no others are refused."""

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.nn.functional as with_gradient
from forked_once import Ranks
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from noisescale import NoiseScaleMeter

STEPS = 4


class Gather(torch.autograd.Function):
    """As users write it: SimCLR's, lightly's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, ...]:
        everyone = [torch.zeros_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(everyone, x)
        return tuple(everyone)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        whole = torch.stack(gradients)
        dist.all_reduce(whole)
        return whole[dist.get_rank()]


class Double(torch.autograd.Function):
    """Has nothing to do with other ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return 2 * gradient


def contrastive(z: Tensor, gathered: Tensor) -> Tensor:
    return F.cross_entropy(z @ gathered.T, torch.arange(len(z)) + dist.get_rank() * len(z))


def by_torch(z: Tensor) -> Tensor:
    return contrastive(z, torch.cat(with_gradient.all_gather(z)))


def by_a_function(z: Tensor) -> Tensor:
    return contrastive(z, torch.cat(Gather.apply(z)))


def by_a_functional_collective(z: Tensor) -> Tensor:
    return contrastive(z, functional.all_gather_tensor_autograd(z, 0, dist.group.WORLD))


def of_own_rows(z: Tensor) -> Tensor:
    return F.cross_entropy(Double.apply(z), torch.arange(len(z)) % 3)


def of_gathered_numbers(z: Tensor) -> Tensor:
    """Without a gradient, as a global count of tokens is."""
    counts = [torch.zeros(()) for _ in range(dist.get_world_size())]
    dist.all_gather(counts, torch.tensor(1.0 * len(z)))
    return z.square().sum() / sum(counts)


def measured(loss: Callable[[Tensor], Tensor]) -> tuple[int, int, list[str]]:
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(5, 3))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        meter = NoiseScaleMeter(model, every_n_steps=1)
        torch.manual_seed(1 + dist.get_rank())
        for _ in range(STEPS):
            model.zero_grad()
            meter.backward(loss(model(torch.randn(4, 5))), 4)
            meter.step()
        counts = meter.measured_steps, meter.skipped_steps
        meter.close()
    return *counts, [str(one.message) for one in told if one.category is UserWarning]


GATHERING = [by_torch, by_a_function, by_a_functional_collective]
OTHERS = [of_own_rows, of_gathered_numbers]
two = Ranks(2)
FOUND = {loss: two(partial(measured, loss)) for loss in GATHERING + OTHERS}


@pytest.mark.parametrize("loss", GATHERING)
def test_a_loss_that_gathers_rows_of_other_ranks_is_not_measured(loss: Any) -> None:
    (*counts, told), (*others, nothing) = FOUND[loss]()

    assert counts == others == [0, STEPS]
    assert nothing == []
    (message,) = told
    assert "The loss gathers rows" in message


@pytest.mark.parametrize("loss", OTHERS)
def test_other_losses_are_measured(loss: Any) -> None:
    assert FOUND[loss]() == [(STEPS, 0, [])] * 2
