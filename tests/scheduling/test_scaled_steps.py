# SPDX-License-Identifier: Apache-2.0
"""The factor is there while the optimizer steps, and nowhere else."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import SGD, Adam, Optimizer
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    CosineAnnealingLR,
    ExponentialLR,
    LinearLR,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
    StepLR,
)

from noisescale.scheduling.learning_rate import Factors
from noisescale.scheduling.scaled_steps import ScaledSteps, check_betas


class Seen(SGD):
    """What `step` finds in its groups."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.lrs: list[float] = []

    def step(self, closure: Any = None) -> Any:
        self.lrs.append(float(self.param_groups[0]["lr"]))
        return super().step(closure)


def sgd(lr: float = 0.1) -> Seen:
    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    return Seen([parameter], lr=lr)


SCHEDULES: dict[str, Callable[[Optimizer], Any]] = {
    "step": lambda o: StepLR(o, 3, gamma=0.5),
    "exponential": lambda o: ExponentialLR(o, 0.9),
    "cosine": lambda o: CosineAnnealingLR(o, 12),
    "one cycle": lambda o: OneCycleLR(o, max_lr=0.5, total_steps=20),
    "sequential": lambda o: SequentialLR(o, [LinearLR(o), ExponentialLR(o, 0.8)], [4]),
    "chained": lambda o: ChainedScheduler([LinearLR(o), ExponentialLR(o, 0.8)]),
    "plateau": lambda o: ReduceLROnPlateau(o, patience=1),
}


def lrs_along(schedule: Callable[[Optimizer], Any], factor: float | None) -> tuple[Any, Any]:
    """What the optimizer steps with, and what its schedule says, over 10 steps."""
    optimizer = sgd()
    scheduler = schedule(optimizer)
    scaled = None if factor is None else ScaledSteps([optimizer])
    said = []
    for step in range(10):
        if scaled is not None and step == 4:
            scaled.factors = Factors(factor or 1.0)
        optimizer.step()
        scheduler.step(*[1.0] * isinstance(scheduler, ReduceLROnPlateau))
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

    def stepped(optimizer: Optimizer, parameter: torch.nn.Parameter) -> torch.Tensor:
        for value in (1.0, -0.5, 2.0):
            parameter.grad = torch.full((2,), value)
            optimizer.step()
        return parameter.detach()

    ours, theirs = (torch.nn.Parameter(torch.ones(2)) for _ in range(2))
    optimizer = Adam([ours], lr=0.1, betas=(0.9, 0.99), eps=0.04)
    scaled = ScaledSteps([optimizer])
    scaled.factors = Factors(2.0, batch_ratio=4.0)

    stepped(optimizer, ours)

    stepped(Adam([theirs], lr=0.2, betas=(1 - 4 * (1 - 0.9), 1 - 4 * (1 - 0.99)), eps=0.02), theirs)
    assert torch.equal(ours, theirs)
    group = optimizer.param_groups[0]
    assert (group["lr"], group["betas"], group["eps"]) == (0.1, (0.9, 0.99), 0.04)


def test_a_learning_rate_in_a_tensor_stays_the_tensor_it_is() -> None:
    parameter = torch.nn.Parameter(torch.ones(1))
    parameter.grad = torch.ones(1)
    lr = torch.tensor(0.25)
    optimizer = SGD([parameter], lr=lr)
    ScaledSteps([optimizer]).factors = Factors(2.0)

    optimizer.step()

    assert optimizer.param_groups[0]["lr"] is lr
    assert parameter.item() == 0.5


def test_a_step_that_fails_leaves_the_learning_rate_to_be_put_back() -> None:
    class Failing(SGD):
        def step(self, closure: Any = None) -> Any:
            raise RuntimeError("no memory")

    optimizer = Failing([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    scaled = ScaledSteps([optimizer])
    scaled.factors = Factors(2.0)
    with pytest.raises(RuntimeError, match="no memory"):
        optimizer.step()

    scaled.close()

    assert optimizer.param_groups[0]["lr"] == 0.1


def test_a_step_after_one_that_failed_has_its_own_factor() -> None:
    class FailsOnce(SGD):
        failed = False

        def step(self, closure: Any = None) -> Any:
            if not self.failed:
                self.failed = True
                raise RuntimeError("no memory")
            return super().step(closure)

    parameter = torch.nn.Parameter(torch.ones(1))
    parameter.grad = torch.ones(1)
    optimizer = FailsOnce([parameter], lr=0.25)
    scaled = ScaledSteps([optimizer])
    scaled.factors = Factors(2.0)
    with pytest.raises(RuntimeError, match="no memory"):
        optimizer.step()

    scaled.factors = Factors()
    optimizer.step()

    assert parameter.item() == 0.75


def test_after_closing_steps_are_the_optimizers_own() -> None:
    optimizer = sgd()
    scaled = ScaledSteps([optimizer])
    scaled.factors = Factors(2.0)
    scaled.close()

    optimizer.step()

    assert optimizer.lrs == [0.1]
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks


def test_a_scaler_that_leaves_a_step_out_changes_nothing() -> None:
    optimizer = sgd()
    scaled = ScaledSteps([optimizer])
    scaled.factors = Factors(2.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    parameter = optimizer.param_groups[0]["params"][0]
    scaler.scale(torch.zeros(1))
    parameter.grad = torch.full((2,), torch.inf)

    scaler.step(optimizer)
    scaler.update()

    assert optimizer.lrs == []
    assert optimizer.param_groups[0]["lr"] == 0.1


def test_betas_that_cannot_follow_are_refused() -> None:
    adam = Adam([torch.nn.Parameter(torch.ones(1))], betas=(0.9, 0.999))

    check_betas([adam], 9.9)
    message = (
        "`max_batch_size` must stay below 1/(1 - β) times the first batch size for"
        ' `lr_scaling="malladi"`, got 16 times for β = 0.9. Lower it to less than 10 times, or'
        ' choose "sqrt".'
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        check_betas([adam], 16.0)
    with pytest.raises(ValueError, match=r'^`lr_scaling="malladi"` must be used with an optimizer'):
        check_betas([sgd()], 2.0)


def in_a_closure(set_to: float | None, times: int = 1) -> tuple[list[float], list[float]]:
    """What closures see of the learning rate, and what the updates have."""

    class Repeats(Seen):
        def step(self, closure: Any = None) -> Any:
            for _ in range(times):
                closure()
                self.lrs.append(float(self.param_groups[0]["lr"]))

    optimizer, seen = Repeats([torch.nn.Parameter(torch.ones(2))], lr=0.1), list[float]()
    scaled = ScaledSteps([optimizer])
    scaled.factors = Factors(3.0)

    def closure() -> None:
        seen.append(optimizer.param_groups[0]["lr"])
        if set_to is not None:
            optimizer.param_groups[0]["lr"] = set_to

    optimizer.step(closure)
    optimizer.step(closure=closure)
    assert optimizer.param_groups[0]["lr"] == (0.1 if set_to is None else set_to)
    return seen, optimizer.lrs


@pytest.mark.parametrize("times", [1, 2])
def test_a_closure_sees_the_scheduled_rate_and_the_step_has_the_factor(times: int) -> None:
    seen, used = in_a_closure(None, times)

    assert seen == [0.1] * 2 * times
    assert used == pytest.approx([0.3] * 2 * times)


@pytest.mark.parametrize("times", [1, 2])
def test_a_rate_that_a_closure_sets_is_scaled_and_stays(times: int) -> None:
    seen, used = in_a_closure(0.2, times)

    assert seen == [0.1] + [0.2] * (2 * times - 1)
    assert used == pytest.approx([0.6] * 2 * times)


def test_the_scheduled_rate_is_the_mean_of_all_groups() -> None:
    groups = [{"params": [torch.nn.Parameter(torch.ones(1))], "lr": lr} for lr in (0.1, 0.3)]
    optimizer = SGD(groups)
    scaled = ScaledSteps([optimizer])
    before = scaled.learning_rate

    optimizer.param_groups[1]["lr"] = 0.1  # a decay of the second group alone

    assert before == pytest.approx(0.2)
    assert scaled.learning_rate == pytest.approx(0.1)


def test_an_optimizer_that_reads_its_rate_before_the_closure_has_the_factor() -> None:
    def stepped(factor: float) -> float:
        parameter = torch.nn.Parameter(torch.ones(1))
        optimizer = torch.optim.LBFGS([parameter], lr=0.1, max_iter=1)
        ScaledSteps([optimizer]).factors = Factors(factor)

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = parameter.sum()
            loss.backward()
            return loss

        optimizer.step(closure)
        return 1 - parameter.item()

    assert stepped(4.0) == pytest.approx(4 * stepped(1.0))


def test_a_group_that_is_unfrozen_later_is_no_decay() -> None:
    optimizer = sgd(0.1)
    scaled = ScaledSteps([optimizer])

    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))], "lr": 0.01})

    assert scaled.learning_rate == 0.1
