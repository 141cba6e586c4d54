# SPDX-License-Identifier: Apache-2.0
from typing import Any

import pytest
import torch
from torch import nn

from noisescale.collectors.gradient_norms import GradientNorms, Piece

NAMES = ["blocks.0.attention.weight", "blocks.0.norm.weight", "blocks.1.norm.bias", "head.weight"]


def norms(groups: Any) -> GradientNorms:
    return GradientNorms([(name, nn.Parameter(torch.ones(2, 3))) for name in NAMES], groups)


@pytest.mark.parametrize(
    "groups",
    [
        {"normalization": r"norm\.", "attention": "attention", "all are taken": "^blocks"},
        lambda name: {"norm": "normalization", "attention": "attention"}.get(name.split(".")[-2]),
    ],
)
def test_each_groups_squares_are_summed_apart_and_the_rest_too(groups: Any) -> None:
    grouped = norms(groups)
    pieces = [Piece(i, torch.full((2, 3), float(i + 1))) for i in range(4)]

    sums = grouped.sums(grouped.of(pieces)).tolist()

    by_name = dict(zip((*grouped.group_names, "rest"), sums, strict=True))
    assert by_name == {
        "normalization": pytest.approx(6 * (2**2 + 3**2)),
        "attention": pytest.approx(6 * 1),
        "rest": pytest.approx(6 * 4**2),
    }


def test_without_groups_there_is_one_entry() -> None:
    everything = norms(None)
    pieces = [Piece(i, torch.ones(2, 3)) for i in range(4)]

    assert everything.group_names == ()
    assert everything.sums(everything.of(pieces)).tolist() == [pytest.approx(24)]
