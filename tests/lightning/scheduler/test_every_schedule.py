# SPDX-License-Identifier: Apache-2.0
"""Every schedule of torch gives the learning rates that it gives at a constant batch size."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from fits import fit
from named_batches import Names, fitted, names, rates_in_a_plain_loop
from tiers import slow, slow_but
from torch.optim import lr_scheduler
from torch.optim.lr_scheduler import LRScheduler

from noisescale import BatchSizeScheduler

BATCHES, ACCUMULATE, EPOCHS = 11, 2, 4
STEPS_PER_EPOCH = 6  # the last one has a single batch
TOTAL = STEPS_PER_EPOCH * EPOCHS


class Sawtooth(LRScheduler):
    """A schedule of a user's own, that goes on from the learning rate there is."""

    def get_lr(self) -> list[Any]:
        up = 1.25 if self.last_epoch % 5 else 0.4
        return [
            group["lr"] * (up if self.last_epoch else 1) for group in self.optimizer.param_groups
        ]


def table(optimizer: Any, total: int) -> Any:
    """Of exactly the steps that the run is to have, as any other raises an error."""
    factors = torch.linspace(1, 0.1, total + 1).tolist()
    return lr_scheduler.LambdaLR(optimizer, lambda step: factors[step])


def warm_up_then_one_cycle(optimizer: Any, total: int) -> Any:
    parts = [
        lr_scheduler.LinearLR(optimizer, 0.1, total_iters=total // 4),
        lr_scheduler.OneCycleLR(optimizer, 0.5, total_steps=total - total // 4),
    ]
    return lr_scheduler.SequentialLR(optimizer, parts, [total // 4])


def chain(optimizer: Any, total: int) -> Any:
    parts = [
        lr_scheduler.ConstantLR(optimizer, 0.1, total_iters=total // 3),
        lr_scheduler.ExponentialLR(optimizer, 0.9),
    ]
    return lr_scheduler.ChainedScheduler(parts)


MADE: dict[str, Callable[[Any, int], Any]] = {
    "LambdaLR": table,
    "MultiplicativeLR": lambda o, n: lr_scheduler.MultiplicativeLR(o, lambda step: 1 - step / n),
    "StepLR": lambda o, n: lr_scheduler.StepLR(o, n // 4),
    "MultiStepLR": lambda o, n: lr_scheduler.MultiStepLR(o, [n // 3, n - 1]),
    "ConstantLR": lambda o, n: lr_scheduler.ConstantLR(o, 0.3, n // 3),
    "LinearLR": lambda o, n: lr_scheduler.LinearLR(o, 0.1, total_iters=n),
    "ExponentialLR": lambda o, n: lr_scheduler.ExponentialLR(o, 0.9),
    "SequentialLR": warm_up_then_one_cycle,
    "CosineAnnealingLR": lambda o, n: lr_scheduler.CosineAnnealingLR(o, n),
    "ChainedScheduler": chain,
    "CyclicLR": lambda o, n: lr_scheduler.CyclicLR(o, 0.1, 1, n // 4, cycle_momentum=False),
    "CosineAnnealingWarmRestarts": lambda o, n: lr_scheduler.CosineAnnealingWarmRestarts(o, n // 3),
    "OneCycleLR": lambda o, n: lr_scheduler.OneCycleLR(o, 0.5, total_steps=n),
    "PolynomialLR": lambda o, n: lr_scheduler.PolynomialLR(o, n, power=2),
    "a user's own": lambda o, n: Sawtooth(o),
}

GROWS, SHRINKS = {0: 4, 3: 12}, {0: 4, 3: 2}
LENGTHS = {"grows": (GROWS, 6), "shrinks": (SHRINKS, 1)}


def by_step(make: Callable[[Any, int], Any]) -> Callable[[Any, Any], Any]:
    def configured(optimizer: Any, of: Any) -> Any:
        return {"scheduler": make(optimizer, of.estimated_stepping_batches), "interval": "step"}

    return configured


def begins(later: int) -> Iterator[tuple[int, int]]:
    """Epoch and batch that each step begins with, the fourth and all after it of `later`."""
    step = 0
    for epoch in range(EPOCHS):
        batch = 0
        while batch < BATCHES:
            yield epoch, batch
            batch += ACCUMULATE if step < 3 else later
            step += 1


def test_there_is_a_case_for_every_schedule_of_torch() -> None:
    of_torch = {
        name
        for name, kind in vars(lr_scheduler).items()
        if isinstance(kind, type) and issubclass(kind, LRScheduler) and not name.startswith("_")
    }

    waits_for_a_metric = {"ReduceLROnPlateau"}  # see test_schedules.py
    assert of_torch - {"LRScheduler"} == set(MADE) - {"a user's own"} | waits_for_a_metric


@pytest.mark.parametrize("batch_size", LENGTHS)
@pytest.mark.parametrize("kind", slow_but(MADE, "SequentialLR", "LambdaLR", "a user's own"))
def test_a_schedule_is_where_it_is_at_a_constant_batch_size(kind: str, batch_size: str) -> None:
    """As a function of the examples: their share of the epoch, and at its end all of it."""
    policy, later = LENGTHS[batch_size]
    module = Names(2 * BATCHES, by_step(MADE[kind]))

    fitted(
        BatchSizeScheduler(policy, max_batch_size=12, lr_scaling="none"),
        module=module,
        data=names(2 * BATCHES, 2),
        accumulate_grad_batches=ACCUMULATE,
        max_epochs=EPOCHS,
    )

    oracle = rates_in_a_plain_loop(MADE[kind], TOTAL)
    passed = [e * STEPS_PER_EPOCH + b // ACCUMULATE for e, b in begins(later)]
    assert len(passed) != TOTAL
    assert module.rates == pytest.approx([oracle[steps] for steps in passed], rel=1e-9)
    assert module.optimizer.param_groups[0]["lr"] == pytest.approx(oracle[-1], rel=1e-9)


@pytest.mark.parametrize(
    ("policy", "limit", "total"),
    [(GROWS, 7, 12), slow(SHRINKS, 1.0, 18)],
)
def test_on_two_ranks_it_ends_with_the_batches_that_an_epoch_is_limited_to(
    policy: dict[int, float], limit: float, total: int
) -> None:
    """7 of 11 batches, the last of 11 a short one: 4 steps in each of 3 epochs."""
    doubled = {step: 2 * size for step, size in policy.items()}

    def last_epoch(fitting: Any, module: Any) -> tuple[int, int]:
        (config,) = fitting.lr_scheduler_configs
        return config.scheduler.last_epoch, config.scheduler.total_steps

    ends = fit(
        BatchSizeScheduler(doubled, max_batch_size=24, lr_scaling="none"),
        model=Names(43, by_step(MADE["OneCycleLR"])),
        train_loader=names(43, 2),
        limit_train_batches=limit,
        accumulate_grad_batches=ACCUMULATE,
        max_epochs=3,
        results=last_epoch,
    )

    assert ends == [(total, total)] * 2
