# SPDX-License-Identifier: Apache-2.0
"""Noise scales of other geometries at frozen weights, from single examples' gradients.

Each is a noise over a signal, both of the unit of a squared norm, for an optimizer that looks for
the steepest descent in another norm than the Euclidean one:

| name | noise | signal | source |
|---|---|---|---|
| simple | tr(Σ) | \\|G\\|² | McCandlish et al. 2018 |
| averaged | tr(Σ) | \\|G\\|² at averaged weights | |
| sign | (Σᵢ σᵢ)² | \\|G\\|₁² | Naganuma et al. 2026, arXiv:2602.03001 |
| spectral | (Σ tr C^½)², over matrices | (Σ \\|G\\|_*)² | the same |
| hybrid | matrices as spectral, others as sign, each by its share of a step | | |
| half | tr(PΣ) | G'PG | McCandlish et al. 2018, appendix E |
| preconditioned | tr(P²Σ) | \\|PG\\|² | |

σᵢ² is the variance of one element, C = E[(g - G)(g - G)'] on the smaller side of a matrix, and
P = 1/(√v̂ + ε) with Adam's v̂ and ε the root mean square of √v̂: rare elements blow up a smaller one.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.func import grad, vmap

from benchmarks.lib.stacked import Parameters, Problem, scale_of

NAMES = ("simple", "averaged", "sign", "spectral", "hybrid", "half", "preconditioned")

Pair = tuple[float, float]
"""Noise and signal."""


class Gradients:
    """Means and variances of the elements of examples' gradients, at one set of weights."""

    def __init__(
        self, problem: Problem, parameters: Parameters, batch: tuple[Tensor, ...], at_once: int
    ) -> None:
        self.problem, self.examples = problem, len(batch[0])
        # All that there are have no error of drawing.
        self.drawn = 1 - len(batch[0]) / len(problem.data()[0][0])
        gradient = vmap(grad(problem.loss_at), in_dims=(None, 0, 0))
        sums: Parameters = {}
        squares: Parameters = {}
        products: Parameters = {}
        for parts in zip(*(each.split(at_once) for each in batch), strict=True):
            # Each example is a batch of one.
            for name, g in gradient(parameters, *(x.unsqueeze(1) for x in parts)).items():
                _add(sums, name, g.sum(0))
                _add(squares, name, g.square().sum(0))
                if g.dim() == 3:
                    small = g if g.shape[1] <= g.shape[2] else g.mT
                    flat = small.transpose(0, 1).flatten(1)
                    _add(products, name, flat @ flat.T)
        n = self.examples
        self.mean = {name: x / n for name, x in sums.items()}
        self.variance = {
            name: ((x - n * self.mean[name].square()) / (n - 1)).clamp(min=0)
            for name, x in squares.items()
        }
        self.covariance = {
            name: (x - n * _square(self.mean[name])) / (n - 1) for name, x in products.items()
        }

    def trace(self) -> float:
        return float(sum(x.double().sum() for x in self.variance.values()))

    def squared_norm(self) -> float:
        """|G|², from which the noise of the mean is taken."""
        raw = float(sum(x.double().square().sum() for x in self.mean.values()))
        return raw - self.drawn * self.trace() / self.examples

    def sign(self, names: set[str]) -> Pair:
        """Σ σ and |G|₁ of some parameters."""
        noise = sum(float(self.variance[name].double().sqrt().sum()) for name in names)
        return noise, sum(float(self.mean[name].double().abs().sum()) for name in names)

    def spectral(self, names: set[str]) -> Pair:
        """Σ tr C^½ and Σ |G|_* of some matrices, each by the scale that Muon gives its change."""
        noise = signal = 0.0
        for name in names:
            scale = scale_of(self.mean[name].shape)
            roots = torch.linalg.eigvalsh(self.covariance[name].double()).clamp(min=0).sqrt()
            noise += scale * float(roots.sum())
            signal += scale * float(torch.linalg.svdvals(self.mean[name].double()).sum())
        return noise, signal

    def scaled(self, roots: Mapping[str, Tensor], power: int) -> Pair:
        """tr(PᵏΣ) and G'PᵏG."""
        mean_square = sum(float(x.double().square().sum()) for x in roots.values())
        count = sum(x.numel() for x in roots.values())
        damping = (mean_square / count) ** 0.5
        noise = signal = 0.0
        for name, root in roots.items():
            p = (root.double() + damping) ** -power
            noise += float((p * self.variance[name]).sum())
            signal += float((p * self.mean[name].double().square()).sum())
        return noise, signal - self.drawn * noise / self.examples


def _add(sums: Parameters, name: str, x: Tensor) -> None:
    sums[name] = sums[name] + x if name in sums else x


def _square(x: Tensor) -> Tensor:
    return x @ x.T if x.shape[0] <= x.shape[1] else x.T @ x


def scales_at(
    problem: Problem,
    parameters: Parameters,
    averaged: Parameters,
    roots: Mapping[str, Tensor],
    batch: tuple[Tensor, ...],
    at_once: int,
) -> dict[str, Pair]:
    """Noise and signal in each geometry; without `roots`, √v̂ of Adam, none that needs them."""
    here = Gradients(problem, parameters, batch, at_once)
    there = Gradients(problem, averaged, batch, at_once)
    matrices = problem.inner({name: p.unsqueeze(0) for name, p in parameters.items()})
    everything = here.sign(set(parameters))
    found = {
        "simple": (here.trace(), here.squared_norm()),
        "averaged": (here.trace(), there.squared_norm()),
        "sign": (everything[0] ** 2, everything[1] ** 2),
    }
    if matrices:
        noise, signal = here.spectral(matrices)
        others = here.sign(set(parameters) - matrices)
        found["spectral"] = noise**2, signal**2
        found["hybrid"] = (noise + others[0]) ** 2, (signal + others[1]) ** 2
    if roots:
        found["half"] = here.scaled(roots, 1)
        found["preconditioned"] = here.scaled(roots, 2)
    return found
