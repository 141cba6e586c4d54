# SPDX-License-Identifier: Apache-2.0
"""What is to be measured of a model that stands still, from gradients taken one by one.

The one oracle of the tests. A step is made of parts, the small batches; what is expected of it
follows from their gradients, in float64, and from the two equations that these norms obey.
"""

import copy
import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from fits import data, loss_of
from torch import Tensor, nn
from torch.utils.data import DistributedSampler


class Part(NamedTuple):
    """A small batch."""

    weight: float
    """What the step's gradient weighs it with, up to a factor."""
    gradient: Tensor
    inverse_size: float
    """1/n of its n examples, or Σ(w²/n) if it is a weighted mean."""
    share: float
    """What the mean of |g_part|² weighs it with, up to a factor."""


class Expected(NamedTuple):
    """Of a step."""

    small_sq_norm: float
    """Mean of |g_part|²."""
    big_sq_norm: float
    """|g|² of the mean over parts."""
    small_batch: float
    big_batch: float

    @property
    def moments(self) -> tuple[float, float]:
        """|G|² and tr(Σ): E|g|² = |G|² + tr(Σ)/B for both batch sizes, solved."""
        equations = [[1, 1 / self.small_batch], [1, 1 / self.big_batch]]
        signal, trace = np.linalg.solve(equations, [self.small_sq_norm, self.big_sq_norm])
        return float(signal), float(trace)


def expected(parts: Sequence[Part], columns: Sequence[int] | None = None) -> Expected:
    """What a step of these parts shows; of some numbers of the gradient, or of all."""
    gradients = torch.stack([part.gradient for part in parts])
    chosen = gradients if columns is None else gradients[:, list(columns)]
    w, v, inverse = (
        torch.tensor([getattr(part, name) for part in parts], dtype=torch.float64)
        for name in ("weight", "share", "inverse_size")
    )
    w, v = w / w.sum(), v / v.sum()
    return Expected(
        (v @ chosen.abs().square().sum(1)).item(),
        (w @ chosen).square().sum().item(),
        1 / (v @ inverse).item(),
        1 / (w.square() @ inverse).item(),
    )


def over_step(parts: Sequence[Part], examples: float) -> tuple[float, float]:
    """|G|² and tr(Σ) where the loss is one mean over what the weights count.

    From the products of each two different parts, and as tr(Σ)/B is the variance of the gradient.
    """
    total = sum(part.weight for part in parts)
    shares = [part.weight / total * part.gradient for part in parts]
    pairs = [(i, j) for i in range(len(parts)) for j in range(len(parts)) if i != j]
    products = sum((shares[i] @ shares[j]).item() for i, j in pairs)
    signal = products / sum(parts[i].weight * parts[j].weight / total**2 for i, j in pairs)
    return signal, examples * (sum(shares).square().sum().item() - signal)  # type: ignore[union-attr]


def micro_batch(gradient: Tensor, examples: float, weight: float = 1.0) -> Part:
    """A mean over some examples, that is a part."""
    return Part(weight, gradient, 1 / examples, weight**2)


def whole(parts: Sequence[Part]) -> Part:
    """Several parts that are one: a rank that accumulates micro-batches."""
    total = sum(part.weight for part in parts)
    return Part(
        total,
        sum(part.weight / total * part.gradient for part in parts),  # type: ignore[arg-type]
        sum((part.weight / total) ** 2 * part.inverse_size for part in parts),
        total**2,
    )


def halvings(gradients: Sequence[Tensor], columns: Sequence[int] | None = None) -> list[Expected]:
    """What a batch of such examples shows by its halves, for every way to halve it.

    A row that is over counts in the batch and in neither half.
    """
    rows, size = len(gradients), len(gradients) // 2
    of_rows = torch.stack(list(gradients))
    chosen = of_rows if columns is None else of_rows[:, list(columns)]
    big = chosen.mean(0).square().sum().item()
    found = []
    for one in itertools.combinations(range(rows), size):
        rest = sorted({*range(rows)} - {*one})
        for other in itertools.combinations(rest, size):
            difference = (chosen[list(one)].sum(0) - chosen[list(other)].sum(0)) / rows
            small = big + difference.square().sum().item()
            found.append(Expected(small, big, rows / (1 + 2 * size / rows), rows))
    return found


def in_float64(model: nn.Module) -> nn.Module:
    """A copy, by which gradients are taken."""
    model = copy.deepcopy(model).double()
    for p in model.parameters():
        if p.is_complex():  # which `double` passes over
            p.data = p.data.to(torch.complex128)
    return model


def gradient_of(model: nn.Module, loss: Callable[[nn.Module], Tensor]) -> Tensor:
    """By real numbers, of what is trained, in the order of the parameters."""
    model.zero_grad()
    loss(model).backward()  # which reentrant checkpoints need
    dense = [
        torch.zeros_like(p) if p.grad is None else p.grad.to_dense()
        for p in model.parameters()
        if p.requires_grad
    ]
    return torch.cat([(torch.view_as_real(g) if g.is_complex() else g).flatten() for g in dense])


def gradients_of_examples(
    model: nn.Module, batch: tuple[Tensor, Tensor], loss: Callable[[Tensor, Tensor], Tensor]
) -> list[Tensor]:
    """Those of the rows of a batch, one after the other, in float64."""
    model = in_float64(model)
    x, y = (part.double() if part.is_floating_point() else part for part in batch)

    def of_row(i: int) -> Callable[[nn.Module], Tensor]:
        return lambda net: loss(net(x[i : i + 1]), y[i : i + 1])

    return [gradient_of(model, of_row(i)) for i in range(len(x))]


def columns_of(model: nn.Module, chosen: Callable[[str], bool]) -> list[int]:
    """Where the gradient has the numbers of the trained parameters whose names are chosen."""
    found, start = [], 0
    for name, p in model.named_parameters():
        if p.requires_grad:
            stop = start + p.numel() * (1 + p.is_complex())
            found += list(range(start, stop)) if chosen(name) else []
            start = stop
    return found


def brute_force(
    net: nn.Module,
    *,
    ranks: int,
    accumulated: int,
    compared: str,
    examples: int,
    batch_size: int,
    inputs: torch.dtype = torch.float64,
    dealt: bool = False,
) -> list[Expected]:
    """What every step of a fit to `data` shows.

    Args:
        net: Its weights are those of every step. Gradients are taken of a copy in float64.
        ranks: Each with its part of the data, as Lightning's default sampler deals it out.
        accumulated: Batches of a rank in one step; the last step may have fewer.
        compared: What the parts are: "rank" or "micro_batch".
        examples: In the data.
        batch_size: Of one rank.
        inputs: Their precision.
        dealt: Whether the data is dealt out to one rank, too.
    """
    model, (x, y) = in_float64(net), data(examples).tensors
    of_rank = [list(range(examples))]
    if ranks > 1 or dealt:
        of_rank = [list(DistributedSampler(data(examples), ranks, r)) for r in range(ranks)]

    def gradient(rows: list[int]) -> Tensor:
        rounded = x[rows].to(inputs).double()
        return gradient_of(model, lambda net: loss_of(net, (rounded, y[rows])))

    steps = []
    for start in range(0, len(of_rank[0]), accumulated * batch_size):
        parts: list[Part] = []
        for indices in of_rank:
            window = indices[start : start + accumulated * batch_size]
            batches = [window[i : i + batch_size] for i in range(0, len(window), batch_size)]
            mine = [micro_batch(gradient(batch), len(batch)) for batch in batches]
            parts += mine if compared == "micro_batch" else [whole(mine)]
        steps.append(expected(parts))
    return steps
