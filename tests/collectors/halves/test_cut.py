# SPDX-License-Identifier: Apache-2.0
"""Where graphs are cut: each way from the loss to a parameter once, at rows of the batch."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.nn import functional as F

from noisescale.collectors.halves.calls import ModuleCalls
from noisescale.collectors.halves.cut import Cut, find_again, find_cut
from noisescale.collectors.halves.graph import Graph as AutogradGraph
from noisescale.collectors.halves.row_pass import row_pass, signs

ROWS = 6


class Graph:
    """A loss, what it is trained by, and what modules gave on the way."""

    def __init__(self, loss: Callable[[Any], Tensor], model: nn.Module, batch: Any) -> None:
        self.model, self.batch, self._loss = model, batch, loss
        self.parameters = list(model.parameters())

    def loss(self, rows: Sequence[int] | None = None) -> tuple[Tensor, ModuleCalls]:
        """That of some rows of the batch; of all."""
        calls = ModuleCalls()
        calls.switch(True)
        chosen = list(range(ROWS)) if rows is None else list(rows)
        try:
            return self._loss([x[chosen] for x in self.batch]), calls
        finally:
            calls.switch(False)

    def cut(self, loss: Tensor, calls: ModuleCalls) -> Cut:
        index_of = {id(p): i for i, p in enumerate(self.parameters)}
        scalars = [i for i, p in enumerate(self.parameters) if p.numel() == 1]
        graph = AutogradGraph(get_gradient_edge(loss))
        return find_cut(graph, ROWS, calls.outputs_in(graph), index_of, scalars=scalars)


def gradients(graph: Graph, edges: Any, loss: Tensor, factors: Tensor) -> list[Tensor]:
    found = [torch.zeros_like(p) for p in graph.parameters]
    start = get_gradient_edge(loss)
    row_pass(
        start, torch.ones(()), edges, factors, graph.parameters, lambda i, g: found[i].copy_(g)
    )
    return found


def data(*widths: int) -> list[Tensor]:
    return [torch.randn(ROWS, width) for width in widths]


def of_functions() -> Graph:
    """Without any module."""
    model = nn.ParameterList([torch.randn(4, 8), torch.randn(8, 3)])
    return Graph(lambda b: F.mse_loss((b[0] @ model[0]).tanh() @ model[1], b[1]), model, data(4, 3))


def encoder_and_decoder() -> Graph:
    model = nn.ModuleDict({"encoder": nn.Linear(4, 2), "decoder": nn.Linear(2, 4)})
    return Graph(
        lambda b: F.mse_loss(model["decoder"](model["encoder"](b[0]).tanh()), b[0]),
        model,
        data(4),
    )


def variational() -> Graph:
    """A penalty goes past the decoder to what the decoder reads."""
    model = nn.ModuleDict({"encoder": nn.Linear(4, 6), "decoder": nn.Linear(3, 4)})

    def loss(batch: Any) -> Tensor:
        mean, width = model["encoder"](batch[0]).chunk(2, 1)
        decoded = model["decoder"](mean + width.exp() * batch[1])
        return F.mse_loss(decoded, batch[0]) + (mean.square() + width.exp() - width).mean()

    return Graph(loss, model, data(4, 3))


def called_twice() -> Graph:
    model = nn.Linear(4, 3)
    return Graph(lambda b: (model(b[0]) * model(b[0].flip(1)).sigmoid()).mean(), model, data(4))


def tied() -> Graph:
    """The head is the embedding; tokens are flattened inside the model."""
    embedding = nn.Embedding(10, 4)

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.body = embedding, nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            logits = self.body(self.embedding(x)) @ self.embedding.weight.T
            return logits.view(-1, 10)

    model = Tied()
    x = torch.randint(10, (ROWS, 5))
    return Graph(lambda b: F.cross_entropy(model(b[0]), b[0].flip(1).reshape(-1)), model, [x])


def flat_from_the_start() -> Graph:
    """All rows of an example lie next to each other, as the view in the graph tells."""
    embedding, head = nn.Embedding(10, 4), nn.Linear(4, 10)
    x = torch.randint(10, (ROWS, 5))
    return Graph(
        lambda b: F.cross_entropy(head(embedding(b[0]).view(-1, 4)), b[0].reshape(-1)),
        nn.ModuleList([embedding, head]),
        [x],
    )


def recurrent() -> Graph:
    model = nn.LSTM(4, 5, 2, batch_first=True)
    return Graph(lambda b: model(b[0])[0].square().mean(), model, [torch.randn(ROWS, 7, 4)])


def as_long_as_wide() -> Graph:
    """Sequences as long as there are rows, and logits of as many classes."""
    model = nn.Sequential(nn.Linear(4, ROWS))
    return Graph(
        lambda b: F.cross_entropy(model(b[0])[:, -1], b[1]),
        model,
        [torch.randn(ROWS, ROWS, 4), torch.arange(ROWS)],
    )


GRAPHS = [
    of_functions,
    encoder_and_decoder,
    variational,
    called_twice,
    tied,
    flat_from_the_start,
    recurrent,
    as_long_as_wide,
]


@pytest.mark.parametrize("make", GRAPHS)
def test_signed_rows_give_half_the_difference_of_the_halves(make: Callable[[], Graph]) -> None:
    """And the factor 2 twice the gradient: a way that is cut twice would not show by signs.

    A cut is found again in a graph of the same kind, and in no other.
    """
    torch.manual_seed(0)
    graph = make()
    loss, calls = graph.loss()
    cut = graph.cut(loss, calls)

    factors = signs(ROWS, 3)
    found = gradients(graph, cut.edges, loss, factors)

    halves = [[i for i in range(ROWS) if factors[i] == sign] for sign in (1, -1)]
    plus, minus = (torch.autograd.grad(graph.loss(half)[0], graph.parameters) for half in halves)
    assert cut.outside == []
    for got, a, b in zip(found, plus, minus, strict=True):
        torch.testing.assert_close(got, (a - b) / 2)
    doubled = gradients(graph, cut.edges, loss, torch.full((ROWS,), 2.0))
    for got, gradient in zip(doubled, torch.autograd.grad(loss, graph.parameters), strict=True):
        torch.testing.assert_close(got, 2 * gradient)
    loss, _ = graph.loss()
    again: Any = find_again(get_gradient_edge(loss), ROWS, cut.pattern)
    assert [edge[1:] for edge in again] == [edge[1:] for edge in cut.edges]
    for one, other in zip(gradients(graph, again, loss, factors), found, strict=True):
        assert torch.equal(one, other)
    assert find_again(get_gradient_edge(loss * 2), ROWS, cut.pattern) is None
    assert find_again(get_gradient_edge(loss), ROWS + 1, cut.pattern) is None


def test_similarities_give_way_to_what_they_are_made_of() -> None:
    """A temperature stays outside; cut at the similarities it would not."""
    towers = nn.ModuleList([nn.Linear(4, 3), nn.Linear(5, 3)])
    towers.scale = nn.Parameter(torch.zeros(()))  # type: ignore[assignment]

    def loss(batch: Any) -> Tensor:
        similar = towers.scale.exp() * towers[0](batch[0]) @ towers[1](batch[1]).T
        return -similar.log_softmax(1).diag().mean()

    graph = Graph(loss, towers, data(4, 5))
    value, calls = graph.loss()

    cut = graph.cut(value, calls)

    assert [graph.parameters[i] is towers.scale for i in cut.outside] == [True]
    assert len(cut.edges) == 2


def test_rows_that_no_view_made_are_no_rows_of_examples() -> None:
    """Two views of all examples, one after the other: which row is whose cannot be told."""
    model = nn.Linear(4, 3)
    graph = Graph(lambda b: model(torch.cat([b[0], b[1]])).square().mean(), model, data(4, 4))

    assert graph.cut(*graph.loss()).edges == []


@pytest.mark.parametrize("rows", [2, 5, 16])
def test_signs_are_of_two_halves_and_drawn_again_alike(rows: int) -> None:
    drawn = [signs(rows, draw) for draw in range(40)]

    assert all(one.sum() == 0 and one.abs().sum() == rows - rows % 2 for one in drawn)
    assert len({tuple(one.tolist()) for one in drawn}) > 1
    assert torch.equal(signs(rows, 7), drawn[7])
    assert torch.stack(drawn).mean(0).abs().max() < 0.6
