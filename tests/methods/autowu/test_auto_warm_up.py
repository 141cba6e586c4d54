# SPDX-License-Identifier: Apache-2.0
import functools
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from refused import refused
from tiers import slow_but
from torch.optim import SGD

from noisescale.methods.autowu.auto_warm_up import AutoWarmUp


def sgd(groups: int = 1) -> SGD:
    return SGD([{"params": [torch.zeros(1)]} for _ in range(groups)], lr=0.1)


def follow(scheduler: AutoWarmUp, losses: Iterable[float]) -> list[float]:
    """Feed losses to a scheduler; return the learning rate of each step."""
    seen = []
    for loss in losses:
        seen.append(scheduler.optimizer.param_groups[0]["lr"])
        scheduler.optimizer.step()
        scheduler.observe(torch.tensor(loss))
        scheduler.step()
    return seen


def valley(steps: int, bottom: int, noise: float = 0.02) -> list[float]:
    """Lowest at step `bottom`."""
    x = (np.arange(steps) - bottom) / 100
    return (x**2 + noise * np.random.default_rng(0).normal(size=steps)).tolist()


class Quadratic:
    """Noisy SGD on |w|²/2, which diverges at learning rates above 2.

    Its loss settles at 100/2·(1 + lr/(2 - lr)): 50 for small learning rates, without end at 2.
    """

    def __init__(self, seed: int = 0, **changed: Any) -> None:
        self.noise = torch.Generator().manual_seed(seed)
        self.weight = torch.full((100,), 2.0, requires_grad=True)
        self.optimizer = SGD([self.weight], lr=0.1)
        self.scheduler = AutoWarmUp(
            self.optimizer,
            600,
            **{"steps_per_epoch": 5, "min_lr": 1e-3, "max_lr": 10.0, **changed},
        )

    def train(self, steps: int = 600) -> list[tuple[float, float]]:
        """Return the loss and the learning rate of each step."""
        seen = []
        for _ in range(steps):
            loss = (self.weight - torch.randn(100, generator=self.noise)).square().sum() / 2
            self.optimizer.zero_grad()
            loss.backward()
            seen.append((loss.item(), self.optimizer.param_groups[0]["lr"]))
            self.optimizer.step()
            self.scheduler.observe(loss)
            self.scheduler.step()
        return seen

    def state(self) -> dict[str, Any]:
        return {
            "weight": self.weight.detach(),
            "noise": self.noise.get_state(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
        }

    def load(self, state: dict[str, Any]) -> None:
        self.weight.data.copy_(state["weight"])
        self.noise.set_state(state["noise"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])


@functools.cache
def trained(seed: int = 0) -> tuple[Quadratic, list[tuple[float, float]]]:
    problem = Quadratic(seed)
    return problem, problem.train()


@pytest.mark.parametrize("seed", slow_but(range(3), 0))
def test_a_quadratic_leaves_the_warm_up_before_it_diverges(seed: int) -> None:
    problem, seen = trained(seed)
    losses, learning_rates = np.array(seen).T

    assert problem.scheduler.switch_step is not None
    assert problem.scheduler.switch_step < problem.scheduler.warmup_steps
    assert learning_rates.max() < 2
    assert losses.max() < 1.5 * losses[:5].mean()
    assert losses[-50:].mean() == pytest.approx(50, rel=0.05)  # the least that there is


def test_a_learning_rate_that_never_hurts_is_raised_for_half_the_steps() -> None:
    problem = Quadratic(min_lr=1e-4, max_lr=0.01, steps_per_epoch=20)
    _, learning_rates = np.array(problem.train()).T

    assert problem.scheduler.switch_step == problem.scheduler.peak_step == 300
    assert learning_rates.argmax() == 300
    assert learning_rates[300] == pytest.approx(0.01)


def test_the_decay_starts_from_the_learning_rate_of_the_least_loss() -> None:
    scheduler = AutoWarmUp(sgd(), 1000, steps_per_epoch=20)

    seen = follow(scheduler, valley(1000, bottom=200))

    assert scheduler.switch_step is not None
    assert scheduler.switch_step % 20 == 0
    assert scheduler.peak_step == pytest.approx(200, abs=10)
    assert seen[scheduler.switch_step] == pytest.approx(1e-5 ** (1 - scheduler.peak_step / 500))
    assert seen[: scheduler.switch_step] == pytest.approx(
        [1e-5 ** (1 - step / 500) for step in range(scheduler.switch_step)]
    )


@pytest.mark.parametrize(("patience", "bottom"), [(1, 200), (3, 200), (5, 200), (3, 0)])
def test_it_takes_patience_tests_running_to_switch(patience: int, bottom: int) -> None:
    scheduler = AutoWarmUp(sgd(), 1000, steps_per_epoch=20, patience=patience)

    follow(scheduler, valley(1000, bottom=bottom))

    passed = [p > 0.95 for p in scheduler.probabilities]
    assert passed[-patience:] == [True] * patience
    assert all(not all(passed[i : i + patience]) for i in range(len(passed) - patience))
    assert scheduler.switch_step == 20 * len(passed)
    assert (len(passed) == patience) == (bottom == 0)  # they rise from the start


def test_each_parameter_group_has_its_own_range() -> None:
    ranges = {"min_lr": [1e-5, 1e-4], "max_lr": [1.0, 0.1]}
    scheduler = AutoWarmUp(sgd(groups=2), 1000, steps_per_epoch=20, **ranges)

    assert scheduler.get_last_lr() == [1e-5, 1e-4]
    follow(scheduler, valley(1000, bottom=900)[:250])
    assert scheduler.get_last_lr() == pytest.approx([1e-5**0.5, 1e-4**0.5 * 0.1**0.5])


@pytest.mark.parametrize("half", slow_but([35, 100, 183, 400], 183, 400))
def test_resuming_continues_bit_by_bit(half: int, tmp_path: Path) -> None:
    """N steps == N/2 + checkpoint + N/2: within an epoch, at its end, and in the decay."""
    whole, expected = trained()
    assert whole.scheduler.switch_step in range(184, 400)
    first, resumed = Quadratic(), Quadratic(seed=1)
    seen = first.train(half)
    state = first.state()
    torch.save(state, tmp_path / "at.ckpt")

    first.train(50)  # of which the state sees nothing
    resumed.load(torch.load(tmp_path / "at.ckpt", weights_only=True))

    assert len(state["scheduler"]["_losses"]) == (half // 5 * 5 if half < 184 else 0)
    assert len(state["scheduler"]["_epoch"]["steps"]) == (half % 5 if half < 184 else 0)
    assert seen + resumed.train(600 - half) == expected
    assert resumed.scheduler.probabilities == whole.scheduler.probabilities
    assert resumed.scheduler.state_dict().keys() == whole.scheduler.state_dict().keys()


def test_a_step_may_count_as_more_than_an_epoch() -> None:
    """As steps of a batch that has grown do: there is no test where there is no new loss."""
    scheduler = AutoWarmUp(sgd(), 4000, steps_per_epoch=20)
    for step, loss in enumerate(valley(50, bottom=10, noise=0)):
        scheduler.optimizer.step()
        scheduler.observe(loss)
        for _ in range(1 if step < 5 else 50):
            scheduler.step()

    assert scheduler.switch_step is not None
    assert scheduler.peak_step == pytest.approx(5 + 5 * 50, abs=60)


@pytest.mark.parametrize(
    ("changed", "name", "got"),
    [
        ({"confidence": 1.0}, "confidence", "1.0"),
        ({"patience": 0}, "patience", "0"),
        ({"steps_per_epoch": 20}, "steps_per_epoch", "20"),
        ({"max_lr": [1.0, 2.0]}, "max_lr", "[1.0, 2.0]"),
    ],
)
def test_settings_that_cannot_work_are_refused(
    changed: dict[str, Any], name: str, got: str
) -> None:
    with refused(name, got=got):
        AutoWarmUp(sgd(), 100, **{"steps_per_epoch": 5, **changed})
