# SPDX-License-Identifier: Apache-2.0
"""The noise between and within groups of rows, as a meter finds it, against brute force."""

import warnings
from dataclasses import astuple
from functools import cache
from typing import Any

import pytest
import torch
from ranks import on_ranks
from rollouts import Truth, draw, loss_of, policy, truth
from tiers import slow
from torch.nn.parallel import DistributedDataParallel

from noisescale import NoiseScaleMeter
from noisescale.estimation.levels import Levels

EQUAL = torch.arange(12).repeat_interleave(4)
UNEQUAL = torch.arange(12).repeat_interleave(torch.tensor([1, 2, 3, 5, 8, 4] * 2))
STEPS = 150


@cache
def expected(*, unequal: bool = False) -> Truth:
    return truth(UNEQUAL if unequal else EQUAL)


def measure(
    groups: torch.Tensor = EQUAL, *, passes: int = 1, steps: int = STEPS, **given: Any
) -> NoiseScaleMeter:
    model = policy()
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    trained = DistributedDataParallel(model) if torch.distributed.is_initialized() else model
    generator = torch.Generator().manual_seed(70 + rank)
    meter = NoiseScaleMeter(trained, window=10**6, every_n_steps=1)
    for _ in range(steps):
        model.zero_grad()
        for k in range(passes):
            batch = draw(groups, generator)
            options = {"weight": torch.ones(len(groups)), "row_groups": groups + 100 * k} | given
            if isinstance(trained, DistributedDataParallel):
                trained.require_backward_grad_sync = k == passes - 1
            meter.backward(loss_of(trained, batch) / passes, len(groups), **options)
        meter.step()
    return meter


def assert_true(levels: Levels | None, of: Truth) -> None:
    assert levels is not None
    for name, found in levels.bounds.items():
        value = of.within / of.between if name == "balance" else getattr(of, name)
        assert found.low / 1.05 < value < 1.05 * found.high, name
    assert levels.rows_per_group == pytest.approx(of.rows_per_group)
    assert levels.within.value == pytest.approx(of.within, rel=0.3)


def test_halves_between_and_within_groups() -> None:
    meter = measure()

    assert_true(meter.levels, expected())
    assert meter.levels is not None
    assert meter.levels.groups == pytest.approx(12)
    of_rows = meter.levels.noise_scale(4) * 4
    assert of_rows == pytest.approx(meter.noise_scale.value, rel=0.05)


def test_groups_of_unequal_size_and_of_one_row() -> None:
    assert_true(measure(UNEQUAL).levels, expected(unequal=True))


def test_micro_batches_of_whole_groups() -> None:
    meter = measure(passes=3)

    assert_true(meter.levels, expected())
    assert meter.levels is not None
    assert meter.levels.groups == pytest.approx(36)


@pytest.mark.parametrize("passes", [1, slow(2)])
def test_ranks_of_whole_groups(passes: int) -> None:
    def levels_of_rank() -> Levels | None:
        return measure(passes=passes).levels

    first, second = on_ranks(2, levels_of_rank)

    assert first == second
    assert_true(first, expected())
    assert first.groups == pytest.approx(24 * passes)


def shuffled(steps: int, order: torch.Tensor | None = None) -> NoiseScaleMeter:
    """Completions are shuffled before four micro-batches are made of them, as TRL does."""
    model, generator = policy(), torch.Generator().manual_seed(5)
    meter = NoiseScaleMeter(model, window=10**6, every_n_steps=1)
    for _ in range(steps):
        model.zero_grad()
        batch = draw(EQUAL, generator)
        drawn = torch.randperm(48, generator=generator) if order is None else order
        for part in drawn.chunk(4):
            some = type(batch)(*(x[part] for x in batch))
            given = {"weight": torch.ones(12), "row_groups": EQUAL[part] + 100}
            meter.backward(loss_of(model, some) / 4, 12, **given)
        meter.step()
    return meter


def test_micro_batches_that_share_groups_are_measured_by_the_halves_of_the_first() -> None:
    meter = shuffled(2 * STEPS)

    assert (meter.measured_steps, meter.skipped_steps) == (2 * STEPS, 0)
    assert_true(meter.levels, expected())
    assert meter.levels is not None
    assert meter.levels.groups == pytest.approx(12)
    of = expected()
    found = meter.noise_scale
    assert found.low < 4 * (of.between + of.within / 4) < found.high


def test_shared_groups_with_no_two_rows_of_one_in_the_first_batch_are_refused_by_name() -> None:
    with pytest.warns(UserWarning, match="two micro-batches of a step: those of 1"):
        meter = shuffled(4, torch.arange(48).view(12, 4).T.flatten())

    assert (meter.measured_steps, meter.levels) == (0, None)


def test_groups_are_numbered_in_each_micro_batch_anew() -> None:
    meter = measure(passes=2, steps=4, row_groups=EQUAL)

    assert meter.measured_steps == 4
    assert meter.levels is not None
    assert meter.levels.groups == pytest.approx(24)


def test_prompts_of_one_reward_are_counted() -> None:
    model, meter = policy(), None
    generator = torch.Generator().manual_seed(0)
    meter = NoiseScaleMeter(model, every_n_steps=1)
    for _ in range(4):
        batch = draw(EQUAL, generator)
        batch = batch._replace(advantages=batch.advantages * (EQUAL >= 3))
        model.zero_grad()
        meter.backward(loss_of(model, batch), 48, row_groups=EQUAL, weight=torch.ones(48))
        meter.step()

    assert meter.measured_steps == 4
    assert meter.levels is not None
    assert meter.levels.still == pytest.approx(0.25)


def test_rewards_that_are_not_finite_leave_their_step_out() -> None:
    model, generator = policy(), torch.Generator().manual_seed(0)
    meter = NoiseScaleMeter(model, every_n_steps=1)
    for step in range(5):
        model.zero_grad()
        batch = draw(EQUAL, generator)
        if step == 2:
            batch.advantages[7] = torch.nan
        meter.backward(loss_of(model, batch), 48, row_groups=EQUAL, weight=torch.ones(48))
        meter.step()

    assert (meter.measured_steps, meter.skipped_steps) == (4, 1)
    assert meter.levels is not None
    assert meter.levels.within.low >= 0
    assert meter.levels.groups == pytest.approx(12)


def test_rows_that_act_on_each_other_and_groups_of_one_row_have_no_levels() -> None:
    def levels_of(groups: torch.Tensor, *, pairs: bool) -> Levels | None:
        model, meter = policy(), None
        generator = torch.Generator().manual_seed(0)
        meter = NoiseScaleMeter(model, every_n_steps=1)
        for _ in range(5):
            model.zero_grad()
            z = model(draw(EQUAL, generator).inputs)
            loss = (z[0::2] - z[1::2]).norm(dim=1).mean() if pairs else z.square().mean()
            meter.backward(loss, 48, row_groups=groups)
            meter.step()
        assert meter.measured_steps == 5
        return meter.levels

    assert levels_of(EQUAL, pairs=True) is None
    assert levels_of(torch.arange(48), pairs=False) is None
    assert levels_of(EQUAL, pairs=False) is not None


def test_without_groups_there_are_no_levels_and_no_pass_more() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # rows of one prompt are alike
        meter = measure(steps=3, row_groups=None)
    assert meter.levels is None
    with_groups = measure(steps=3)
    assert with_groups.measuring_cost == pytest.approx(2 * meter.measuring_cost, rel=0.4)


def test_a_resumed_meter_goes_on(tmp_path: Any) -> None:
    first = measure(steps=20)
    second = NoiseScaleMeter(policy(), window=10**6, every_n_steps=1)
    second.load_state_dict(first.state_dict())
    assert astuple(second.levels) == astuple(first.levels)  # by ==, NaN differs since 3.13


def test_a_gradient_that_is_scaled_and_losses_that_are_divided_show_the_same() -> None:
    found = []
    for divisor in (1.0, 4.0):
        model, generator = policy(), torch.Generator().manual_seed(0)
        meter = NoiseScaleMeter(model, every_n_steps=1)
        for _ in range(4):
            model.zero_grad()
            loss = loss_of(model, draw(EQUAL, generator)) / divisor
            meter.backward(loss, 48, row_groups=EQUAL)
            meter.step(loss_divisor=divisor)
        assert meter.levels is not None
        found.append(meter.levels.within.value)
    assert found[1] == pytest.approx(found[0], rel=1e-3)


def trained_on_two_ranks(*, groups_on: tuple[int, ...], gathers: bool = False) -> torch.Tensor:
    """The weights after five steps of DDP with a static graph, or with a loss that gathers."""
    model = policy()
    rank = torch.distributed.get_rank()
    ddp = DistributedDataParallel(model, static_graph=not gathers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    generator = torch.Generator().manual_seed(70 + rank)
    meter = NoiseScaleMeter(ddp, every_n_steps=1)
    for _ in range(5):
        optimizer.zero_grad()
        batch = draw(EQUAL, generator)
        loss = loss_of(ddp, batch)
        if gathers:
            everywhere = torch.distributed.nn.functional.all_gather(ddp(batch.inputs))
            loss = loss + 0.01 * torch.cat(list(everywhere)).square().mean()
        meter.backward(loss, 48, row_groups=EQUAL if rank in groups_on else None)
        meter.step()
        optimizer.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.mark.parametrize("gathers", [False, True], ids=["static graph", "gathers"])
def test_training_on_ranks_is_as_without_groups(gathers: bool) -> None:
    """A pass more must neither queue DDP's all-reduce nor wait for a rank that makes none."""

    def weights() -> list[torch.Tensor]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # rows are gathered
            return [
                trained_on_two_ranks(groups_on=ranks, gathers=gathers)
                for ranks in ((), (0, 1), (0,))
            ]

    for plain, *others in on_ranks(2, weights):
        assert all(torch.equal(other, plain) for other in others)


def test_a_measured_step_of_ranks_costs_a_pass_more_once_all_have_read_of_groups() -> None:
    def costs() -> list[float]:
        found = []
        for groups in (None, EQUAL):
            meter = measure(steps=4, row_groups=groups)
            before = meter.measuring_cost
            meter.agree(0.01)
            measure_one(meter)
            found.append(meter.measuring_cost - before)
        return found

    def measure_one(meter: NoiseScaleMeter) -> None:
        model = meter._capture._ddp
        meter.backward(loss_of(model, draw(EQUAL, torch.Generator())), 48)
        meter.step()

    for plain, in_groups in on_ranks(2, costs):
        assert in_groups == pytest.approx(plain + 0.75)


def test_shared_groups_need_no_weights_and_a_group_for_each_pass() -> None:
    """A variance that comes out negative is no sign that all rows had one gradient."""
    model, generator = policy(), torch.Generator().manual_seed(5)
    meter = NoiseScaleMeter(model, window=10**6, every_n_steps=1)
    for step in range(40):
        model.zero_grad()
        batch = draw(EQUAL, generator)
        drawn = torch.randperm(48, generator=generator)
        for k, part in enumerate(drawn.chunk(4)):
            some = type(batch)(*(x[part] for x in batch))
            known = EQUAL[part] + 100 if k < 3 or step < 30 else None
            meter.backward(loss_of(model, some) / 4, 12, row_groups=known)
        with warnings.catch_warnings():
            warnings.simplefilter("error" if step < 30 else "ignore")
            meter.step()
            if step == 29:
                assert meter.measured_steps == 30

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert (meter.measured_steps, meter.skipped_steps) == (30, 10)


def test_a_first_micro_batch_of_one_group_leaves_the_step_out() -> None:
    order = torch.cat([torch.arange(4), torch.arange(4, 48).view(11, 4).T.flatten()])
    groups = torch.cat([torch.zeros(4, dtype=torch.long), EQUAL[4:]])
    model, generator = policy(), torch.Generator().manual_seed(5)
    meter = NoiseScaleMeter(model, every_n_steps=1)

    def train() -> None:
        for _ in range(4):
            model.zero_grad()
            batch = draw(groups, generator)
            for part in (order[:4], order[4:26], order[26:]):
                some = type(batch)(*(x[part] for x in batch))
                meter.backward(loss_of(model, some) / 3, len(part), row_groups=groups[part] + 50)
            meter.step()

    with pytest.warns(UserWarning, match="two micro-batches"):
        train()

    assert meter.measured_steps == 0
    assert "failed" not in meter.why_nothing
