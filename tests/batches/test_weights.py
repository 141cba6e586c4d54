# SPDX-License-Identifier: Apache-2.0
from typing import Any

import pytest
import torch

from noisescale.batches.weights import terms_in

LABELS = torch.tensor([[-100, 0, 7, -100], [-100, -100, -100, 5]])
MASK = torch.tensor([[1, 1, 2, 0], [1, 1, 0, 0]])  # packed sequences are numbered


@pytest.mark.parametrize(
    ("batch", "count"),
    [
        ({"labels": LABELS, "attention_mask": MASK}, 3),
        ({"labels": LABELS[0], "attention_mask": MASK}, 5),  # a class for each row
        ({"labels": LABELS.float(), "attention_mask": MASK}, 5),
        *(({"attention_mask": MASK}, 5), ({"attention_mask": MASK[0]}, None)),
        *(({"labels": LABELS[0]}, None), ({}, None), ((LABELS, MASK), None)),
    ],
)
def test_tokens_that_count_have_a_label_or_are_in_the_mask(batch: Any, count: int | None) -> None:
    found = terms_in(batch)

    assert (found if found is None else found.item()) == count
