# SPDX-License-Identifier: Apache-2.0
"""The slope of the training loss, from losses of a known slope."""

import math

import numpy as np
import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks

from noisescale.scheduling.training_loss import TrainingLoss
from noisescale.tradeoff.budget import Slice, slice_of


def of_a_power(exponent: float, steps: int, *, until: float, factor: float = 3.0) -> TrainingLoss:
    """Losses of steps whose batches grow, as they fall by a power of the examples."""
    losses = TrainingLoss()
    sizes = np.linspace(1, 5, steps)
    for seen in np.cumsum(sizes) / sizes.sum():
        if seen > until:
            break
        losses.add(torch.tensor(factor * seen**-exponent), 8, share=float(seen))
    losses.read(until)
    return losses


@pytest.mark.parametrize("exponent", [0.02, 0.1, 0.5, -0.1])
def test_a_power_law_has_its_exponent_as_slope(exponent: float) -> None:
    assert of_a_power(exponent, 2000, until=0.35).slope == pytest.approx(exponent, rel=0.01)


def test_slices_begin_at_5_percent_and_have_a_fifth_in_the_logarithm() -> None:
    losses = of_a_power(0.1, 2000, until=0.136)

    assert [one.number for one in losses.slices] == [0, 1, 2, 3, 4]
    for one in losses.slices:
        low = 0.05 * math.exp(one.number / 5)
        assert low < one.share < low * math.exp(0.2)
        assert 3 * (low * math.exp(0.2)) ** -0.1 < one.loss < 3 * low**-0.1
    assert slice_of(0.0499) == -1
    assert slice_of(0) == -math.inf


def test_micro_batches_weigh_by_their_examples() -> None:
    losses = TrainingLoss()
    for loss, examples in ((1.0, 30), (4.0, 10)):
        losses.add(torch.tensor(loss), examples, share=0.05)
    losses.read(share=0.07)

    assert losses.slices[0].loss == 1.75


def test_only_finished_slices_are_read_and_each_once() -> None:
    losses = TrainingLoss()
    for share in (0.05, 0.0625, 0.0761):
        losses.add(torch.tensor(1.0), 1, share)

    losses.read(share=0.0762)
    assert [one.number for one in losses.slices] == [0, 1]
    losses.read(share=0.0763)
    assert [one.number for one in losses.slices] == [0, 1]
    losses.read(share=0.2)
    assert [one.number for one in losses.slices] == [0, 1, 2]


@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan, math.inf])
def test_a_loss_that_has_no_logarithm_has_no_slope(bad: float) -> None:
    losses = of_a_power(0.1, 2000, until=0.2)
    losses.add(torch.tensor(bad), 1, share=0.3)
    losses.read(share=0.34)

    assert math.isnan(losses.slope)


def test_a_loss_that_may_have_a_floor_has_no_slope() -> None:
    losses = of_a_power(0.1, 2000, until=0.2)
    losses.add(torch.ones(3, requires_grad=True).sum(), 1, share=0.3)
    losses.read(share=0.34)

    assert losses.has_a_floor
    assert math.isnan(losses.slope)


def read_on_a_rank() -> tuple[list[Slice], bool]:
    """Of the second rank, one loss has a penalty, and batches are three times as large."""
    rank, losses = dist.get_rank(), TrainingLoss()
    loss = torch.tensor(1.0 + rank, requires_grad=True)
    losses.add(loss.square() if rank else loss.detach(), 10 * 3**rank, share=0.05)
    losses.read(share=0.07)
    return losses.slices, losses.has_a_floor


def test_ranks_know_the_same() -> None:
    first, second = on_ranks(2, read_on_a_rank)

    assert first == second
    ((one,), has_a_floor) = first
    assert one.loss == pytest.approx((10 * 1 + 30 * 4) / 40)
    assert has_a_floor


def test_two_slices_have_no_slope_yet() -> None:
    losses = of_a_power(0.1, 2000, until=0.076)

    assert len(losses.slices) == 2
    assert math.isnan(losses.slope)


def test_a_run_goes_on_from_its_state_with_the_slice_that_was_under_way() -> None:
    losses, resumed = of_a_power(0.1, 2000, until=0.2), TrainingLoss()
    losses.add(torch.tensor(99.0), 1, share=0.21)

    resumed.load_state_dict(losses.state_dict())
    for each in (losses, resumed):
        each.add(torch.tensor(2.0), 8, share=0.22)
        each.read(share=0.3)

    assert resumed.slices == losses.slices
    assert resumed.slices[-1].number == slice_of(0.22)


def one_rank_alone() -> tuple[list[Slice], float]:
    """Only rank 0 hears losses, and later rank 1 alone."""
    rank, losses = dist.get_rank(), TrainingLoss()
    for share, hears in ((0.055, 0), (0.07, 0), (0.08, 1)):
        if rank == hears:
            losses.add(torch.tensor(2.0 - share), 8, share)
    losses.read(0.2)
    return losses.slices, losses.slope


@pytest.mark.slow
def test_losses_that_one_rank_alone_hears_leave_ranks_in_step() -> None:
    first, second = on_ranks(2, one_rank_alone)

    assert first[0] == second[0]
    assert [one.number for one in first[0]] == [0, 1, 2]


def test_a_slope_that_may_be_chance_is_none() -> None:
    losses, flat = TrainingLoss(), [1.0, 1.05, 0.97, 1.02, 0.99]
    for number, loss in enumerate(flat):
        losses.add(torch.tensor(loss), 8, share=0.055 * math.exp(0.2 * number))
    losses.read(0.2)

    assert len(losses.slices) == 5
    assert math.isnan(losses.slope)
