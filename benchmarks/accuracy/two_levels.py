# SPDX-License-Identifier: Apache-2.0
"""The noise between prompts and between the completions of one prompt, against brute force.

A small policy stands still. Of each prompt, all actions' gradients are known, so that the truth is
drawn from as many groups of completions as it takes: W(n), the variance of the mean gradient of n
completions of one prompt, and S_between, the variance of its mean between prompts. The noise scale
between is S_between/|G|² prompts, and within n·W(n)/|G|² completions. Each look is a run of its
own, whose 95 % intervals hold the truth or do not.

    python benchmarks/accuracy/two_levels.py [--looks 80] [--only NAME] [--smoke]

Results are saved as they come, and a later call goes on from there.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

sys.path.append(str(Path(__file__).resolve().parents[2]))
from benchmarks.lib.ranks import on_ranks
from benchmarks.lib.results import saved_rows, write_results
from noisescale import NoiseScaleMeter
from noisescale.estimation.levels import Levels

NAME = "accuracy/two_levels"
FEATURES, ACTIONS = 6, 8
PROMPTS, STEPS = 16, 100
TRUTH_PROMPTS, TRUTH_DRAWS = 40_000, 30

UNEQUAL = (1, 2, 3, 5, 8, 4, 4, 5)
"""Completions of the prompts of a batch, twice over."""


@dataclass(frozen=True)
class Setting:
    """A way of drawing and of training."""

    name: str
    advantage: str = "mean"
    sizes: tuple[int, ...] = (4,)
    """Completions of each prompt, in turn."""
    prompts: int = PROMPTS
    """Of a rank's micro-batch."""
    passes: int = 1
    ranks: int = 1
    shuffled: bool = False
    """Whether completions are shuffled before micro-batches are made of them."""
    rewards: str = "random"
    """"random"; "of prompts": the same for all completions of a prompt, without a baseline."""


SETTINGS = [
    *(
        Setting(f"{advantage}, {n}", advantage, (n,))
        for advantage in ("mean", "leave-one-out", "GRPO")
        for n in (2, 4, 8)
    ),
    Setting("unequal groups", "none", UNEQUAL),
    Setting("2 ranks", ranks=2),
    Setting("2 ranks, 2 micro-batches each", ranks=2, passes=2, prompts=8),
    Setting("4 micro-batches", passes=4, prompts=8),
    Setting("4 micro-batches, shuffled", passes=4, prompts=8, shuffled=True),
    Setting("prompts all alike", rewards="alike"),
    Setting("rewards of the prompt", "none", rewards="of prompts"),
]


class Batch(NamedTuple):
    inputs: Tensor
    actions: Tensor
    advantages: Tensor
    groups: Tensor


def policy() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(FEATURES, 16), nn.Tanh(), nn.Linear(16, ACTIONS))


def prompts(setting: Setting, number: int, generator: torch.Generator) -> Tensor:
    drawn = torch.randn(number, FEATURES, generator=generator) + 0.5
    return torch.full_like(drawn, 0.5) if setting.rewards == "alike" else drawn


def chances(inputs: Tensor) -> Tensor:
    """How likely each action is rewarded, shape (rows, actions)."""
    return torch.sigmoid(inputs[:, :1] * torch.linspace(-2, 2, ACTIONS))


def advantages_of(setting: Setting, rewards: Tensor) -> Tensor:
    """Of groups of equal size, shape (..., n)."""
    n = rewards.shape[-1]
    if setting.advantage == "none":
        return rewards - 0.25
    centred = rewards - rewards.mean(-1, keepdim=True)
    if setting.advantage == "leave-one-out":
        return centred * n / (n - 1)
    if setting.advantage == "GRPO":
        return centred / (rewards.std(-1, keepdim=True) + 1e-4)
    return centred


def draw(setting: Setting, model: nn.Module, generator: torch.Generator) -> Batch:
    sizes = torch.tensor([setting.sizes[k % len(setting.sizes)] for k in range(setting.prompts)])
    groups = torch.arange(setting.prompts).repeat_interleave(sizes)
    inputs = prompts(setting, setting.prompts, generator)[groups]
    with torch.no_grad():
        actions = torch.multinomial(model(inputs).softmax(1), 1, generator=generator)[:, 0]
    if setting.rewards == "of prompts":  # and one action, so that completions are alike
        first = torch.cat([torch.zeros(1, dtype=torch.long), sizes.cumsum(0)[:-1]])
        actions = actions[first][groups]
        rewards = chances(inputs)[:, 3]
    else:
        of_rows = chances(inputs).gather(1, actions[:, None])[:, 0]
        rewards = (torch.rand(len(of_rows), generator=generator) < of_rows).float()
    of_groups = [advantages_of(setting, some) for some in rewards.split(sizes.tolist())]
    return Batch(inputs, actions, torch.cat(of_groups), groups)


def shuffle(batches: Sequence[Batch], generator: torch.Generator) -> list[Batch]:
    whole = Batch(*map(torch.cat, zip(*batches, strict=True)))
    order = torch.randperm(len(whole.groups), generator=generator)
    return [Batch(*(x[part] for x in whole)) for part in order.chunk(len(batches))]


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    """A mean over all completions."""
    logp = model(batch.inputs).log_softmax(1).gather(1, batch.actions[:, None])[:, 0]
    return -(logp * batch.advantages).mean()


@cache
def truth(setting: Setting) -> tuple[float, float, float]:
    """S_between and n·W(n), over |G|², and the latter over the former."""
    model, generator = policy(), torch.Generator().manual_seed(1)
    parameters = {name: p.detach() for name, p in model.named_parameters()}

    def logp(some: dict[str, Tensor], x: Tensor) -> Tensor:
        return torch.func.functional_call(model, some, (x,)).log_softmax(0)

    of_actions = torch.func.vmap(torch.func.jacrev(logp), (None, 0))
    n = setting.sizes[0] if len(setting.sizes) == 1 else 1
    within, means, squares, number = 0.0, torch.zeros(()), 0.0, 0
    for _ in range(TRUTH_PROMPTS // 1000):
        inputs = prompts(setting, 1000, generator)
        jacobian = of_actions(parameters, inputs)
        of_each = torch.cat([x.flatten(2) for x in jacobian.values()], 2)  # prompts, actions, D
        likely = model(inputs).softmax(1).detach()
        actions = torch.multinomial(likely, n * TRUTH_DRAWS, replacement=True, generator=generator)
        rewards = (
            torch.rand(actions.shape, generator=generator) < chances(inputs).gather(1, actions)
        ).float()
        if setting.rewards == "of prompts":
            actions = actions[:, :1].expand_as(actions)
            rewards = chances(inputs)[:, 3:4].expand_as(actions)
        weighed = advantages_of(setting, rewards.view(1000, TRUTH_DRAWS, n))
        coefficients = torch.zeros(1000, TRUTH_DRAWS, ACTIONS)
        coefficients.scatter_add_(2, actions.view(1000, TRUTH_DRAWS, n), -weighed / n)
        h = torch.einsum("pra,pad->prd", coefficients, of_each).double()
        means = means + h.mean(1).sum(0)
        within += h.var(1).sum().item()
        squares += h.mean(1).square().sum().item()
        number += 1000
    within /= number
    mean = means / number
    of_means = squares / number - mean.square().sum().item()
    between = of_means - within / TRUTH_DRAWS
    signal = mean.square().sum().item() - of_means / number
    return between / signal, n * within / signal, n * within / between


def run(setting: Setting, seed: int, steps: int) -> Levels:
    """Measure every step of a run at weights that stay."""
    rank = torch.distributed.get_rank() if setting.ranks > 1 else 0
    model, generator = policy(), torch.Generator().manual_seed(1000 + 10 * seed + rank)
    trained: nn.Module = DistributedDataParallel(model) if setting.ranks > 1 else model
    meter = NoiseScaleMeter(trained, window=10**6, every_n_steps=1)
    for _ in range(steps):
        model.zero_grad()
        batches = [draw(setting, model, generator) for _ in range(setting.passes)]
        named = [batch._replace(groups=batch.groups + 1000 * k) for k, batch in enumerate(batches)]
        if setting.shuffled:
            named = shuffle(named, generator)
        for k, batch in enumerate(named):
            rows = len(batch.groups)
            last = k == setting.passes - 1
            if isinstance(trained, DistributedDataParallel):
                trained.require_backward_grad_sync = last
            meter.backward(
                loss_of(trained, batch) / setting.passes,
                rows,
                row_groups=batch.groups,
                weight=torch.ones(rows),
            )
        meter.step()
    levels = meter.levels
    assert levels is not None
    assert meter.measured_steps >= steps - 2
    meter.close()
    return levels


def runs(setting: Setting, seeds: Sequence[int], steps: int) -> list[Levels]:
    return [run(setting, seed, steps) for seed in seeds]


def row_of(setting: Setting, looks: int, steps: int = STEPS) -> dict[str, Any]:
    torch.set_num_threads(1)
    seeds = range(looks)
    if setting.ranks > 1:
        found = on_ranks(setting.ranks, runs, setting, seeds, steps, start="spawn")[0]
    else:
        found = runs(setting, seeds, steps)
    row: dict[str, Any] = {"setting": setting.name, "looks": looks, "steps": steps}
    of_truth = dict(zip(("between", "within", "balance"), truth(setting), strict=True))
    for name, true in of_truth.items():
        bounds = [getattr(levels, name) for levels in found]
        values = np.array([x.value for x in bounds])
        row[name] = {
            "truth": true,
            "median": float(np.nanmedian(values)),
            "holds": float(np.mean([x.low <= true <= x.high for x in bounds])),
            "resolved": float(np.mean([np.isfinite(x.high) for x in bounds])),
        }
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--looks", type=int, default=80)
    parser.add_argument("--only", choices=[each.name for each in SETTINGS])
    parser.add_argument("--smoke", action="store_true", help="a few steps, unsaved")
    options = parser.parse_args()
    if options.smoke:
        print(row_of(SETTINGS[1], 2, steps=8))
        return
    rows = saved_rows(NAME)
    for setting in SETTINGS:
        done = any(row["setting"] == setting.name for row in rows)
        if done or options.only not in (None, setting.name):
            continue
        rows.append(row_of(setting, options.looks))
        print(rows[-1], flush=True)
        write_results(NAME, rows, quiet=True)


if __name__ == "__main__":
    main()
