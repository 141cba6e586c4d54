# SPDX-License-Identifier: Apache-2.0
"""Steps of one process in each way of measuring, and what they may show by the CPU."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from brute_force import (
    Expected,
    expected,
    gradients_of_examples,
    halvings,
    micro_batch,
)
from torch import nn
from ways_of_capture import Net, batch, half_squares

from noisescale import NoiseScaleMeter
from noisescale.collectors.rows.step_norms import StepNorms

ROWS = {"half": (6,), "micro_batch": (3, 6, 2)}
"""Of the micro-batches of a step."""


def expectations(
    model: nn.Module, way: str, step: int, columns: Sequence[int] | None = None
) -> list[Expected]:
    """Of a model on the CPU: one thing, but by halves one for each way to halve the batch."""
    single = [
        gradients_of_examples(model, batch(step, 0, micro, n), half_squares)
        for micro, n in enumerate(ROWS[way])
    ]
    if way == "half":
        return halvings(single[0], columns)
    parts = [micro_batch(torch.stack(some).mean(0), len(some)) for some in single]
    return [expected(parts, columns)]


def train(
    model: nn.Module, meter: NoiseScaleMeter, way: str, step: int, scaler: Any = None
) -> None:
    """One step of a model, wherever it is."""
    model.zero_grad()
    device = next(model.parameters()).device
    for micro, n in enumerate(ROWS[way]):
        x, y = (part.to(device) for part in batch(step, 0, micro, n))
        loss = half_squares(model(x), y) / len(ROWS[way])
        meter.backward(loss if scaler is None else scaler.scale(loss), n)
    meter.step()


def agreed(got: StepNorms, wanted: Sequence[Expected], rel: float = 1e-5) -> list[Expected]:
    """What may have been expected of the norms that were found."""
    return [one for one in wanted if got[:4] == pytest.approx(tuple(one), rel=rel)]


def steps_expected(
    meter: NoiseScaleMeter, way: str, recorded: Sequence[StepNorms], rel: float
) -> list[tuple[StepNorms, Expected]]:
    """Each measured step of a `Net` that stands still, with what was expected of it."""
    assert (meter.measured_steps, meter.skipped_steps) == (len(recorded), 0)
    found = [
        (got, *agreed(got, expectations(Net(), way, step), rel)[:1])
        for step, got in enumerate(recorded)
    ]
    assert all(len(pair) == 2 for pair in found)
    return found  # type: ignore[return-value]
