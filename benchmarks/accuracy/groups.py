# SPDX-License-Identifier: Apache-2.0
"""Batches of groups of rows: halves of rows and halves of groups against independent batches.

A small network stands still. The truth is the variance of the gradients of independent batches. Of
each loss there are halves of rows, even where the package refuses these, and halves of whole groups
(`row_groups`). Noise scales are in rows.

    python benchmarks/accuracy/groups.py --out benchmarks/results/accuracy/groups.json
"""

from __future__ import annotations

import argparse
import json
import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from noisescale import NoiseScaleMeter
from noisescale.collectors.halves.apart import RowIndependence

ROWS, WIDTH, CLASSES = 64, 8, 10

Batch = tuple[Tensor, ...]


class Case(NamedTuple):
    """A loss over groups of rows."""

    draw: Callable[[torch.Generator, nn.Module], Batch]
    loss: Callable[[nn.Module, Batch], Tensor]
    groups: Tensor


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 32), nn.Tanh(), nn.Linear(32, CLASSES))


def inputs(generator: torch.Generator, rows: int) -> Tensor:
    return torch.randn(rows, WIDTH, generator=generator) + 0.5


def completions(generator: torch.Generator, model: nn.Module) -> Batch:
    """Eight actions of the policy for each prompt, and their rewards."""
    x = inputs(generator, ROWS // 8).repeat_interleave(8, 0)
    with torch.no_grad():
        actions = torch.multinomial(model(x).softmax(1), 1, generator=generator)[:, 0]
    right = x[:, 0] * torch.linspace(-1, 1, CLASSES)[actions]
    return x, actions, right + 0.5 * torch.randn(ROWS, generator=generator)


def policy_gradient(model: nn.Module, batch: Batch) -> Tensor:
    """GRPO's: rewards are normalized within each group."""
    x, actions, rewards = batch
    of_groups = rewards.view(-1, 8)
    centred = of_groups - of_groups.mean(1, keepdim=True)
    advantages = (centred / (of_groups.std(1, keepdim=True) + 1e-4)).flatten()
    logp = model(x).log_softmax(1).gather(1, actions[:, None])[:, 0]
    return -((logp - logp.detach()).exp() * advantages).mean()


def pairs(generator: torch.Generator, model: nn.Module) -> Batch:
    """Two noisy copies side by side, alike or not."""
    first = inputs(generator, ROWS // 2)
    alike = torch.rand(ROWS // 2, generator=generator) < 0.5
    second = torch.where(alike[:, None], first, inputs(generator, ROWS // 2))
    both = torch.stack([first, second], 1).flatten(0, 1)
    return both + 0.3 * torch.randn(both.shape, generator=generator), alike


def siamese(model: nn.Module, batch: Batch) -> Tensor:
    z = model(batch[0])
    distance = (z[0::2] - z[1::2]).norm(dim=1)
    near = distance.square()
    return torch.where(batch[1], near, F.relu(1 - distance).square()).mean()


def answers(generator: torch.Generator, model: nn.Module) -> Batch:
    """The chosen answers, then the rejected ones."""
    prompt = inputs(generator, ROWS // 2)
    noise = 0.7 * torch.randn(2, *prompt.shape, generator=generator)
    noise[0, :, 1] += 0.3
    return ((prompt + noise).flatten(0, 1),)


def reward_pairs(model: nn.Module, batch: Batch) -> Tensor:
    chosen, rejected = model(batch[0])[:, 0].chunk(2)
    return -F.logsigmoid(chosen - rejected).mean()


CASES = {
    "GRPO, groups of 8": Case(completions, policy_gradient, torch.arange(ROWS) // 8),
    "siamese pairs": Case(pairs, siamese, torch.arange(ROWS) // 2),
    "reward pairs by chunk(2)": Case(answers, reward_pairs, torch.arange(ROWS) % (ROWS // 2)),
}


def truth(case: Case, batches: int) -> dict[str, float]:
    """By independent batches; with the standard error of the noise scale's logarithm."""
    model, generator = network(), torch.Generator().manual_seed(1)
    gradients = torch.stack(
        [
            torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))])
            for loss in (case.loss(model, case.draw(generator, model)) for _ in range(batches))
        ]
    ).double()

    def noise_scale(some: Tensor) -> float:
        noise = some.var(0).sum().item()
        return ROWS * noise / (some.mean(0).square().sum().item() - noise / len(some))

    logs = torch.tensor([noise_scale(part) for part in gradients.chunk(10)]).log()
    trace = ROWS * gradients.var(0).sum().item()
    error = logs.std().item() / 10**0.5
    return {"noise_scale": noise_scale(gradients), "log_error": error, "noise_trace": trace}


def trained(case: Case, steps: int, seed: int, *, grouped: bool) -> NoiseScaleMeter:
    """The meter of a model whose weights stay as they are."""
    model, generator = network(), torch.Generator().manual_seed(2 + seed)
    meter = NoiseScaleMeter(model, window=10**6, every_n_steps=1, small_batch="half")
    for _ in range(steps):
        model.zero_grad()
        loss = case.loss(model, case.draw(generator, model))
        meter.backward(loss, ROWS, row_groups=case.groups if grouped else None)
        meter.step()
    return meter


def halves(case: Case, steps: int, seeds: int, *, grouped: bool) -> dict[str, Any]:
    """By the halves of each batch; with the standard error between seeds."""
    moments = []
    measured = 0
    for seed in range(seeds):
        meter = trained(case, steps, seed, grouped=grouped)
        moments.append((meter.sums.mean.noise_trace, meter.sums.mean.grad_sq_norm))
        measured += meter.measured_steps
    trace, signal = torch.tensor(moments).T
    error = (trace / signal).log().std().item() / seeds**0.5
    return {
        "noise_scale": (trace.mean() / signal.mean()).item(),
        "log_error": error if math.isfinite(error) else None,
        "noise_trace": trace.mean().item(),
        "steps": measured,
    }


def refused(case: Case) -> bool:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return trained(case, 3, 0, grouped=False).measured_steps == 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--truth", type=int, default=20_000, help="independent batches")
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args()
    torch.set_num_threads(1)
    results: dict[str, Any] = {}
    for name, case in CASES.items():
        results[name] = {"truth": truth(case, options.truth)}
        with patch.multiple(
            RowIndependence, by_name=lambda *_, **__: "", judge_derivatives=lambda *_: ""
        ):
            results[name]["halves of rows"] = halves(
                case, options.steps, options.seeds, grouped=False
            )
        results[name]["halves of rows are refused"] = refused(case)
        results[name]["halves of groups"] = halves(case, options.steps, options.seeds, grouped=True)
        print(name, json.dumps(results[name], indent=1), flush=True)
    if options.out is not None:
        options.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
