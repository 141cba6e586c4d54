# SPDX-License-Identifier: Apache-2.0
"""The workloads of run.py: four trainings, and three variants of each.

A variant changes the width of the model, its initialisation, or the noise in the labels. What
reaches the goal of a workload only with the settings of that workload misses it in a variant.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.lib.workloads import CONTEXT, Batch, characters, digits, mnist, perceptron

NOISY = 0.2
"""Share of the labels that are drawn anew in the variant of noisy labels."""


@dataclass(frozen=True)
class Problem:
    """What is trained, and for how long."""

    name: str
    unit: str
    """Of a batch: examples or sequences."""
    budget: float
    """Most modelled seconds of a training on 8 devices."""
    model: Callable[[], nn.Module]
    data: Callable[[], tuple[Batch, Batch]]
    variant_of: str = ""
    weights_times: float = 1.0
    """What the weights (not the biases) are multiplied by at the start."""
    noisy_labels: float = 0.0

    def seeded_model(self, seed: int) -> nn.Module:
        torch.manual_seed(seed)
        model = self.model()
        with torch.no_grad():
            for p in model.parameters():
                if p.ndim > 1 and self.weights_times != 1:
                    p.mul_(self.weights_times)
        return model

    def draw(self, size: int, generator: torch.Generator) -> Batch:
        """Return a batch, drawn with replacement."""
        x, y = self.data()[0]
        chosen = torch.randint(len(x), (size,), generator=generator)
        labels = y[chosen]
        if self.noisy_labels:  # each example has one label, however often it is drawn
            noisy = _noise_of(self.data)
            wrong = noisy.share[chosen] < self.noisy_labels
            labels = torch.where(_alike(wrong, labels), noisy.labels[chosen], labels)
        return x[chosen], labels

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        x, y = batch
        return nn.functional.cross_entropy(model(x).flatten(0, -2), y.flatten())

    @torch.no_grad()
    def held_out_loss(self, model: nn.Module) -> float:
        return float(self.loss(model, self.data()[1]))


@dataclass(frozen=True)
class Regression(Problem):
    """Least squares with a known answer: y = x·w* + noise, the variance of x_k is 1/k.

    Batches are drawn anew, so that the loss beyond the noise is known: ½ Σ (w_k - w*_k)²/k.
    """

    inputs: int = 64
    noise: float = 0.5

    def draw(self, size: int, generator: torch.Generator) -> Batch:
        x = torch.randn(size, self.inputs, generator=generator) * self._variances.sqrt()
        noise = self.noise * torch.randn(size, generator=generator)
        return x, x @ self.answer + noise

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        x, y = batch
        return (model(x).squeeze(-1) - y).square().mean() / 2

    @torch.no_grad()
    def held_out_loss(self, model: nn.Module) -> float:
        (weights,) = (p.flatten() for p in model.parameters())
        return float((self._variances * (weights - self.answer).square()).sum() / 2)

    @property
    def answer(self) -> Tensor:
        return torch.randn(self.inputs, generator=torch.Generator().manual_seed(1))

    @property
    def _variances(self) -> Tensor:
        return 1 / torch.arange(1.0, self.inputs + 1)


@dataclass(frozen=True)
class _Noise:
    share: Tensor
    labels: Tensor


@cache
def _noise_of(data: Callable[[], tuple[Batch, Batch]]) -> _Noise:
    """A number and another label for each example."""
    (x, y), _ = data()
    generator = torch.Generator().manual_seed(7)
    if y.ndim == 1:
        drawn = torch.randint(int(y.max()) + 1, y.shape, generator=generator)
    else:  # the sequences are views of one text, so the labels of another one stand in
        drawn = y[torch.randint(len(y), (len(y),), generator=generator)]
    return _Noise(torch.rand(len(x), generator=generator), drawn)


def _alike(mask: Tensor, labels: Tensor) -> Tensor:
    return mask.reshape(-1, *[1] * (labels.ndim - 1))


def linear(inputs: int) -> nn.Module:
    """Linear in its inputs, from normal weights."""
    model = nn.Linear(inputs, 1, bias=False)
    nn.init.normal_(model.weight)
    return model


def small_transformer(width: int) -> nn.Module:
    """The example's, with one layer over 65 characters."""
    from char_transformer import CharTransformer

    return CharTransformer(65, CONTEXT, width=width, layers=1, heads=4)


def _images(name: str, data: Any, inputs: int, budget: float) -> list[Problem]:
    return _with_variants(
        Problem(name, "examples", budget, lambda: perceptron(inputs, 64), data),
        width={"model": lambda: perceptron(inputs, 256)},
        init={"weights_times": 2.0},
        labels={"noisy_labels": NOISY},
    )


def _with_variants(base: Problem, **variants: Mapping[str, Any]) -> list[Problem]:
    return [base] + [
        replace(base, name=f"{base.name}_{what}", variant_of=base.name, **changed)
        for what, changed in variants.items()
    ]


def _nothing() -> tuple[Batch, Batch]:
    raise RuntimeError("The regression draws its batches.")


PROBLEMS = {
    problem.name: problem
    for problem in (
        *_with_variants(
            Regression("regression", "examples", 10.0, lambda: linear(64), _nothing),
            width={"model": lambda: linear(256), "inputs": 256},
            init={"weights_times": 4.0},
            labels={"noise": 2.0},
        ),
        *_images("digits", digits, 64, 10.0),
        *_images("mnist", mnist, 784, 15.0),
        *_with_variants(
            Problem("characters", "sequences", 15.0, lambda: small_transformer(32), characters),
            width={"model": lambda: small_transformer(64)},
            init={"weights_times": 2.0},
            labels={"noisy_labels": NOISY},
        ),
    )
}
VARIANTS = {p.name: p.variant_of for p in PROBLEMS.values() if p.variant_of}
"""From each held-out variant to its workload, for `algoperf_score`."""
