# SPDX-License-Identifier: Apache-2.0
import math

import torch
import torch.distributed as dist
from ranks import on_ranks

from noisescale.methods.across_ranks.alike import check_alike, check_same_values


def test_ranks_with_the_same_tensors_pass_also_where_values_are_not_finite() -> None:
    def one_rank() -> None:
        tensors = [torch.tensor([math.nan, 1.0]), torch.ones(2, dtype=torch.complex64)]
        check_alike(tensors, [None])
        check_same_values(tensors, [None])
        check_same_values([], [None])

    on_ranks(2, one_rank)


def test_a_change_that_leaves_the_sum_is_found_too() -> None:
    def one_rank() -> bool:
        tensor = torch.tensor([3.0, -3.0] if dist.get_rank() else [1.0, -1.0])
        try:
            check_same_values([torch.ones(1), tensor], [None])
        except ValueError as error:
            return "parameter 1 (shape (2,)) on rank 1 than on rank 0" in str(error)
        return False

    assert all(on_ranks(2, one_rank))


def test_bits_are_compared_and_not_sums_that_depend_on_the_order_of_addition() -> None:
    def one_rank() -> None:
        tensor = torch.randn(300, 301, generator=torch.Generator().manual_seed(0))
        here = tensor.t().contiguous().t() if dist.get_rank() else tensor  # other memory, same bits
        check_same_values([here, here.half(), here.double()], [None])

    on_ranks(2, one_rank)


def test_a_permutation_is_another_value() -> None:
    def one_rank() -> bool:
        tensor = torch.arange(4.0)
        try:
            check_same_values([tensor.flip(0) if dist.get_rank() else tensor], [None])
        except ValueError:
            return True
        return False

    assert all(on_ranks(2, one_rank))
