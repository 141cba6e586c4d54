# SPDX-License-Identifier: Apache-2.0
"""Random numbers that a backward pass draws on a device: a pass of our own leaves no trace."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from noisescale import NoiseScaleMeter


class Thinned(torch.autograd.Function):
    """Multiplies the gradient by random numbers of its device."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient * torch.rand_like(gradient)


class Net(nn.Module):
    def __init__(self, device: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(6, 8).to(device)
        self.last = nn.Linear(8, 1).to("fake:0")

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x.to(self.first.weight.device))
        return self.last(Thinned.apply(h).to("fake:0"))


def left_by(device: str, *, measured: bool) -> list[Tensor]:
    """The weights and the generators after some steps, each of which is measured or none is."""
    model = Net(device)
    torch.fake.manual_seed_all(0)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, foreach=False)
    meter = NoiseScaleMeter(model, every_n_steps=1) if measured else None
    for step in range(4):
        x = torch.randn(6, 6, generator=torch.Generator().manual_seed(step))
        loss = model(x).square().mean()
        if meter is not None:
            meter.before_backward(loss, len(x))
        loss.backward()
        if meter is not None:
            meter.step()
        optimizer.step()
        optimizer.zero_grad()
    assert meter is None or meter.measured_steps == 4
    return [*model.parameters(), *(torch.fake.get_rng_state(index) for index in (0, 1))]


@pytest.mark.parametrize("device", ["fake:0", "fake:1"])
def test_weights_and_generators_are_bitwise_those_without_the_meter(device: str) -> None:
    """The loss is on fake:0."""
    pairs = zip(left_by(device, measured=True), left_by(device, measured=False), strict=True)

    assert all(torch.equal(a, b) for a, b in pairs)
