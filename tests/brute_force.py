# SPDX-License-Identifier: Apache-2.0
"""What `fit` should measure of a model that stands still, from gradients taken one by one."""

import copy
from collections.abc import Sequence

import torch
from fits import data, loss_of
from torch import Tensor, nn
from torch.utils.data import DistributedSampler


class Rounded(nn.Module):
    """Inputs as they arrive in another precision."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def forward(self, x: Tensor) -> Tensor:
        return x.to(self.dtype).double()


def brute_force(
    net: nn.Module,
    *,
    ranks: int,
    accumulated: int,
    compared: str,
    examples: int,
    batch_size: int,
    inputs: torch.dtype = torch.float64,
) -> list[tuple[float, float, float, float]]:
    """For each step: mean |g_part|², |g|², and the effective sizes of both.

    Args:
        net: Its weights are those of every step. Gradients are taken of a copy in float64.
        ranks: Each with its part of the data, as Lightning's default sampler deals it out.
        accumulated: Batches of a rank in one step; the last step may have fewer.
        compared: What the parts are: "rank", "micro_batch" or "example".
        examples: In the data.
        batch_size: Of one rank.
        inputs: Their precision.
    """
    net = copy.deepcopy(net).double()
    for p in net.parameters():
        if p.is_complex():  # which `double` passes over
            p.data = p.data.to(torch.complex128)
    model = nn.Sequential(Rounded(inputs), net)
    of_rank = [list(range(examples))]
    if ranks > 1:
        of_rank = [list(DistributedSampler(data(examples), ranks, r)) for r in range(ranks)]
    batches = [
        [indices[i : i + batch_size] for i in range(0, len(indices), batch_size)]
        for indices in of_rank
    ]
    steps = []
    for start in range(0, len(batches[0]), accumulated):
        parts: list[tuple[float, Tensor, float]] = []
        for of_one in batches:
            window = of_one[start : start + accumulated]
            weight = 1 / (ranks * len(window))
            singles = [[i] for batch in window for i in batch]
            mine = [
                (gradient(model, indices, examples), len(indices))
                for indices in (singles if compared == "example" else window)
            ]
            if compared == "example":
                lengths = [len(batch) for batch in window for _ in batch]
                parts += [(weight / n, g, 1) for (g, _), n in zip(mine, lengths, strict=True)]
            elif compared == "micro_batch":
                parts += [(weight, g, n) for g, n in mine]
            else:
                mean = torch.stack([g for g, _ in mine]).mean(0)
                parts.append((1 / ranks, mean, len(mine) ** 2 / sum(1 / n for _, n in mine)))
        average = torch.stack([w * g for w, g, _ in parts]).sum(0)
        steps.append(
            (
                sum(w * g.square().sum().item() for w, g, _ in parts),
                average.square().sum().item(),
                1 / sum(w / n for w, _, n in parts),
                1 / sum(w**2 / n for w, _, n in parts),
            )
        )
    return steps


def gradient(model: nn.Module, indices: Sequence[int], examples: int) -> Tensor:
    """Of the mean loss over some examples, by real numbers, with respect to what is trained."""
    model.zero_grad()
    x, y = data(examples).tensors
    loss_of(model, (x[list(indices)].double(), y[list(indices)])).backward()
    trained = [p for p in model.parameters() if p.requires_grad]
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in trained]
    return torch.cat(
        [(torch.view_as_real(g) if g.is_complex() else g).flatten() for g in gradients]
    )
