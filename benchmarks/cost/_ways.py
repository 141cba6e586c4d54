# SPDX-License-Identifier: Apache-2.0
"""One training step in the other ways of training: accumulated, sharded, of a transformer."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from noisescale import NoiseScaleMeter

LEARNING_RATE = 1e-3
MICRO_BATCHES = 4
CHARACTERS = 96


class Plain:
    """A copy of the model in training, one process, `passes` backward passes a step.

    Args:
        model: The copy to train.
        batch_size: Examples of this rank in one pass.
        bf16: Whether the forward pass runs under bfloat16 autocast.
    """

    name = "plain"
    package = "torch"
    measuring: dict[str, Any] | None = None
    passes = MICRO_BATCHES
    row_groups: Tensor | None = None

    def __init__(self, model: nn.Module, batch_size: int, *, bf16: bool = False) -> None:
        self.model = self.wrapped(model)
        self.optimizer = torch.optim.SGD(self.model.parameters(), LEARNING_RATE)
        self.batch_size = batch_size
        self.bf16 = bf16
        self.meter = None
        if self.measuring is not None:
            self.meter = NoiseScaleMeter(self.model, **self.measuring)

    def wrapped(self, model: nn.Module) -> nn.Module:
        return model

    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.mse_loss(self.model(inputs), targets)

    def step(self, inputs: Tensor, targets: Tensor) -> None:
        self.zero_grad()
        for x, y in zip(inputs.chunk(self.passes), targets.chunk(self.passes), strict=True):
            with torch.autocast(inputs.device.type, torch.bfloat16, enabled=self.bf16):
                loss = self.loss(x, y) / self.passes
            if self.meter is None:
                loss.backward()
            else:
                groups = self.row_groups
                self.meter.backward(loss, local_batch_size=self.batch_size, row_groups=groups)
        if self.meter is not None:
            self.meter.step()
        self.optimizer.step()

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()

    def noise_scale(self) -> float:
        return math.nan if self.meter is None else self.meter.noise_scale.value


class Sharded(Plain):
    passes = 1

    def wrapped(self, model: nn.Module) -> nn.Module:
        mesh = init_device_mesh("cuda" if torch.cuda.is_available() else "cpu", (ranks(),))
        for child in model.children():
            if list(child.parameters()):
                fully_shard(child, mesh=mesh)
        return fully_shard(model, mesh=mesh)


class Sequences(Plain):
    passes = 1

    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.model(inputs).flatten(0, 1), targets.flatten())


class InGroups(Sequences):
    """Sequences of which four belong together."""

    row_groups = torch.arange(16) // 4


def ranks() -> int:
    return dist.get_world_size()


def variant(
    base: type[Plain], name: str, measuring: dict[str, Any] | None = None, **attributes: Any
) -> type[Plain]:
    """A way of training that measures, or another plain copy."""
    package = "torch" if measuring is None else "noisescale"
    attributes |= {"name": name, "measuring": measuring, "package": package}
    return type(name, (base,), attributes)


class Block(nn.Module):
    """A transformer layer as most are written: normalised first, one projection to q, k and v."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.qkv(self.norm1(x)).chunk(3, dim=-1)
        )
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


def transformer(width: int, layers: int = 4, heads: int = 4) -> nn.Module:
    blocks = [Block(width, heads) for _ in range(layers)]
    return nn.Sequential(
        nn.Embedding(CHARACTERS, width), *blocks, nn.LayerNorm(width), nn.Linear(width, CHARACTERS)
    )
