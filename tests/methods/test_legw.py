# SPDX-License-Identifier: Apache-2.0
import copy
import math
from typing import Any

import pytest
import torch
from refused import refused
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import ChainedScheduler, CosineAnnealingLR, SequentialLR, StepLR

from noisescale.methods.legw import LegwWarmUp


def sgd(lr: float) -> SGD:
    return SGD([torch.zeros(1)], lr=lr)


def legw(optimizer: Optimizer, **changed: Any) -> LegwWarmUp:
    """Base batch size 8, batch size 32; k = 4; 4·0.5 epochs of 5 steps: 10 steps to 2·lr."""
    sizes = {"base_batch_size": 8, "batch_size": 32}
    return LegwWarmUp(
        optimizer, **{**sizes, "base_warmup_epochs": 0.5, "steps_per_epoch": 5, **changed}
    )


def learning_rates(scheduler: Any, optimizer: Optimizer, steps: int) -> list[float]:
    seen = []
    for _ in range(steps):
        seen.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return seen


def test_the_peak_grows_as_the_root_of_the_batch_and_the_warm_up_as_the_batch() -> None:
    optimizer, without = sgd(0.1), sgd(0.1)

    seen = learning_rates(legw(optimizer), optimizer, 15)

    assert seen == pytest.approx([0.2 * t / 10 for t in range(1, 11)] + [0.2] * 5, rel=1e-12)
    assert learning_rates(legw(without, base_warmup_epochs=0), without, 3) == [0.2] * 3


@pytest.mark.parametrize("k", [0.25, 1, 2, 64])
def test_the_warm_up_has_as_many_steps_at_every_batch_size(k: float) -> None:
    """5 epochs of 1000 steps at the base batch size; 1/k of the steps at k times that."""
    sizes = {"base_batch_size": 64, "batch_size": 64 * k}
    scaled = legw(sgd(0.1), **sizes, base_warmup_epochs=5, steps_per_epoch=1000 / k)

    assert scaled.warmup_steps == 5000
    assert scaled.base_lrs == pytest.approx([0.1 * k**0.5])


def test_every_parameter_group_keeps_its_own_learning_rate_and_its_tensor() -> None:
    lr = torch.tensor(0.1)
    optimizer = SGD([{"params": [torch.zeros(1)], "lr": one} for one in (lr, 3.0)])
    scheduler = legw(optimizer)
    learning_rates(scheduler, optimizer, 12)

    assert [float(one) for one in scheduler.get_last_lr()] == pytest.approx([0.2, 6.0])
    assert optimizer.param_groups[0]["lr"] is lr


def test_chained_it_multiplies_a_decay_that_counts_from_the_start_of_the_run() -> None:
    optimizer = sgd(0.1)
    warm_up = legw(optimizer)
    scheduler = ChainedScheduler([warm_up, StepLR(optimizer, step_size=6)], optimizer)

    seen = learning_rates(scheduler, optimizer, 18)

    expected = [0.2 * min((t + 1) / 10, 1) * 0.1 ** (t // 6) for t in range(18)]
    assert seen == pytest.approx(expected, rel=1e-12)


def test_in_sequence_the_decay_begins_at_the_peak() -> None:
    optimizer = sgd(0.1)
    warm_up = legw(optimizer)
    decay = CosineAnnealingLR(optimizer, T_max=20)
    scheduler = SequentialLR(optimizer, [warm_up, decay], milestones=[warm_up.warmup_steps])

    seen = learning_rates(scheduler, optimizer, 30)

    rising = [0.2 * (t + 1) / 10 for t in range(10)]
    falling = [0.1 * (1 + math.cos(math.pi * t / 20)) for t in range(20)]
    assert seen == pytest.approx(rising + falling, rel=1e-9)


def test_the_closed_form_agrees_with_the_chain_of_factors() -> None:
    chained = sgd(0.1)
    seen = learning_rates(legw(chained), chained, 15)
    closed = sgd(0.1)
    scheduler = legw(closed)

    for step in range(1, 15):
        closed.step()
        with pytest.warns(UserWarning, match="epoch parameter"):
            scheduler.step(step)
        assert closed.param_groups[0]["lr"] == pytest.approx(seen[step], rel=1e-12)


@pytest.mark.parametrize("half", [4, 13])
@pytest.mark.parametrize("combined", ["alone", "chained", "sequential"])
def test_resuming_continues_bit_by_bit(combined: str, half: int) -> None:
    """N steps == N/2 + checkpoint + N/2."""

    def make() -> tuple[Optimizer, Any]:
        optimizer = sgd(0.1)
        warm_up = legw(optimizer)
        if combined == "chained":
            return optimizer, ChainedScheduler([warm_up, StepLR(optimizer, 6)], optimizer)
        if combined == "sequential":
            return optimizer, SequentialLR(optimizer, [warm_up, StepLR(optimizer, 6)], [10])
        return optimizer, warm_up

    optimizer, scheduler = make()
    whole = learning_rates(scheduler, optimizer, 20)
    optimizer, scheduler = make()
    first = learning_rates(scheduler, optimizer, half)
    saved = copy.deepcopy((optimizer.state_dict(), scheduler.state_dict()))
    optimizer, scheduler = make()
    optimizer.load_state_dict(saved[0])
    scheduler.load_state_dict(saved[1])

    assert first + learning_rates(scheduler, optimizer, 20 - half) == whole


def test_continuing_by_last_epoch_does_not_scale_twice() -> None:
    optimizer = sgd(0.1)
    learning_rates(legw(optimizer), optimizer, 4)

    assert legw(optimizer, last_epoch=3).base_lrs == [0.2]
    with refused("optimizer", remedy="before"):  # a scheduler was made before
        legw(optimizer)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("batch_size", 0),
        ("base_batch_size", math.nan),
        ("steps_per_epoch", math.inf),
        ("base_warmup_epochs", -1),
    ],
)
def test_impossible_numbers_are_refused(name: str, value: float) -> None:
    with refused(name, got=f"{value}"):
        legw(sgd(0.1), **{name: value})
