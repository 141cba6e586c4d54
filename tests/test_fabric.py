# SPDX-License-Identifier: Apache-2.0
"""The meter in a loop on Lightning Fabric, against gradients of plain copies of the model."""

import copy
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from fits import data, loss_of, network
from lightning.fabric import Fabric
from lightning.fabric.plugins import MixedPrecision
from ranks import as_torchrun, on_ranks
from tiers import slow
from torch import Tensor

from noisescale import NoiseScaleMeter

STEPS, ACCUMULATED, SIZE = 6, 2, 4
TYPES = {"16-mixed": torch.float16, "bf16-mixed": torch.bfloat16}


def gradient(model: torch.nn.Module, batch: list[Tensor], precision: str) -> np.ndarray:
    plain = copy.deepcopy(model)
    plain.zero_grad()
    mixed = torch.autocast("cpu", TYPES[precision]) if precision in TYPES else nullcontext()
    with mixed:
        loss_of(plain, batch).backward()
    return torch.cat([p.grad.flatten() for p in plain.parameters()]).double().numpy()


def train(precision: str, *, clips: bool) -> tuple[Any, list[list[np.ndarray]]]:
    """What is measured, and the gradient of each micro-batch of each step."""
    plugins = [MixedPrecision("16-mixed", "cpu")] if precision == "16-mixed" else []
    options = {} if plugins else {"precision": precision}
    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp", plugins=plugins, **options)
    fabric.launch()
    net = network()
    model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
    scaler = getattr(fabric._precision, "scaler", None)
    assert (scaler is not None) == (precision == "16-mixed")
    if scaler is not None:
        scaler._init_scale = 2.0**10  # small enough for no step to overflow
    meter = NoiseScaleMeter(model, window=50, grad_scaler=scaler)
    x, y = data(1000).tensors
    gradients: list[list[np.ndarray]] = []
    for step in range(STEPS):
        gradients.append([])
        for index in range(ACCUMULATED):
            last = index == ACCUMULATED - 1
            start = SIZE * ((step * ACCUMULATED + index) * 2 + fabric.global_rank)
            batch = [x[start : start + SIZE], y[start : start + SIZE]]
            gradients[-1].append(gradient(net, batch, precision))
            with fabric.no_backward_sync(model, enabled=not last):
                loss = loss_of(model, batch) / ACCUMULATED
                meter.before_backward(loss, SIZE, capture_average=clips and last)
                fabric.backward(loss)
        if clips:
            fabric.clip_gradients(model, optimizer, max_norm=1e-3)
        meter.step()
        optimizer.step()
        optimizer.zero_grad()
    return meter.sums.mean, gradients


@pytest.mark.parametrize(
    ("precision", "clips"),
    [
        ("16-mixed", True),
        slow("16-mixed", False),
        *(slow(precision, clips) for precision in ("32-true", "bf16-mixed") for clips in (0, 1)),
    ],
)
def test_the_wrapper_and_the_scaler_of_fabric_are_looked_through(
    precision: str, clips: bool
) -> None:
    runs = on_ranks(2, as_torchrun(lambda: train(precision, clips=clips)))

    ranks = np.array([np.mean(gradients, axis=1) for _, gradients in runs])
    small = (ranks**2).sum(2).mean(0)
    big = (ranks.mean(0) ** 2).sum(1)
    n = SIZE * ACCUMULATED
    trace = np.mean((small - big) / (1 / n - 1 / (2 * n)))
    signal = np.mean(2 * big - small)
    for found, _ in runs:
        rel = 1e-5 if precision == "32-true" else 1e-3
        assert found.noise_trace == pytest.approx(trace, rel=rel)
        assert found.grad_sq_norm == pytest.approx(signal, rel=rel, abs=rel)
