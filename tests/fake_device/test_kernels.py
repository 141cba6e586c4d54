# SPDX-License-Identifier: Apache-2.0
"""How many kernels measuring launches: no more for large models than for small ones."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import Parameter
from torch.testing._internal.distributed.fake_pg import FakeStore

from fake_device.transfers import Transfers
from noisescale import NoiseScaleMeter
from noisescale.collectors.gradient_norms import GradientNorms, Piece
from noisescale.methods.inner_product.momentum import MomentumDirection

SMALL, LARGE = 2**8, 2**22
"""Elements. Cut as on the CPU, the large one would be 32 dot products."""


def along_momentum(numbers: Sequence[int]) -> int:
    """Kernels that sum up norms along Adam's momentum, of parameters of so many elements."""
    parameters = [Parameter(torch.ones(number, device="fake")) for number in numbers]
    optimizer = torch.optim.Adam(parameters)
    for p in parameters:
        p.grad = torch.full_like(p, 0.5)
    optimizer.step()
    named = [(str(i), p) for i, p in enumerate(parameters)]
    norms = GradientNorms(named, extra=[MomentumDirection(optimizer, parameters)])
    pieces = [Piece(i, p.grad) for i, p in enumerate(parameters) if p.grad is not None]
    norms.sums(norms.compute(pieces))  # what is asked of the device once
    with Transfers() as transfers:
        norms.sums(norms.compute(pieces))
    return transfers.launched


def test_large_and_many_gradients_take_no_more_kernels_than_small_and_few_ones() -> None:
    assert along_momentum([LARGE]) <= along_momentum([SMALL])
    assert along_momentum([SMALL] * 50) == along_momentum([SMALL] * 5)


def of_shards(ranks: int, *, measured: bool) -> int:
    """In a step of one of so many ranks, whose others are not there."""
    with fake_ranks(ranks):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4))).to("fake")
        fully_shard(model, mesh=init_device_mesh("fake", (ranks,)))
        groups = {"weights": "weight", "biases": "bias"}
        meter = NoiseScaleMeter(model, every_n_steps=1, groups=groups) if measured else None
        for _ in range(3):
            with Transfers() as transfers:
                loss = model(torch.ones(4, 64, device="fake")).square().mean()
                if meter is None:
                    loss.backward()
                else:
                    meter.backward(loss, 4)
                    meter.step()
            model.zero_grad()
    return transfers.launched


@contextmanager
def fake_ranks(number: int) -> Iterator[None]:
    """This process is the first of so many ranks, whose collectives do nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=number)
    try:
        yield
    finally:
        dist.destroy_process_group()


def test_more_ranks_take_no_more_kernels() -> None:
    """FSDP lays out its buffer in a row for each rank, in which each group has several pieces."""
    few, many = (
        of_shards(ranks, measured=True) - of_shards(ranks, measured=False) for ranks in (2, 64)
    )
    assert few == many
