# SPDX-License-Identifier: Apache-2.0
import pytest
import torch

from noisescale.batches.row_groups import checked_row_groups
from noisescale.collectors.halves.within_groups import has_pairs, signs_within


@pytest.mark.parametrize("sizes", [(4, 4, 2), (3, 5, 1, 2)])
def test_halves_have_the_expectation_that_the_formula_says(sizes: tuple[int, ...]) -> None:
    """Σ|C|² - ΣC·C'/(n - 1) over pairs of different rows of a group; nothing of a lone row."""
    torch.manual_seed(0)
    of_rows = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    order = torch.randperm(len(of_rows))
    groups, shares = of_rows[order], torch.randn(len(of_rows), 3).double() + 0.5
    expected = 0.0
    for group, n in enumerate(sizes):
        own = shares[groups == group]
        squares = own.square().sum().item()
        if n > 1:
            expected += squares - (own.sum(0).square().sum().item() - squares) / (n - 1)

    drawn = torch.stack([signs_within(checked_row_groups(groups), k) for k in range(4000)])
    found = (drawn.double() @ shares).square().sum(1).mean().item()

    assert found == pytest.approx(expected, rel=0.06)
    assert drawn[:, groups == 0].sum(1).abs().max() < 1e-6
    assert drawn.unique(dim=0).shape[0] > 20


def test_a_group_needs_two_rows() -> None:
    assert has_pairs(checked_row_groups("aab"))
    assert not has_pairs(checked_row_groups("abc"))
    assert signs_within(checked_row_groups("abc"), 0).tolist() == [0.0] * 3
