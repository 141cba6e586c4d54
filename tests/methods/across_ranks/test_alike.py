# SPDX-License-Identifier: Apache-2.0
import math
from typing import Any

import torch
import torch.distributed as dist
from methods.across_ranks.small_net import error_of
from methods.together import on

from noisescale.methods.across_ranks.alike import check_alike, check_same_values


@on(2)
def compared() -> list[Any]:
    rank = dist.get_rank()
    finite = torch.randn(300, 301, generator=torch.Generator().manual_seed(0))
    moved = finite.t().contiguous().t() if rank else finite  # other memory, the same bits
    tensors = [torch.tensor([math.nan, 1.0]), torch.ones(2, dtype=torch.complex64)]
    tensors += [moved, moved.half(), moved.double()]
    check_alike(tensors, [None])
    check_same_values(tensors, [None])
    check_same_values([], [None])
    same_sum = torch.tensor([3.0, -3.0] if rank else [1.0, -1.0])
    mixed = torch.arange(4.0).flip(0) if rank else torch.arange(4.0)
    others = [[torch.ones(1), same_sum], [mixed]]
    return [error_of(lambda other=other: check_same_values(other, [None])) for other in others]


def test_the_same_bits_pass_and_neither_another_sum_nor_another_order_does() -> None:
    for same_sum, mixed in compared():
        assert "parameter 1 (shape (2,)) on rank 1 than on rank 0" in str(same_sum)
        assert "parameter 0 (shape (4,)) on rank 1 than on rank 0" in str(mixed)
