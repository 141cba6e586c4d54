# SPDX-License-Identifier: Apache-2.0
"""The weights of batches in a loss: what a user's function returns, and what a batch shows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from noisescale.checks import refuse


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
