# SPDX-License-Identifier: Apache-2.0
"""Whether a loss is a cross-entropy alone, which falls towards no floor but that of the data."""

from __future__ import annotations

from typing import Any

from torch import Tensor

_FACTORS = ("Div", "Mul", "Mean", "Sum", "ToCopy", "View", "Reshape", "Squeeze", "Unsqueeze")
"""Operations that leave a loss as it is but for a factor."""


def is_cross_entropy(loss: Tensor) -> bool:
    """Return whether a loss is a mean of cross-entropies alone, but for a factor.

    Another loss may have a floor: a penalty, soft labels, the entropy of what is reconstructed. Its
    slope is then not that of what is left to learn. A loss without a graph is taken as given.

    Examples:
        >>> import torch
        >>> logits, labels = torch.zeros(2, 3, requires_grad=True), torch.tensor([0, 2])
        >>> of_labels = torch.nn.functional.cross_entropy(logits, labels)
        >>> is_cross_entropy(of_labels / 4), is_cross_entropy(of_labels + logits.square().sum())
        (True, False)
    """
    node: Any = loss.grad_fn
    if node is None:
        return True
    while True:
        name = node.name()
        if name.startswith("NllLoss"):
            return True
        before = [one for one, _ in node.next_functions if one is not None]
        if len(before) != 1 or not name.startswith(_FACTORS):
            return False
        (node,) = before
