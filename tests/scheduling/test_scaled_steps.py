# SPDX-License-Identifier: Apache-2.0
"""The factor is there while the optimizer steps, and nowhere else."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from refused import refused
from torch.optim import LBFGS, SGD, Adam, Optimizer
from torch.optim import lr_scheduler as lrs

from noisescale.scheduling.learning_rate import Factors
from noisescale.scheduling.scaled_steps import ScaledSteps, check_betas


def weight(value: float = 1.0) -> torch.nn.Parameter:
    parameter = torch.nn.Parameter(torch.full((2,), value))
    parameter.grad = torch.ones(2)
    return parameter


class Seen(SGD):
    """What `step` finds in its groups, and fails at as often as it is told to."""

    def __init__(self, lr: float = 0.1, fails: int = 0, repeats: int = 1) -> None:
        super().__init__([weight()], lr=lr)
        self.lrs: list[float] = []
        self.fails, self.repeats = fails, repeats

    def step(self, closure: Any = None) -> Any:
        if self.fails:
            self.fails -= 1
            raise RuntimeError("no memory")
        for _ in range(self.repeats):
            if closure is not None:
                closure()
            self.lrs.append(float(self.param_groups[0]["lr"]))
        return super().step()


def scaled(optimizer: Optimizer, *factors: float) -> ScaledSteps:
    steps = ScaledSteps([optimizer])
    steps.factors = Factors(*factors)
    return steps


SCHEDULES: dict[str, Callable[[Optimizer], Any]] = {
    "exponential": lambda o: lrs.ExponentialLR(o, 0.9),
    "one cycle": lambda o: lrs.OneCycleLR(o, max_lr=0.5, total_steps=20),
    "sequential": lambda o: lrs.SequentialLR(o, [lrs.LinearLR(o), lrs.ExponentialLR(o, 0.8)], [4]),
    "plateau": lambda o: lrs.ReduceLROnPlateau(o, patience=1),
}


def lrs_along(schedule: Callable[[Optimizer], Any], factor: float | None) -> tuple[Any, Any]:
    """What the optimizer steps with, and what its schedule says, over 10 steps."""
    optimizer = Seen()
    scheduler = schedule(optimizer)
    steps = None if factor is None else ScaledSteps([optimizer])
    said = []
    for step in range(10):
        if steps is not None and step == 4:
            steps.factors = Factors(factor or 1.0)
        optimizer.step()
        scheduler.step(*[1.0] * isinstance(scheduler, lrs.ReduceLROnPlateau))
        said.append(optimizer.param_groups[0]["lr"])
    return optimizer.lrs, said


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules_never_see_the_factor(name: str) -> None:
    without, said_without = lrs_along(SCHEDULES[name], None)
    with_it, said = lrs_along(SCHEDULES[name], 3.0)

    assert said == said_without
    assert with_it == without[:4] + [3.0 * lr for lr in without[4:]]


def test_betas_and_eps_follow_for_the_length_of_a_step() -> None:
    """Malladi et al.: 1 - k(1 - β), eps/√k; the update is that of an Adam made with these."""

    def stepped(optimizer: Optimizer, parameter: torch.nn.Parameter) -> None:
        for value in (1.0, -0.5, 2.0):
            parameter.grad = torch.full((2,), value)
            optimizer.step()

    ours, theirs = weight(), weight()
    optimizer = Adam([ours], lr=0.1, betas=(0.9, 0.99), eps=0.04)
    scaled(optimizer, 2.0, 4.0)

    stepped(optimizer, ours)

    stepped(Adam([theirs], lr=0.2, betas=(1 - 4 * (1 - 0.9), 1 - 4 * (1 - 0.99)), eps=0.02), theirs)
    assert torch.equal(ours, theirs)
    group = optimizer.param_groups[0]
    assert (group["lr"], group["betas"], group["eps"]) == (0.1, (0.9, 0.99), 0.04)


def test_a_learning_rate_in_a_tensor_stays_the_tensor_it_is() -> None:
    parameter, lr = weight(), torch.tensor(0.25)
    optimizer = SGD([parameter], lr=lr)
    scaled(optimizer, 2.0)

    optimizer.step()

    assert optimizer.param_groups[0]["lr"] is lr
    assert parameter.tolist() == [0.5] * 2


def test_after_a_step_that_failed_and_after_closing_steps_are_the_optimizers_own() -> None:
    optimizer = Seen(fails=2)
    steps = scaled(optimizer, 2.0)
    with pytest.raises(RuntimeError, match="no memory"):
        optimizer.step()
    steps.factors = Factors(3.0)
    with pytest.raises(RuntimeError, match="no memory"):
        optimizer.step()

    steps.close()
    rate = optimizer.param_groups[0]["lr"]
    optimizer.step()

    assert rate == 0.1
    assert optimizer.lrs == [0.1]
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks


def test_a_scaler_that_leaves_a_step_out_changes_nothing() -> None:
    optimizer = Seen()
    scaled(optimizer, 2.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    scaler.scale(torch.zeros(1))
    optimizer.param_groups[0]["params"][0].grad = torch.full((2,), torch.inf)

    scaler.step(optimizer)
    scaler.update()

    assert optimizer.lrs == []
    assert optimizer.param_groups[0]["lr"] == 0.1


def test_betas_that_cannot_follow_are_refused() -> None:
    adam = Adam([weight()], betas=(0.9, 0.999))

    check_betas([adam], 9.9)
    with refused("max_batch_size", got="16 times for β = 0.9", remedy="less than 10 times"):
        check_betas([adam], 16.0)
    with refused('lr_scaling="malladi"', got="Seen"):
        check_betas([Seen()], 2.0)


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("set_to", [None, 0.2])
def test_a_closure_sees_the_scheduled_rate_and_the_step_has_the_factor(
    set_to: float | None, times: int
) -> None:
    """A rate that a closure sets is scaled, and stays."""
    optimizer, seen = Seen(repeats=times), list[float]()
    scaled(optimizer, 3.0)

    def closure() -> None:
        seen.append(optimizer.param_groups[0]["lr"])
        if set_to is not None:
            optimizer.param_groups[0]["lr"] = set_to

    optimizer.step(closure)
    optimizer.step(closure=closure)

    stays = set_to or 0.1
    assert seen == [0.1] + [stays] * (2 * times - 1)
    assert optimizer.lrs == pytest.approx([3 * stays] * 2 * times)
    assert optimizer.param_groups[0]["lr"] == stays


def test_the_scheduled_rate_is_the_mean_of_all_groups() -> None:
    optimizer = SGD([{"params": [weight()], "lr": lr} for lr in (0.1, 0.3)])
    steps = ScaledSteps([optimizer])
    before = steps.learning_rate

    optimizer.param_groups[1]["lr"] = 0.1  # a decay of the second group alone

    assert before == pytest.approx(0.2)
    assert steps.learning_rate == pytest.approx(0.1)
    optimizer.add_param_group({"params": [weight()], "lr": 0.01})  # one that is unfrozen later
    assert steps.learning_rate == pytest.approx(0.1)


def test_an_optimizer_that_reads_its_rate_before_the_closure_has_the_factor() -> None:
    def stepped(factor: float) -> float:
        parameter = weight()
        optimizer = LBFGS([parameter], lr=0.1, max_iter=1)
        scaled(optimizer, factor)

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = parameter.sum()
            loss.backward()
            return loss

        optimizer.step(closure)
        return 1 - parameter[0].item()

    assert stepped(4.0) == pytest.approx(4 * stepped(1.0))
