# SPDX-License-Identifier: Apache-2.0
"""Gradients that come on several streams, and what reads them before it may."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from fake_device.streams import Hazard, Streams
from noisescale import NoiseScaleMeter
from noisescale.collectors.gradient_norms import GradientNorms
from noisescale.methods.inner_product import NoiseAlongGradient

DEVICE = torch.device("fake:0")
MICRO_BATCHES = {"micro_batch": 2, "half": 1, "example": 2}


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
            for micro in range(MICRO_BATCHES[way]):
                x = torch.randn(6, 8)
                loss = model(x, new_weights=micro == 0).square().mean() / MICRO_BATCHES[way]
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


@contextmanager
def a_few_bytes_kept() -> Iterator[None]:
    """So that gradients of each branch are normed in mid-pass, while some of the other are kept."""
    with patch("noisescale.collectors.captured._MOST_BYTES_KEPT", 600):
        yield


@pytest.mark.parametrize("way", MICRO_BATCHES)
def test_norms_are_read_once_they_are_there_and_freed_once_they_were_read(way: str) -> None:
    assert not hazards(way)


@pytest.mark.parametrize("along_momentum", [False, True])
def test_gradients_that_are_normed_in_mid_pass_are_those_of_one_stream(
    along_momentum: bool,
) -> None:
    with a_few_bytes_kept():
        assert not hazards("micro_batch", along_momentum=along_momentum)


def test_one_list_for_all_streams_would_be_a_hazard(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above finds what it is there for."""
    monkeypatch.setattr("noisescale.collectors.captured.current_stream", lambda _: None)

    with a_few_bytes_kept():
        found = hazards("micro_batch")
    assert "read before written" in {hazard.kind for hazard in found}


@pytest.mark.parametrize(("way", "along_momentum"), [("micro_batch", True), ("example", False)])
def test_norms_that_are_not_kept_would_be_a_hazard(
    way: str, along_momentum: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As their memory is that of the stream that made them, and they are gone after the pass."""
    monkeypatch.setattr(GradientNorms, "keep", lambda *_: None)

    with a_few_bytes_kept():
        found = hazards(way, along_momentum=along_momentum)
    assert {hazard.kind for hazard in found} == {"reused while in use"}


def test_gradients_that_are_not_kept_would_be_a_hazard(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("noisescale.collectors.captured.keep_from", lambda *_: None)

    found = hazards("micro_batch")
    assert {hazard.kind for hazard in found} == {"reused while in use"}
