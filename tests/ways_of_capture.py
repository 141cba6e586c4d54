# SPDX-License-Identifier: Apache-2.0
"""The ways of training of the contract of collectors, and a model that stands still in all of them.

DeepSpeed, tensor parallelism and gradients that nobody averages have test files of their own.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache, partial
from typing import Any, NamedTuple

import devices
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FSDPModule,
    FullyShardedDataParallel,
    ShardingStrategy,
    fully_shard,
)
from torch.nn.parallel import DistributedDataParallel

FEATURES, OUTPUTS = 5, 3


class Net(nn.Module):
    """Something frozen, and a branch that need not be taken."""

    def __init__(self, frozen: Sequence[str] = ()) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(FEATURES, 7)
        self.norm = nn.LayerNorm(7)
        self.side = nn.Linear(7, 7, bias=False)
        self.last = nn.Linear(7, OUTPUTS)
        self.unused = nn.Linear(2, 2).requires_grad_(False)
        for name in frozen:
            self.get_parameter(name).requires_grad_(False)

    def forward(self, x: Tensor, branch: bool = True) -> Tensor:
        h = self.norm(self.first(x)).tanh()
        return self.last(h + self.side(h) if branch else h)


def half_squares(output: Tensor, y: Tensor) -> Tensor:
    return (output - y).square().mean() / 2


def batch(step: int, rank: int, micro: int, rows: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(10_000 * step + 100 * rank + micro)
    x = torch.randn(rows, FEATURES, generator=generator)
    return x, torch.randn(rows, OUTPUTS, generator=generator)


class Way(NamedTuple):
    """A way of training."""

    ranks: int
    part: str
    """What is compared: "rank", "micro_batch" or "half"."""
    small_batch: str
    wrapped: Callable[..., Any]
    """Called with the model, and `unused` where some parameter gets no gradient."""
    every_pass_reduces: bool = False
    impossible: Sequence[str] = ()
    """Cases that the engine itself cannot train."""


def ddp(model: nn.Module, *, unused: bool, **options: Any) -> DistributedDataParallel:
    return DistributedDataParallel(model, find_unused_parameters=unused, **options)


@cache
def mesh(ranks: int) -> Any:
    return init_device_mesh(devices.name, (ranks,))


def sharded(model: Net, *, unused: bool) -> Any:
    fully_shard(model.first, mesh=mesh(2))
    return fully_shard(model, mesh=mesh(2))


def flat(model: Net, *, unused: bool, **options: Any) -> Any:
    options["device_id"] = torch.device(devices.name)
    model.unused = nn.Identity()  # a flat parameter is frozen as a whole
    model.first = FullyShardedDataParallel(model.first, **options)
    return FullyShardedDataParallel(model, **options)


def alone(model: nn.Module, *, unused: bool) -> nn.Module:
    return model


_UNEVEN = ("some are unused on some ranks",)
_PARTIAL = ("some are frozen", "some are asked for")
_fsdp1 = partial(flat, use_orig_params=True)
WAYS: Mapping[str, Way] = {
    "micro-batches": Way(1, "micro_batch", "micro_batch", alone),
    "halves": Way(1, "half", "half", alone),
    "DDP": Way(2, "rank", "rank", ddp),
    "DDP of three ranks": Way(3, "rank", "rank", partial(ddp, bucket_cap_mb=1e-4)),
    "DDP, bucket views": Way(2, "rank", "rank", partial(ddp, gradient_as_bucket_view=True)),
    "DDP, micro-batches": Way(2, "micro_batch", "micro_batch", ddp),
    "FSDP2": Way(2, "micro_batch", "rank", sharded, every_pass_reduces=True, impossible=_UNEVEN),
    "FSDP2, reduced once": Way(2, "rank", "rank", sharded, impossible=_UNEVEN),
    "FSDP1": Way(2, "rank", "rank", _fsdp1),
    "FSDP1, flat parameters": Way(2, "rank", "rank", flat, impossible=_PARTIAL),
    "FSDP1, not sharded": Way(
        2, "rank", "rank", partial(_fsdp1, sharding_strategy=ShardingStrategy.NO_SHARD)
    ),
    "FSDP1, every pass": Way(2, "micro_batch", "rank", _fsdp1, every_pass_reduces=True),
}


def not_averaging(model: nn.Module, way: Way, *, last: bool) -> AbstractContextManager[None]:
    """For a pass that is not the last of its step: where gradients are only added up."""
    return reducing(model, last or way.every_pass_reduces)


def reducing(model: Any, on: bool) -> AbstractContextManager[None]:
    """For a pass that reduces gradients, or only adds to them."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(on)
    return model.no_sync() if not on and hasattr(model, "no_sync") else nullcontext()
