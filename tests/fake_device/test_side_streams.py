# SPDX-License-Identifier: Apache-2.0
"""Gradients that come on several streams, and what reads them before it may."""

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fake_device.streams import Hazard, Streams
from noisescale import NoiseScaleMeter
from noisescale.methods.inner_product import NoiseAlongGradient

DEVICE = torch.device("fake:0")
MICRO_BATCHES = 2


class TwoBranches(nn.Module):
    """Two branches, the second of which runs on a stream of its own, as what it reads does."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 24))
        self.second = nn.Sequential(nn.Linear(8, 4), nn.Tanh(), nn.Linear(4, 24))
        self.to(DEVICE)
        self.side = torch.Stream(DEVICE)

    def forward(self, x: Tensor, *, new_weights: bool) -> Tensor:
        here = torch.accelerator.current_stream()
        if new_weights:  # else this stream has nothing to wait for
            self.side.wait_stream(here)
        with self.side:
            z = self.second(x.to(DEVICE))
        y = self.first(x.to(DEVICE))
        here.wait_stream(self.side)
        return y + z


def hazards(way: str, *, along_momentum: bool = False) -> Counter[Hazard]:
    """From the second measured step on, where lines of the package have to do with them."""
    model = TwoBranches()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, foreach=False)
    options: dict[str, Any] = {"extra": [NoiseAlongGradient] * along_momentum}
    meter = NoiseScaleMeter(model, small_batch=way, every_n_steps=1, optimizer=optimizer, **options)  # type: ignore[arg-type]

    def steps(number: int) -> None:
        for _ in range(number):
            for micro in range(MICRO_BATCHES):
                x = torch.randn(6, 8)
                loss = model(x, new_weights=micro == 0).square().mean() / MICRO_BATCHES
                meter.backward(loss, len(x))
            meter.step()
            optimizer.step()
            optimizer.zero_grad()

    steps(1)
    with Streams() as streams:
        steps(3)
    found = streams.hazards()
    assert {o.stream[1] for o in streams.operations} >= {0, model.side.stream_id}
    assert meter.measured_steps == 4 - (way == "example")
    return Counter({h: n for h, n in found.items() if "noisescale/" in f"{h.earlier}{h.later}"})


REUSED = {"reused while in use"}


@pytest.mark.parametrize(
    ("way", "along_momentum", "dropped", "kinds"),
    [
        ("micro_batch", False, "captured.current_stream", {"read before written"}),
        ("micro_batch", True, "gradient_norms.GradientNorms.keep", REUSED),
        ("example", False, "gradient_norms.GradientNorms.keep", REUSED),
        ("micro_batch", False, "captured.keep_from", REUSED),
    ],
)
def test_norms_are_read_once_they_are_there_and_freed_once_they_were_read(
    way: str,
    along_momentum: bool,
    dropped: str,
    kinds: set[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Their memory is that of the stream that made them, and they are gone after the pass."""
    if dropped != "captured.keep_from":
        # Gradients of each branch are normed in mid-pass, while some of the other are kept.
        monkeypatch.setattr("noisescale.collectors.captured._MOST_BYTES_KEPT", 600)
    assert not hazards(way, along_momentum=along_momentum)

    monkeypatch.setattr(f"noisescale.collectors.{dropped}", lambda *_: None)
    found = {hazard.kind for hazard in hazards(way, along_momentum=along_momentum)}
    assert found >= kinds
    assert found == kinds or dropped == "captured.current_stream"
