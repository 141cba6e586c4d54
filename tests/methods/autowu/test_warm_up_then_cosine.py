# SPDX-License-Identifier: Apache-2.0
import math
from typing import Any

import pytest
import torch
from refused import refused
from torch.optim import SGD
from torch.optim.lr_scheduler import CosineAnnealingLR, ExponentialLR, LRScheduler

from noisescale.methods.autowu.auto_warm_up import WarmUpThenCosine


def stepped(scheduler: LRScheduler, steps: int) -> list[float]:
    """The learning rates that a scheduler of torch goes through."""
    seen = []
    for _ in range(steps):
        seen.append(scheduler.optimizer.param_groups[0]["lr"])
        scheduler.optimizer.step()
        scheduler.step()
    return seen


def sgd(lr: float) -> SGD:
    return SGD([torch.zeros(1)], lr=lr)


def test_the_warm_up_is_torchs_exponential_one_to_the_papers_bounds() -> None:
    schedule = WarmUpThenCosine(total_steps=200)

    theirs = stepped(ExponentialLR(sgd(1e-5), gamma=(1.0 / 1e-5) ** (1 / 100)), 101)

    assert [schedule.warm_up(step) for step in range(101)] == pytest.approx(theirs, rel=1e-9)
    assert theirs[-1] == pytest.approx(1.0)


def test_the_decay_is_torchs_cosine_from_the_rate_at_the_peak_step_to_zero() -> None:
    schedule = WarmUpThenCosine(total_steps=200, min_lr=1e-4)
    peak = 1e-4 ** (1 - 37.5 / 100)

    theirs = stepped(CosineAnnealingLR(sgd(peak), T_max=150), 151)

    ours = [schedule.decay(step, switch_step=50, peak_step=37.5) for step in range(50, 201)]
    assert ours == pytest.approx(theirs, rel=1e-9, abs=1e-15)


def test_a_cooldown_holds_the_peak_until_its_share_of_the_steps_is_left() -> None:
    schedule = WarmUpThenCosine(total_steps=200, cooldown_fraction=0.2)

    seen = [schedule.decay(step, switch_step=50, peak_step=100) for step in range(50, 200)]

    assert seen[:111] == pytest.approx([1.0] * 111)
    assert seen[130] == pytest.approx(0.5)
    assert seen[149] == pytest.approx(0.5 * (1 + math.cos(math.pi * 39 / 40)))
    for short in (WarmUpThenCosine(10), WarmUpThenCosine(10, cooldown_fraction=0.5)):
        past = [short.decay(step, switch_step=5, peak_step=3) for step in (10, 11, 30)]
        assert past == [0.0] * 3  # past the last step, too


@pytest.mark.parametrize(
    ("changed", "name", "got"),
    [
        ({"total_steps": 0}, "total_steps", "0"),
        ({"max_lr": 1e-6}, "max_lr", "1e-06 and 1e-05"),
        ({"max_warmup_fraction": 1.0}, "max_warmup_fraction", "1.0"),
        ({"cooldown_fraction": 0.6}, "cooldown_fraction", "0.6"),
    ],
)
def test_schedules_that_cannot_be_are_refused(changed: dict[str, Any], name: str, got: str) -> None:
    with refused(name, got=got):
        WarmUpThenCosine(**{"total_steps": 100, **changed})
