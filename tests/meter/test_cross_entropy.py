# SPDX-License-Identifier: Apache-2.0
"""Which losses are cross-entropies alone."""

import pytest
import torch
from torch.nn import functional

from noisescale.meter.cross_entropy import is_cross_entropy


def losses_of(kind: str) -> torch.Tensor:
    x, y = torch.randn(6, 5, requires_grad=True), torch.tensor([0, 1, 2, 3, 4, 0])
    plain = functional.cross_entropy(x, y)
    return {
        "plain": plain,
        "scaled": torch.amp.GradScaler("cpu").scale(plain / 4),
        "by hand": (functional.cross_entropy(x, y, reduction="none") * torch.rand(6)).sum() / 3,
        "bfloat16": functional.cross_entropy(x.bfloat16(), y).float(),
        "penalty": plain + x.square().sum(),
        "offset": plain + 1.0,
        "smooth": functional.cross_entropy(x, y, label_smoothing=0.1),
        "soft": functional.cross_entropy(x, torch.full((6, 5), 0.2)),
        "binary": functional.binary_cross_entropy_with_logits(x, torch.rand(6, 5)),
        "squares": x.square().mean(),
    }[kind]


@pytest.mark.parametrize("kind", ["plain", "scaled", "by hand", "bfloat16"])
def test_a_cross_entropy_is_known_behind_factors(kind: str) -> None:
    assert is_cross_entropy(losses_of(kind))


@pytest.mark.parametrize("kind", ["penalty", "offset", "smooth", "soft", "binary", "squares"])
def test_a_loss_that_may_have_a_floor_is_none(kind: str) -> None:
    assert not is_cross_entropy(losses_of(kind))
