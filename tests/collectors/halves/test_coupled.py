# SPDX-License-Identifier: Apache-2.0
"""Losses that compare rows with each other are told from those that only look like it."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.nn import functional as F

from noisescale.collectors.halves.calls import ModuleCalls
from noisescale.collectors.halves.coupled import first_coupling
from noisescale.collectors.halves.cut import find_cut
from noisescale.collectors.halves.graph import Graph

ROWS = 6
LABELS = torch.arange(ROWS)

Loss = Callable[[nn.Module, Tensor], Tensor]


def meeting(loss: Loss, width: int = 4, classes: int = 5) -> str | None:
    """Where the rows of six meet, on their way from a model of one layer to the loss."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, width), nn.Tanh())
    model.register_parameter("prototypes", nn.Parameter(torch.randn(classes, width)))
    calls = ModuleCalls()
    calls.switch(True)
    try:
        value = loss(model, torch.randn(ROWS, 4))
    finally:
        calls.switch(False)
    graph = Graph(get_gradient_edge(value))
    index_of = {id(p): i for i, p in enumerate(model.parameters())}
    cut = find_cut(graph, ROWS, calls.outputs_in(graph), index_of)
    assert cut.edges
    return first_coupling(graph, cut, ROWS)


def of_towers(model: nn.Module, x: Tensor) -> Tensor:
    u, v = F.normalize(model(x), dim=1), F.normalize(model(x + 1), dim=1)
    return F.cross_entropy(u @ v.T, LABELS)


def of_views(model: nn.Module, x: Tensor) -> Tensor:
    z = torch.cat([model(x), model(x + 1)])
    similarity = (z @ z.T).fill_diagonal_(-9.0)
    return F.cross_entropy(similarity, LABELS.repeat(2).roll(ROWS))


def of_cosines(model: nn.Module, x: Tensor) -> Tensor:
    z = model(x)
    return F.cross_entropy(F.cosine_similarity(z[:, None], z[None], dim=2), LABELS)


def dice(model: nn.Module, x: Tensor) -> Tensor:
    p = model(x).sigmoid()
    return 1 - 2 * (p * (x[:, :1] > 0)).sum() / (p.sum() + 3)


def penalized(model: nn.Module, x: Tensor) -> Tensor:
    """Found by the shape of the gradient, but for a layer that is as wide as there are rows."""
    loss = model(x).square().mean()
    (gradient,) = torch.autograd.grad(loss, model.get_parameter("0.weight"), create_graph=True)
    return loss + gradient.square().sum()


def scaled(model: nn.Module, x: Tensor) -> Tensor:
    """No rows lead to the scales, so similarities are all that can be cut."""
    logits = (model(x) @ model(x + 1).T)[:, :, None] * model.get_parameter("prototypes")[0]
    return F.cross_entropy(logits.sum(2), LABELS)


MEETING: dict[str, Loss] = {
    "towers": of_towers,
    "views": of_views,
    "keys without gradient": lambda model, x: F.cross_entropy(
        model(x) @ model(x + 1).detach().T, LABELS
    ),
    "distances": lambda model, x: F.cross_entropy(-torch.cdist(model(x), model(x + 1)), LABELS),
    "redundancy": lambda model, x: (model(x).T @ model(x + 1) / ROWS - 0.1).square().sum(),
    "cosines": of_cosines,
    "dice": dice,
    "matching of means": lambda model, x: (model(x).mean(0) - 1).square().mean(),
    "spread of features": lambda model, x: (1 - model(x).std(0)).relu().mean(),
    "softmax over the batch": lambda model, x: -F.log_softmax(model(x)[:, 0], dim=0)[0],
    "Donsker-Varadhan": lambda model, x: model(x).logsumexp(0).mean() - model(x + 1).mean(),
}


def cosine_to_prototypes(model: nn.Module, x: Tensor) -> Tensor:
    prototypes = F.normalize(model.get_parameter("prototypes"), dim=1)
    return F.cross_entropy(F.normalize(model(x), dim=1) @ prototypes.T, LABELS % 5)


def weighted_tasks(model: nn.Module, x: Tensor) -> Tensor:
    weight = model.get_parameter("prototypes")[0, 0]
    return (-weight).exp() * model(x).square().mean() + weight


def products_within_rows(model: nn.Module, x: Tensor) -> Tensor:
    z = model(x)[:, :, None] + torch.randn(ROWS, 4, ROWS)
    return (z.transpose(1, 2) @ z).square().mean()


def scaled_to_another_loss(model: nn.Module, x: Tensor) -> Tensor:
    one, other = model(x).square().mean(), model(x + 1).abs().mean()
    return one + other * (one / other).detach()


def penalty_on_gradients_of_inputs(model: nn.Module, x: Tensor) -> Tensor:
    x = x.detach().requires_grad_()
    (gradient,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    return (gradient.norm(dim=1) - 1).square().mean()


SIDE_BY_SIDE: dict[str, Loss] = {
    "cosine to prototypes": cosine_to_prototypes,
    "several samples": lambda model, x: (
        (model(x)[:, None] + torch.randn(ROWS, ROWS, 4)).square().mean()
    ),
    "products within rows": products_within_rows,
    "siamese": lambda model, x: -F.cosine_similarity(model(x), model(x + 1)).mean(),
    "root of the mean": lambda model, x: (model(x) - x).square().mean(0).mean().sqrt(),
    "weighted tasks": weighted_tasks,
    "scaled to another loss": scaled_to_another_loss,
    "of some positions": lambda model, x: F.cross_entropy(
        model(x)[x[:, 0] > -9][:5], LABELS[:5] % 4
    ),
    "norm of all": lambda model, x: model(x).norm(),
    "penalty on gradients of inputs": penalty_on_gradients_of_inputs,
}


@pytest.mark.parametrize(
    ("loss", "width", "classes"),
    [
        *((loss, width, 5) for loss in MEETING.values() for width in (4, ROWS)),
        *((penalized, 4, 5), (scaled, 4, 5)),
        (cosine_to_prototypes, 4, ROWS),  # as many as rows, which they cannot be told from
    ],
)
def test_rows_that_are_compared_are_found(loss: Loss, width: int, classes: int) -> None:
    assert meeting(loss, width, classes) is not None


@pytest.mark.parametrize("name", SIDE_BY_SIDE)
def test_rows_that_only_stand_side_by_side_are_let_be(name: str) -> None:
    assert meeting(SIDE_BY_SIDE[name]) is None
