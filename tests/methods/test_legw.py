# SPDX-License-Identifier: Apache-2.0
import copy
import math
import re
from typing import Any

import pytest
import torch
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import ChainedScheduler, CosineAnnealingLR, SequentialLR, StepLR

from noisescale.methods.legw import LegwWarmUp


def sgd(*learning_rates: float) -> SGD:
    return SGD([{"params": [torch.zeros(1)], "lr": lr} for lr in learning_rates])


def legw(optimizer: Optimizer, **changed: Any) -> LegwWarmUp:
    """Base batch size 8, batch size 32; k = 4; 4·0.5 epochs of 5 steps: 10 steps to 2·lr."""
    arguments: dict[str, Any] = {
        "base_batch_size": 8,
        "batch_size": 32,
        "base_warmup_epochs": 0.5,
        "steps_per_epoch": 5,
    }
    return LegwWarmUp(optimizer, **{**arguments, **changed})


def learning_rates(scheduler: Any, optimizer: Optimizer, steps: int) -> list[float]:
    seen = []
    for _ in range(steps):
        seen.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return seen


def test_the_peak_grows_as_the_root_of_the_batch_and_the_warm_up_as_the_batch() -> None:
    optimizer = sgd(0.1)
    seen = learning_rates(legw(optimizer), optimizer, 15)

    assert seen == pytest.approx([0.2 * t / 10 for t in range(1, 11)] + [0.2] * 5, rel=1e-12)


@pytest.mark.parametrize("k", [0.25, 1, 2, 64])
def test_the_warm_up_has_as_many_steps_at_every_batch_size(k: float) -> None:
    """5 epochs of 1000 steps at the base batch size; 1/k of the steps at k times that."""
    scaled = legw(
        sgd(0.1),
        base_batch_size=64,
        batch_size=64 * k,
        base_warmup_epochs=5,
        steps_per_epoch=1000 / k,
    )

    assert scaled.warmup_steps == 5000
    assert scaled.base_lrs == pytest.approx([0.1 * k**0.5])


def test_every_parameter_group_keeps_its_own_learning_rate() -> None:
    optimizer = sgd(0.1, 3.0)
    scheduler = legw(optimizer)
    learning_rates(scheduler, optimizer, 12)

    assert scheduler.get_last_lr() == pytest.approx([0.2, 6.0])


def test_without_warm_up_the_peak_holds_from_the_first_step() -> None:
    optimizer = sgd(0.1)

    assert learning_rates(legw(optimizer, base_warmup_epochs=0), optimizer, 3) == [0.2] * 3


def test_learning_rates_held_in_tensors_are_scaled_in_place() -> None:
    lr = torch.tensor(0.1)
    optimizer = SGD([torch.zeros(1)], lr=lr)
    learning_rates(legw(optimizer), optimizer, 9)

    assert optimizer.param_groups[0]["lr"] is lr
    assert lr.item() == pytest.approx(0.2)


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


@pytest.mark.parametrize("combined", ["alone", "chained", "sequential"])
@pytest.mark.parametrize("half", [4, 13])
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

    resumed = legw(optimizer, last_epoch=3)

    assert resumed.base_lrs == [0.2]


def test_a_second_scheduler_made_before_is_refused() -> None:
    optimizer = sgd(0.1)
    StepLR(optimizer, 6)
    message = (
        "`optimizer` must have no scheduler yet, got one whose `initial_lr` is set. Make"
        " LegwWarmUp before other schedulers, and before a checkpoint is loaded."
    )

    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        legw(optimizer)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"batch_size": 0}, "`batch_size` must be positive and finite, got 0."),
        ({"base_batch_size": math.nan}, "`base_batch_size` must be positive and finite, got nan."),
        ({"steps_per_epoch": math.inf}, "`steps_per_epoch` must be positive and finite, got inf."),
        (
            {"base_warmup_epochs": -1},
            "`base_warmup_epochs` must be 0 or more and finite, got -1.",
        ),
    ],
)
def test_impossible_numbers_are_refused(changed: dict[str, float], message: str) -> None:
    remedy = (
        " Batch sizes are global, warm-up is counted in epochs, and an epoch in optimizer steps."
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message + remedy)}$"):
        legw(sgd(0.1), **changed)
