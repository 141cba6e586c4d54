# SPDX-License-Identifier: Apache-2.0
from typing import Any

import pytest
import torch

from noisescale.batches.weights import guess_terms_in, terms_in

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


FLOATS = torch.ones(2, 4, 8)


@pytest.mark.parametrize(
    ("batch", "count"),
    [
        ({"tokens": LABELS, "x": FLOATS}, 2),  # neither 0 nor -100
        ((LABELS, torch.tensor([0, 1])), 2),
        *((FLOATS, 8), ([FLOATS[..., 0], torch.ones(2)], 8)),
        ({"x": FLOATS, "lengths": torch.tensor([4, 3])}, 7),
        ({"x": FLOATS, "text_len": torch.tensor([4, 3, 2]), "lengths": 7}, 8),
    ],
)
def test_tokens_of_fields_without_known_names_are_guessed(batch: Any, count: int) -> None:
    found = guess_terms_in(batch)

    assert found is not None
    assert (found.number(), found.width) == (count, 4)


def test_nothing_is_guessed_of_what_has_no_sequences() -> None:
    for batch in (torch.ones(2, 3, 8, 8), torch.ones(2), [MASK.bool()], {"x": None}, "text"):
        assert guess_terms_in(batch) is None
