# SPDX-License-Identifier: Apache-2.0
"""Layers of one's own, against gradients taken one by one."""

import pytest
import torch
from brute_force import examples_of, expected, gradients_of_examples
from refused import refused
from torch import Tensor, nn

from noisescale import NoiseScaleMeter
from noisescale.collectors.per_example import (
    Layer,
    LinearLayer,
    Outer,
    Summed,
    register_layer,
)
from noisescale.collectors.per_example.exclusions import Verdict, find_layers
from noisescale.collectors.per_example.layers import kind_of
from noisescale.collectors.rows.step_norms import StepNorms


class Transposed(nn.Module):
    """y = x W + b, W of shape (inputs, outputs)."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(inputs, outputs) / 3)
        self.bias = nn.Parameter(torch.zeros(outputs))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight + self.bias


class TransposedLayer(LinearLayer):
    def weight(self, x: Tensor, d: Tensor) -> Outer:
        a, d, _ = super().weight(x, d)
        return Outer(d, a)


class RootMeanSquare(nn.Module):
    """A normalization as language models write their own."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(features))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * normalized(x)


class RootMeanSquareLayer(Layer):
    def weight(self, x: Tensor, d: Tensor) -> Summed:
        return Summed((d * normalized(x)).flatten(1, -2))


def normalized(x: Tensor) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt()


class Net(nn.Sequential):
    """Over sequences, whose mean is taken."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(Transposed(5, 8), RootMeanSquare(8), nn.Tanh(), Transposed(8, 3))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).mean(1)


def loss_of(output: Tensor, y: Tensor) -> Tensor:
    return (output - y).square().mean()


def batch(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(6, 4, 5, generator=generator), torch.randn(6, 3, generator=generator)


def test_layers_of_ones_own_are_measured(recorded: list[StepNorms]) -> None:
    register_layer(Transposed, TransposedLayer)
    register_layer(RootMeanSquare, RootMeanSquareLayer, normalization=True)
    model = Net()
    meter = NoiseScaleMeter(model, small_batch="example")
    for seed in range(3):  # a warning, if something were left out, would be an error
        model.zero_grad()
        meter.backward(loss_of(model(batch(seed)[0]), batch(seed)[1]), 6)
        meter.step()
    meter.close()

    for seed, got in enumerate(recorded[1:], start=1):
        want = expected(examples_of(gradients_of_examples(model, batch(seed), loss_of)))
        assert got[:4] == pytest.approx(tuple(want), rel=1e-5)
    assert len(recorded) == 3
    assert find_layers(model, list(model.parameters()), normalization_only=True)[1] == [
        Verdict.MEASURED if name == "1.weight" else Verdict.NOT_ASKED_FOR
        for name, _ in model.named_parameters()
    ]


def test_the_class_that_is_nearest_counts() -> None:
    class Linear(nn.Linear):
        """Its forward is torch's, its formula one of its own."""

    class Other(Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + 1

    own = type("OwnLayer", (LinearLayer,), {})
    register_layer(Linear, own)

    assert kind_of(Linear(2, 2)) is own
    assert kind_of(nn.Linear(2, 2)) is LinearLayer
    assert kind_of(Other(2, 2)) is None


def test_what_are_no_classes_of_modules_and_layers_are_refused() -> None:
    with refused("module", error=TypeError, requirement="a subclass of Module", got="3"):
        register_layer(3, LinearLayer)  # type: ignore[arg-type]
    with refused("layer", error=TypeError, requirement="a subclass of Layer"):
        register_layer(Transposed, int)  # type: ignore[arg-type]
