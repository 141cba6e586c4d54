# SPDX-License-Identifier: Apache-2.0
"""Gradients of successive steps beside the noise between ranks or micro-batches."""

import math
import warnings
from contextlib import nullcontext, suppress
from typing import Any
from unittest import mock

import pytest
import torch
from ranks import on_ranks
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from noisescale import NoiseScaleMeter
from noisescale.collectors import steps_apart
from noisescale.collectors.coordinates import Coordinates
from noisescale.collectors.gradient_norms import GradientNorms
from noisescale.collectors.rows.step_rows import Beside
from noisescale.collectors.steps_apart import StepsApart
from noisescale.estimation.row_similarity import RowSimilarity, Similarity

ROWS, STEPS = 8, 220


def apart_of(parameters: list[nn.Parameter], ranks: int = 1) -> StepsApart:
    coordinates = Coordinates(parameters)
    names = [(str(index), p) for index, p in enumerate(parameters)]
    norms = GradientNorms(names, coordinates=coordinates)
    return StepsApart(norms, coordinates, ranks, "ranks")


@pytest.mark.parametrize("left_out", [[], [1]])
def test_the_numbers_are_those_of_gradients_at_the_same_coordinates(left_out: list[int]) -> None:
    torch.manual_seed(0)
    shapes = [(5, 7), (6, 6), ()]
    parameters = [nn.Parameter(torch.randn(shape)) for shape in shapes]
    apart = apart_of(parameters, ranks=2)
    apart._norms.leave_out(left_out)
    steps = [[torch.randn_like(p) for p in parameters] for _ in range(3)]

    for number, gradients in enumerate(steps):
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient.t().contiguous().t() if gradient.dim() else gradient
        apart.end_step([ROWS], measured=not number)
        assert apart.follows == (number < 2)
    beside = apart.next_word()
    assert not apart.next_word().ends

    places = {i: apart._coordinates._places.get(id(p)) for i, p in enumerate(parameters)}
    assert sum(len(at[0]) for at in places.values() if at) <= 256
    first, second, third = (
        torch.cat(
            [
                (g[i] if g[i].dim() else g[i][None])[at]
                for i, at in places.items()
                if at and i not in left_out
            ]
        )
        for g in steps
    )
    expected = [
        first.square().sum(),
        ((second - first).square().sum() + (third - second).square().sum()) / 4,
        (third - first).square().sum() / 2,
    ]
    assert beside.ends
    assert isinstance(beside.numbers, Tensor)
    assert (2 * beside.numbers).tolist() == pytest.approx([float(x) for x in expected])


@pytest.mark.parametrize("low", [0.005, 0.03])
def test_steps_apart_that_show_a_little_are_a_reason_to_measure_pairs(low: float) -> None:
    apart = apart_of([nn.Parameter(torch.randn(5))])
    seen = Similarity(1.0, 0.8, 1.0, 0.0, -0.1, apart=0.08, apart_low=low)
    norms = mock.MagicMock(big_sq_norm=1.0)
    norms.moments.return_value.grad_sq_norm = 0.5
    step = mock.MagicMock(at_coordinates=norms, beside=Beside(True, [1.0, 1.0, 1.0], math.nan))

    with (
        mock.patch.object(RowSimilarity, "is_due", True),
        mock.patch.object(RowSimilarity, "look", return_value=seen),
    ):
        apart.take(step)

    assert apart.suspects_rows == (low > 0.01)
    assert not apart.withheld


def test_steps_of_another_size_say_nothing_at_the_same_time() -> None:
    parameter = nn.Parameter(torch.randn(5))
    apart = apart_of([parameter])
    parameter.grad = torch.randn(5)

    for size in (ROWS, ROWS + 1, ROWS):
        apart.end_step([size], measured=size == ROWS and not apart.follows)

    assert apart.next_word()[:2] == (True, None)  # as other ranks may have something to say


def test_an_error_on_one_rank_leaves_its_words_in_step_with_those_of_others() -> None:
    parameter = nn.Parameter(torch.randn(5))
    apart = apart_of([parameter])
    said = []

    for step in range(10):
        parameter.grad = None if step == 2 else torch.randn(5)
        where = {4: (Coordinates, "gradient"), 6: (steps_apart._Window, "numbers")}.get(step)
        fails = where and mock.patch.object(*where, side_effect=MemoryError)
        with fails or nullcontext(), suppress(MemoryError):
            apart.end_step([ROWS], measured=True)
        said.append(apart.next_word())

    assert [word.ends for word in said] == [False, False] + [True] * 8
    assert [word.numbers is not None for word in said] == [False] * 7 + [True] * 3


def test_no_more_steps_are_compared_than_the_last_look_needs() -> None:
    parameter = nn.Parameter(torch.randn(5))
    apart = apart_of([parameter])
    parameter.grad = torch.randn(5)

    with mock.patch("noisescale.collectors.steps_apart._MOST_COMPARED", 4):
        for _ in range(10):
            apart.end_step([ROWS], measured=True)
            apart.next_word()
        assert apart.is_over
        assert not apart.follows


class Flow(nn.Module):
    """Flow matching in a few dimensions: each row draws a time and noise."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 4))

    def forward(self, x: Tensor, times: Tensor, noise: Tensor) -> Tensor:
        mixed = (1 - times) * noise + times * x
        return F.mse_loss(self.net(torch.cat([mixed, times], 1)), x - noise)


def fit(seed_of_rank: int, batches: list[Tensor], *, micro: int, shared: bool) -> Any:
    """Return the noise scale, why it is withheld, and what was warned of."""
    torch.manual_seed(0)
    model: nn.Module = Flow()
    if torch.distributed.is_initialized():
        model = DistributedDataParallel(model)
    torch.manual_seed(1 + seed_of_rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    meter = NoiseScaleMeter(model, optimizer=optimizer, every_n_steps=2)
    with warnings.catch_warnings(record=True):
        warnings.simplefilter("always")
        for batch in batches:
            optimizer.zero_grad()
            draws = torch.rand(ROWS, 1), torch.randn(ROWS, 4)
            for x in batch.chunk(micro):
                draws = draws if shared else (torch.rand(ROWS, 1), torch.randn(ROWS, 4))
                meter.backward(model(x, *draws) / micro, ROWS)
            meter.step()
            optimizer.step()
            if seed_of_rank == 0 and rank_of_process() == 0:  # another rank reads at the end alone
                value = meter.noise_scale.value
        value = meter.noise_scale.value
    meter.close()
    return value, meter.withheld, meter.measured_steps


def rank_of_process() -> int:
    return torch.distributed.get_rank() if torch.distributed.is_initialized() else 0


def batches_of(rank: int, rows: int = ROWS) -> list[Tensor]:
    generator = torch.Generator().manual_seed(5 + rank)
    return [2 + 0.1 * torch.randn(rows, 4, generator=generator) for _ in range(STEPS)]


def test_ranks_with_one_seed_have_no_noise_scale_until_each_has_its_own() -> None:
    def both() -> Any:
        rank = rank_of_process()
        own = batches_of(rank)
        return [fit(seed, own, micro=1, shared=False) for seed in (0, rank)]

    for one_seed, own_seeds in on_ranks(2, both):
        value, withheld, _ = one_seed
        assert math.isnan(value)
        assert "The batches of the ranks are alike: 16 count as about" in withheld
        assert "All ranks draw the same random numbers" in withheld
        assert "`torch.manual_seed(seed + rank)`" in withheld
        assert own_seeds[1:] == ("", STEPS // 2)


@pytest.mark.parametrize("shared", [True, False])
def test_micro_batches_with_one_draw_a_step_have_no_noise_scale(shared: bool) -> None:
    value, withheld, _ = fit(0, batches_of(0, 2 * ROWS), micro=2, shared=shared)

    assert ("The micro-batches of a step are alike: 16 count" in withheld) == shared
    assert not shared or math.isnan(value)
