# SPDX-License-Identifier: Apache-2.0
"""The weights of batches in a loss: what a user's function returns, and what a batch shows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from noisescale.checks import refuse


class GuessedTerms(NamedTuple):
    """How many tokens of a batch may count, if its rows are sequences."""

    number: Callable[[], Tensor | float]
    width: int
    """The second dimension, which is the same in all batches if rows are no sequences."""


def checked_weight(weight: Any) -> float | Tensor:
    """Return what `weight_fn` returned, as a number or a tensor; raise a ValueError otherwise.

    Negative and infinite weights pass: their step is left out on all ranks.
    """
    if isinstance(weight, Tensor) and not weight.is_complex():
        return weight
    try:
        return float(weight)
    except (TypeError, ValueError):
        remedy = "Return the tokens of the batch that count in the loss, or those of each row."
        refuse("weight_fn", "return a number or a tensor", repr(weight), remedy)


def terms_in(batch: Any) -> Tensor | None:
    """Return how many tokens of a batch count, by labels of -100 or attention mask; or None."""
    if not isinstance(batch, Mapping):
        return None
    labels, mask = batch.get("labels"), batch.get("attention_mask")
    if isinstance(labels, Tensor) and labels.dim() > 1 and not labels.is_floating_point():
        return labels.ne(-100).sum()
    if isinstance(mask, Tensor) and mask.dim() == 2:
        return mask.ne(0).sum()
    return None


def guess_terms_in(batch: Any) -> GuessedTerms | None:
    """Guess the tokens of a batch whose fields have no known names; None if it has no sequences.

    They are the sum of its lengths, if a field is named so, or the positive numbers in the first
    table of integers (padding is 0 or -100), or rows x positions of the first floats.
    """
    named = batch.items() if isinstance(batch, Mapping) else ()
    several = batch if isinstance(batch, (list, tuple)) else [batch]
    tensors = [x for x in ([x for _, x in named] or several) if isinstance(x, Tensor)]
    sequences = [x for x in tensors if x.layout == torch.strided and x.dim() in (2, 3)]
    tables = [x for x in sequences if x.dim() == 2 and x.dtype in (torch.int64, torch.int32)]
    found = [*tables, *(x for x in sequences if x.is_floating_point())]
    if not found:
        return None
    rows, width = found[0].shape[:2]
    lengths = [x for name, x in named if "len" in str(name) and _is_of(rows, x)]
    if lengths:
        return GuessedTerms(lengths[0].sum, width)
    if tables:
        return GuessedTerms(lambda: tables[0].gt(0).sum(), width)
    return GuessedTerms(lambda: float(rows * width), width)


def _is_of(rows: int, x: Any) -> bool:
    return isinstance(x, Tensor) and not x.is_floating_point() and x.shape == (rows,)
