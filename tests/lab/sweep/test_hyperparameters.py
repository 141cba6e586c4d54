# SPDX-License-Identifier: Apache-2.0
import pytest
import torch
from refused import refused

from noisescale.lab.sweep.hyperparameters import own_values, refuse_unsearchable, set_values


def weight() -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.ones(1))


def step(optimizer: torch.optim.Optimizer) -> float:
    """How far a step with a gradient of one goes."""
    (parameter, *_) = optimizer.param_groups[0]["params"]
    before, parameter.grad = parameter.item(), torch.ones(1)
    optimizer.step()
    return before - parameter.item()


def test_the_learning_rate_is_the_peak_of_the_module_s_own_schedule() -> None:
    optimizer = torch.optim.SGD([weight()], lr=0.2)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 0.5, 1.0, 2)

    scaled = set_values([optimizer], {"learning_rate": 1.0})
    steps = []
    for _ in range(3):
        steps.append(step(optimizer))
        schedule.step()
    scaled.close()

    assert steps == pytest.approx([0.5, 0.75, 1.0])
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.2)


def test_ratios_between_groups_stay_and_the_largest_peak_is_the_own() -> None:
    groups = [{"params": [weight()], "lr": 0.1}, {"params": [weight()], "lr": 0.4}]
    optimizer = torch.optim.SGD(groups)
    assert own_values([optimizer])["learning_rate"] == 0.4

    set_values([optimizer], {"learning_rate": 0.8})

    assert step(optimizer) == pytest.approx(0.2)


def test_momentum_betas_and_weight_decay_are_set() -> None:
    sgd = torch.optim.SGD([weight()], lr=0.1, momentum=0.9)
    groups = [{"params": [weight()]}, {"params": [weight()], "weight_decay": 0.0}]
    adam = torch.optim.AdamW(groups, lr=0.1, betas=(0.9, 0.99))
    values = {"learning_rate": 0.1, "momentum": 0.5, "weight_decay": 0.3}

    set_values([sgd, adam], values, beta2=0.95)

    assert sgd.param_groups[0]["momentum"] == 0.5
    assert [group["betas"] for group in adam.param_groups] == [(0.5, 0.95)] * 2
    assert [group["weight_decay"] for group in adam.param_groups] == [0.3, 0.0]
    assert own_values([sgd])["beta2"] is None
    assert own_values([sgd, adam])["beta2"] == 0.95


def test_what_no_optimizer_has_is_refused() -> None:
    rprop = torch.optim.Rprop([weight()], lr=0.1)

    with refused("search", requirement="what the optimizer has"):
        set_values([rprop], {"learning_rate": 0.1, "momentum": 0.5})
    with refused("configure_optimizers", requirement="a positive learning rate", got="0"):
        set_values([torch.optim.SGD([weight()], lr=0.0)], {"learning_rate": 0.1})


def test_momentum_that_a_schedule_sets_is_refused_and_the_peak_of_one_cycle_counts() -> None:
    schedules = torch.optim.lr_scheduler
    optimizer = torch.optim.SGD([weight()], lr=0.1, momentum=0.9)
    plain = schedules.OneCycleLR(optimizer, max_lr=0.5, total_steps=10, cycle_momentum=False)
    cycle = schedules.OneCycleLR(optimizer, max_lr=0.5, total_steps=10)
    chain = schedules.ChainedScheduler([plain, cycle])
    assert (
        own_values([optimizer])["learning_rate"] == 0.5
    )  # the peak of the cycle, not its beginning

    refuse_unsearchable([optimizer], [plain], ["learning_rate", "momentum"])
    refuse_unsearchable([optimizer], [chain], ["learning_rate"])
    with refused("search", got="momentum, which OneCycleLR sets at each step"):
        refuse_unsearchable([optimizer], [chain], ["momentum"])
