# SPDX-License-Identifier: Apache-2.0
"""A small policy with rewards of 0 and 1, and the noise between and within its prompts.

The truth is the variance of many batches' gradients, of the same prompts and of others.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

FEATURES, ACTIONS = 5, 6


class Batch(NamedTuple):
    inputs: Tensor
    actions: Tensor
    advantages: Tensor
    groups: Tensor


class Truth(NamedTuple):
    between: float
    within: float
    rows_per_group: float


def policy() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, ACTIONS))


def inputs_of(groups: Tensor, generator: torch.Generator) -> Tensor:
    prompts = torch.randn(int(groups.max()) + 1, FEATURES, generator=generator) + 0.5
    return prompts[groups]


def draw(groups: Tensor, generator: torch.Generator, *, inputs: Tensor | None = None) -> Batch:
    """Completions and their rewards less a constant: no row depends on another."""
    inputs = inputs_of(groups, generator) if inputs is None else inputs
    with torch.no_grad():
        likely = policy()(inputs).softmax(1)
    actions = torch.multinomial(likely, 1, generator=generator)[:, 0]
    chance = torch.sigmoid(inputs[:, 0] * torch.linspace(-2, 2, ACTIONS)[actions])
    rewards = (torch.rand(len(chance), generator=generator) < chance).float()
    return Batch(inputs, actions, rewards - 0.3, groups)


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    logp = model(batch.inputs).log_softmax(1).gather(1, batch.actions[:, None])[:, 0]
    return -(logp * batch.advantages).mean()


def truth(groups: Tensor, batches: int = 1500) -> Truth:
    """By gradients of batches: of other prompts each time, and twice of the same."""
    generator = torch.Generator().manual_seed(1)
    model = policy()

    def gradient(batch: Batch) -> Tensor:
        found = torch.autograd.grad(loss_of(model, batch), list(model.parameters()))
        return torch.cat([g.flatten() for g in found]).double()

    first, second = [], []
    for _ in range(batches):
        inputs = inputs_of(groups, generator)
        first.append(gradient(draw(groups, generator, inputs=inputs)))
        second.append(gradient(draw(groups, generator, inputs=inputs)))
    a, b = torch.stack(first), torch.stack(second)
    of_batch = ((a.var(0) + b.var(0)) / 2).sum().item()
    within = (a - b).square().sum(1).mean().item() / 2
    mean = torch.cat([a, b]).mean(0).square().sum().item()
    signal = mean - (of_batch - within / 2) / batches
    sizes = torch.bincount(groups).double()
    rows, of_groups = len(groups), (sizes / len(groups)).square().sum().item()
    return Truth((of_batch - within) / of_groups / signal, within * rows / signal, rows * of_groups)
