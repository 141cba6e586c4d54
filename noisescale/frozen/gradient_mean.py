# SPDX-License-Identifier: Apache-2.0
"""The mean of gradients as they come, and products of each with the mean of those before.

In memory are the mean, and where asked for one copy more: the gradient of the batch before, or the
squared deviations of each element.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import Parameter

from noisescale.estimation.independent_batches import BatchProducts


class GradientMean:
    """The weighted mean of the gradients of batches.

    Args:
        parameters: What is trained.
        entry_of: The number of each parameter's entry.
        entries: How many there are. Products are summed up for each.
        successive: Whether each second gradient is compared with the one before it.
        elementwise: Whether the deviations of each element are kept.
    """

    def __init__(
        self,
        parameters: Sequence[Parameter],
        entry_of: Sequence[int],
        entries: int,
        *,
        successive: bool = False,
        elementwise: bool = False,
    ) -> None:
        self._parameters = parameters
        self._entry_of = entry_of
        self._entries = entries
        self._successive = successive
        self.mean = [_zeros(p) for p in parameters]
        self.deviations = [_zeros(p) for p in parameters] if elementwise else []
        """Σ w_k·W/(W + w_k)·(g_k - m)² of each element."""
        self.weight = 0.0
        self.batches = 0
        self._before: list[Tensor | None] = []
        self._weight_before = 0.0

    def add(self, weight: float, examples: float) -> list[BatchProducts]:
        """Take in what is in `p.grad`. Return the products for each entry; none of the first one.

        A parameter without a gradient has a gradient of zero.
        """
        share = weight / (self.weight + weight)
        part = weight * self.weight / (self.weight + weight)
        sums: list[list[Tensor]] = [[], []]
        with torch.no_grad():
            for index, (p, mean) in enumerate(zip(self._parameters, self.mean, strict=True)):
                g = _gradient(p)
                deviation = mean.neg() if g is None else g - mean
                sums[0].append(mean.new_zeros(()) if g is None else _dot(g, mean))
                sums[1].append(_dot(deviation, deviation))
                if self.deviations:
                    self.deviations[index].addcmul_(deviation, deviation, value=part)
                mean.add_(deviation, alpha=share)
        before, self.weight = self.weight, self.weight + weight
        self.batches += 1
        if not before:
            return []
        along, deviations = (self._by_entry(of_parameters) for of_parameters in sums)
        return [
            BatchProducts(weight, examples, before, a, part * d)
            for a, d in zip(along, deviations, strict=True)
        ]

    def difference(self, weight: float) -> float | None:
        """Return |g_k - g_(k-1)|²/(1/w_k + 1/w_(k-1)) at the second batch of a pair; else None.

        Call it after `add`. Its mean is τ if the batches of a pair are independent.
        """
        if not self._successive:
            return None
        if not self._before:
            self._before = [None if g is None else g.clone() for g in self._gradients()]
            self._weight_before = weight
            return None
        sums = []
        for g, before in zip(self._gradients(), self._before, strict=True):
            if (one := before if g is None else g if before is None else g - before) is not None:
                sums.append(_dot(one, one))
        self._before = []
        return sum(on_host(sums)) / (1 / weight + 1 / self._weight_before)

    def forget_last(self) -> None:
        """Pair the next batch with the one after it."""
        self._before = []

    def _gradients(self) -> list[Tensor | None]:
        return [_gradient(p) for p in self._parameters]

    def _by_entry(self, of_parameters: list[Tensor]) -> list[float]:
        sums = [0.0] * self._entries
        for entry, value in zip(self._entry_of, on_host(of_parameters), strict=True):
            sums[entry] += value
        return sums


def _gradient(p: Parameter) -> Tensor | None:
    if p.grad is None:
        return None
    g = p.grad.detach()
    return (g.to_dense() if g.is_sparse else g).float()


def _zeros(p: Parameter) -> Tensor:
    return torch.zeros_like(p, dtype=torch.float32, memory_format=torch.preserve_format).detach()


def _dot(a: Tensor, b: Tensor) -> Tensor:
    if a.is_contiguous() and b.is_contiguous():  # without a copy
        return torch.dot(a.view(-1), b.view(-1))
    return (a * b).sum()


def on_host(scalars: list[Tensor]) -> list[float]:
    """Return numbers as floats: with one transfer, unless they are on several devices."""
    if len({x.device for x in scalars}) == 1:
        return list(map(float, torch.stack(scalars).tolist()))
    return [float(x) for x in scalars]
