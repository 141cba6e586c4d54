# SPDX-License-Identifier: Apache-2.0
import math

import pytest
import torch

from noisescale.batches.row_groups import checked_row_groups
from noisescale.collectors.rows.group_levels import (
    NO_LEVELS,
    UNKNOWN_LEVELS,
    GroupedPass,
    StepLevels,
    WithinBatch,
    levels_of_step,
    split_group,
    variance_of_step,
)


def one_pass(
    groups: object, row_weights: torch.Tensor | None = None, weight: float = 1.0
) -> GroupedPass:
    return GroupedPass(checked_row_groups(groups), row_weights, weight)  # type: ignore[arg-type]


def step(passes: list[GroupedPass], sq_norm: float = 1.0, still: float = 0.0) -> StepLevels:
    measured = WithinBatch(torch.tensor([sq_norm]), 1, 0, still)
    found = StepLevels.of_ranks([float(x) for x in levels_of_step(passes, measured)], 1)
    assert found is not None
    return found


def test_equal_rows_have_as_much_noise_as_there_are_rows() -> None:
    levels = step([one_pass("aabbcc")], sq_norm=0.5, still=1.0)

    assert levels.noise_within == pytest.approx(0.5 * 6)
    assert (levels.row_share, levels.group_share) == pytest.approx((1 / 6, 1 / 3))
    assert levels.still == pytest.approx(1 / 3)


def test_rows_that_are_alone_in_their_group_count_and_show_nothing() -> None:
    levels = step([one_pass("aabbc")], sq_norm=0.5)

    assert levels.noise_within == pytest.approx(0.5 / (4 / 25))
    assert levels.group_share == pytest.approx((4 + 4 + 1) / 25)


def test_weights_of_rows_and_of_passes() -> None:
    of_rows = step([one_pass("aabb", torch.tensor([1.0, 2.0, 3.0, 4.0]))], sq_norm=0.3)
    assert of_rows.noise_within == pytest.approx(0.3 * 100 / 30)
    assert of_rows.group_share == pytest.approx((9 + 49) / 100)

    # A first pass of weight 1 and a second of 3, with two rows each.
    of_passes = step([one_pass("aa"), one_pass("bb", weight=3.0)], sq_norm=0.3)
    assert of_passes.noise_within == pytest.approx(0.3 * 16 / (2 * 0.25))
    assert of_passes.row_share == pytest.approx((2 * 0.25 + 2 * 2.25) / 16)
    assert of_passes.group_share == pytest.approx((1 + 9) / 16)


def test_a_group_in_two_passes_is_one_group_unless_it_is_numbered_in_each() -> None:
    named, numbered = [one_pass("ab"), one_pass("bc")], [one_pass([0, 1]), one_pass([0, 1])]

    assert split_group(named) == "'b'"
    assert step([one_pass("aab"), one_pass("bcc")]).group_share == pytest.approx(12 / 36)
    assert split_group(numbered) is None
    assert step([one_pass([0, 0, 1]), one_pass([0, 0, 1])]).group_share == pytest.approx(10 / 36)


def test_ranks_are_averaged() -> None:
    """Of each rank the captured gradient is twice its part of the step's."""
    said = [levels_of_step([one_pass("aabb")], WithinBatch(torch.tensor([0.4]), 1, 0, 0.0))] * 2
    summed = [float(a) + float(b) for a, b in zip(*said, strict=True)]

    levels = StepLevels.of_ranks(summed, 2)

    assert levels is not None
    assert levels.noise_within == pytest.approx(0.2 * 8)
    assert levels.group_share == pytest.approx(1 / 4)


def test_a_step_without_groups_or_of_which_a_rank_knows_nothing_has_no_levels() -> None:
    known = levels_of_step([one_pass("aabb")], WithinBatch(torch.tensor([0.4]), 1, 0, 0.0))
    for other in (NO_LEVELS, UNKNOWN_LEVELS, levels_of_step([one_pass("aabb")], None)):
        summed = [float(a) + float(b) for a, b in zip(known, other, strict=True)]
        assert StepLevels.of_ranks(summed, 2) is None
    assert StepLevels.of_ranks([0.0] * 8, 1) is None
    assert StepLevels.of_ranks([1.0, math.inf, *[1.0] * 6], 1) is None


def test_the_variance_of_a_step_follows_from_one_of_its_batches() -> None:
    """Of v² = 5 between groups and s² = 40 within them, with weights and groups that are shared."""
    weights = [torch.tensor([1.0, 2.0, 3.0, 0.5]), torch.tensor([2.0, 1.0, 1.0])]
    passes = [one_pass("aabc", weights[0]), one_pass("abb", weights[1])]
    between = 5 * (3**2 + 3**2 + 0.5**2) + 40 * (1 + 4 + 9 + 0.25)
    halves = WithinBatch(torch.tensor([40 * (1 + 4.0)]), 1, 0, 0.0)

    found = variance_of_step(passes, torch.tensor([between]), halves)

    squares = (weights[0].square().sum() + weights[1].square().sum()).item()
    assert found.item() == pytest.approx(5 * (5**2 + 5**2 + 0.5**2) + 40 * squares)
