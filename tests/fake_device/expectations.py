# SPDX-License-Identifier: Apache-2.0
"""Steps of one process in each way of measuring, and what they may show by the CPU."""

from collections.abc import Sequence

import torch
from brute_force import (
    Expected,
    examples_of,
    expected,
    gradients_of_examples,
    halvings,
    micro_batch,
)
from torch import nn
from ways_of_capture import batch, half_squares

ROWS = {"half": (6,), "micro_batch": (3, 6, 2), "example": (3, 4)}
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
    if way == "example":
        parts = [part for some in single for part in examples_of(some)]
    return [expected(parts, columns)]
