# SPDX-License-Identifier: Apache-2.0
"""Small models whose rows act on each other, or are drawn together, in ways that few notice."""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.accuracy._models import Batch, Setup, mlp, sequences

_ROWS = 32


def _points(g: torch.Generator) -> Batch:
    x = torch.randn(_ROWS, 16, generator=g)
    return x, (x[:, :3] + torch.randn(_ROWS, 3, generator=g)).argmax(dim=1)


def ranknet() -> Setup:
    """Pairs of rows by indices, drawn in the loss."""
    net = mlp(16, 32, 1)

    def loss(batch: Batch) -> Tensor:
        x, y = batch
        i, j = torch.triu_indices(_ROWS, _ROWS, 1)
        score = net(x)[:, 0]
        return F.softplus(-(y[i] - y[j]).sign() * (score[i] - score[j])).mean()

    return Setup(net, loss, _points, _ROWS)


def siamese() -> Setup:
    """Neighbouring rows are a pair."""
    net = mlp(16, 32, 8)

    def loss(batch: Batch) -> Tensor:
        z, same = net(batch[0]), (batch[1][0::2] == batch[1][1::2]).float()
        apart = (z[0::2] - z[1::2]).norm(dim=1)
        return (same * apart.square() + (1 - same) * F.relu(2 - apart).square()).mean()

    return Setup(net, loss, _points, _ROWS)


def reward_model() -> Setup:
    """The chosen answers come first, then the rejected ones."""
    net = mlp(16, 32, 1)

    def loss(batch: Batch) -> Tensor:
        chosen, rejected = net(batch[0]).chunk(2)
        return -F.logsigmoid(chosen - rejected).mean()

    def draw(g: torch.Generator) -> Batch:
        x, y = _points(g)
        x[: _ROWS // 2, :3] += 0.3
        return x, y

    return Setup(net, loss, draw, _ROWS)


def mined_triplets() -> Setup:
    """The hardest positive and negative in the batch."""
    net = mlp(16, 32, 8)

    def loss(batch: Batch) -> Tensor:
        z, y = F.normalize(net(batch[0]), dim=1), batch[1]
        apart, same = torch.cdist(z, z), y[:, None] == y
        hardest = (apart - 10 * ~same).amax(dim=1), (apart + 10 * same).amin(dim=1)
        return F.relu(hardest[0] - hardest[1] + 0.5).mean()

    return Setup(net, loss, _points, _ROWS)


def swav() -> Setup:
    """Codes that are balanced over the batch by Sinkhorn's iteration."""
    net, prototypes = mlp(16, 32, 8), nn.Linear(8, 6, bias=False)

    def loss(batch: Batch) -> Tensor:
        x = batch[0]
        one, other = (
            prototypes(F.normalize(net(x + 0.3 * torch.randn_like(x)), dim=1)) for _ in range(2)
        )
        with torch.no_grad():
            codes = (other / 0.1).exp().T
            for _ in range(3):
                codes = codes / codes.sum(dim=1, keepdim=True) / 6
                codes = codes / codes.sum(dim=0, keepdim=True) / _ROWS
        return -(_ROWS * codes.T * F.log_softmax(one / 0.1, dim=1)).sum(dim=1).mean()

    return Setup(nn.ModuleList([net, prototypes]), loss, _points, _ROWS)


def barlow_twins() -> Setup:
    """A correlation matrix over the batch."""
    net = mlp(16, 32, 8)

    def loss(batch: Batch) -> Tensor:
        x = batch[0]
        one, other = (net(x + 0.3 * torch.randn_like(x)) for _ in range(2))
        one, other = ((z - z.mean(0)) / z.std(0) for z in (one, other))
        c = one.T @ other / _ROWS - torch.eye(8)
        return (c.diag().square().sum() + 0.01 * (c - c.diag().diag()).square().sum()) / 8

    return Setup(net, loss, _points, _ROWS)


def sorted_loss() -> Setup:
    """The mean of the hardest quarter of the rows."""
    net = mlp(16, 32, 3)

    def loss(batch: Batch) -> Tensor:
        each = F.cross_entropy(net(batch[0]), batch[1], reduction="none")
        return each.sort(descending=True).values[: _ROWS // 4].mean()

    return Setup(net, loss, _points, _ROWS)


def mixup() -> Setup:
    """Each row is mixed with another one."""
    net = mlp(16, 32, 3)

    def loss(batch: Batch) -> Tensor:
        x, y = batch
        other, share = torch.randperm(_ROWS), random.betavariate(1.0, 1.0)
        out = net(share * x + (1 - share) * x[other])
        return share * F.cross_entropy(out, y) + (1 - share) * F.cross_entropy(out, y[other])

    return Setup(net, loss, _points, _ROWS)


def one_class_a_batch() -> Setup:
    """Independent batches whose rows are alike."""
    net = mlp(16, 32, 3)

    def draw(g: torch.Generator) -> Batch:
        y = torch.randint(3, (1,), generator=g).expand(_ROWS)
        return torch.randn(_ROWS, 16, generator=g) + F.one_hot(y, 16), y

    return Setup(net, lambda b: F.cross_entropy(net(b[0]), b[1]), draw, _ROWS)


def balanced_batches() -> Setup:
    """As many rows of each class in each batch."""
    net = mlp(16, 32, 4)
    y = torch.arange(_ROWS) % 4

    def draw(g: torch.Generator) -> Batch:
        return torch.randn(_ROWS, 16, generator=g) + F.one_hot(y, 16), y

    return Setup(net, lambda b: F.cross_entropy(net(b[0]), b[1]), draw, _ROWS)


def length_buckets() -> Setup:
    """Sequences of one length in each batch; the loss is a mean over its tokens."""
    body, head = nn.GRU(16, 16, batch_first=True), nn.Linear(16, 64)
    words = nn.Embedding(64, 16)

    def draw(g: torch.Generator) -> Batch:
        return sequences(g, 16, int(2 ** torch.randint(2, 6, (1,), generator=g)) + 1)

    def loss(x: Batch) -> Tensor:
        return F.cross_entropy(head(body(words(x[:, :-1]))[0]).flatten(0, 1), x[:, 1:].flatten())

    return Setup(nn.ModuleList([words, body, head]), loss, draw, 16)


def boxes() -> Setup:
    """A mean over the few rows with a positive."""
    net = mlp(16, 32, 4)

    def draw(g: torch.Generator) -> Batch:
        x = torch.randn(_ROWS, 16, generator=g)
        return x, torch.rand(_ROWS, generator=g) < 0.08

    def loss(batch: Batch) -> Tensor:
        x, positive = batch
        error = (net(x) - x[:, :4]).abs().sum(dim=1)
        return (error * positive).sum() / positive.sum().clamp(min=1)

    return Setup(net, loss, draw, _ROWS)


def dropout() -> Setup:
    """No row acts on another: a plain classifier with dropout."""
    net = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Dropout(0.5), nn.Linear(64, 3))
    return Setup(net, lambda b: F.cross_entropy(net(b[0]), b[1]), _points, _ROWS)


COUPLED: dict[str, Callable[[], Setup]] = {
    "RankNet": ranknet,
    "siamese pairs": siamese,
    "reward model": reward_model,
    "mined triplets": mined_triplets,
    "SwAV": swav,
    "Barlow Twins": barlow_twins,
    "sorted loss": sorted_loss,
    "mixup": mixup,
    "one class a batch": one_class_a_batch,
    "balanced batches": balanced_batches,
    "length buckets": length_buckets,
    "boxes": boxes,
    "dropout": dropout,
}
