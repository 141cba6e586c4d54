# SPDX-License-Identifier: Apache-2.0
"""What the models of neutral.py are made of: a training, a case, and batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

Batch = Any

ROWS = 6
TOKENS, LENGTH = 64, 16


class Training(NamedTuple):
    """A model, and how it is trained."""

    model: nn.Module
    loss: Callable[[Batch], Tensor]
    """Mean over a batch."""
    draw: Callable[[torch.Generator], Batch]
    rows: int = ROWS


class Case(NamedTuple):
    """A model of a library."""

    library: str
    """The name that is imported."""
    model: str
    variant: str
    """What differs from the model as its library makes it; "" for none."""
    make: Callable[[], Training]
    bears: bool = True
    """Whether it bears a second backward pass, by what its authors wrote."""


class NotThere(Exception):  # noqa: N818 - it is no failure
    """A model has no such variant."""


def tokens(g: torch.Generator, rows: int = ROWS, length: int = LENGTH) -> Tensor:
    return torch.randint(3, TOKENS, (rows, length), generator=g)


def images(g: torch.Generator, size: int = 32, channels: int = 3) -> Tensor:
    return torch.randn(ROWS, channels, size, size, generator=g)


def classes(g: torch.Generator, classes: int = 5) -> Tensor:
    return torch.randint(classes, (ROWS,), generator=g)


def points(g: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(ROWS, *shape, generator=g)
