# SPDX-License-Identifier: Apache-2.0
"""The tests of Bollapragada et al., on intervals of the noise along the gradient and of all."""

import math
from typing import Any

import pytest
import torch
from refused import refused
from tiers import slow

from noisescale import BatchSizeController, NoiseScale, NoiseScaleMeter, Plan
from noisescale.methods.inner_product import WIDEST, InnerProductTest, NoiseAlongGradient
from noisescale.scheduling import Progress

TAN_80 = 5.6713


def noise_scale(low: float, value: float, high: float) -> NoiseScale:
    return NoiseScale(value, low, high, grad_sq_norm=1.0, noise_trace=value, steps=50.0)


def later(**extra: NoiseScale) -> Progress:
    return Progress(steps=1000, examples=1e6, extra=extra)


WHOLE = (3000, 4000, 5000)


@pytest.mark.parametrize(
    ("nu", "along", "whole", "now", "wanted"),
    [
        (None, (81, 162, 243), WHOLE, 64, 200),  # 162/0.81, its low end being 100
        (None, (74, 162, 243), WHOLE, 64, 64),  # the low end, 91, is below 1.5 x 64
        (None, (20, 30, 40), WHOLE, 100, 100),  # never less, though 49 is below 100/1.5
        (None, (81, math.nan, math.inf), WHOLE, 64, 100),  # not resolved: up to what it is above
        (None, (0, math.nan, math.inf), WHOLE, 64, 64),
        # The orthogonality test bounds the rest of the noise, too.
        (WIDEST, (8, 10, 12), (3500, 4000, 5000), 64, (4000 - 10) / TAN_80**2),  # 124 > 12
        (WIDEST, (81, 162, 243), (300, 400, 500), 64, 200),  # 200 > 7
        (WIDEST, (8, 10, 12), (1900, 4000, 5000), 64, 64),  # (1900 - 12)/32.2 is below 1.5 x 64
        (WIDEST, (8, 10, 12), (300, 500, math.inf), 1000, 1000),  # unbounded: no shrinking
    ],
)
def test_the_batch_follows_the_noise_along_the_gradient_and_that_of_the_rest(
    nu: Any, along: Any, whole: Any, now: int, wanted: float
) -> None:
    policy = BatchSizeController(Plan(8, 1), sgd(), InnerProductTest(nu=nu)).settings.policy

    found = policy(noise_scale(*whole), Plan(now, 1), later(along_gradient=noise_scale(*along)))

    assert found == pytest.approx(wanted, rel=1e-3)
    assert policy(NoiseScale.unknown(), Plan(now, 1), later()) == now  # without a measurement


@pytest.mark.parametrize(("name", "value"), [("theta", 0), ("nu", math.nan), ("growth", 1.0)])
def test_wrong_arguments_are_refused(name: str, value: float) -> None:
    with refused(name, got=f"{value}"):
        InnerProductTest(**{name: value})


def sgd(**options: float) -> torch.optim.SGD:
    return torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], **{"lr": 0.1, **options})


def followed(model: torch.nn.Module, **options: Any) -> NoiseScaleMeter:
    meter = NoiseScaleMeter(model, every_n_steps=1, **options)
    meter.follow()
    return meter


def test_a_meter_that_does_not_measure_it_is_refused() -> None:
    meter = followed(torch.nn.Linear(2, 1))
    controller = BatchSizeController(Plan(8, 1), sgd(), InnerProductTest())

    with refused("meter", requirement="NoiseAlongGradient"):
        controller.update(meter)
    meter.close()


def test_only_decisions_wait_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    meter = followed(model, extra=[NoiseAlongGradient], optimizer=optimizer)
    controller = BatchSizeController(Plan(8, 1), optimizer, InnerProductTest())
    read: list[int] = []
    settle = meter._settle
    monkeypatch.setattr(meter, "_settle", lambda **how: [read.append(step), settle(**how)])

    for step in range(40):  # noqa: B007 - the patch reads it
        train(optimizer, meter, (model(torch.randn(8, 2)) ** 2).mean(), 8)
        controller.update(meter)
    meter.close()

    assert len(set(read)) < 20  # decisions at steps 4, 5, 6, 7, 8, 10, 12, ..., and the end


def train(optimizer: Any, meter: NoiseScaleMeter, loss: Any, size: int) -> None:
    optimizer.zero_grad()
    meter.backward(loss, local_batch_size=size)
    meter.step()
    optimizer.step()


def test_a_function_may_ask_for_the_noise_along_the_gradient() -> None:
    def policy(noise_scale: Any, plan: Plan, progress: Progress) -> float:
        return 8.0

    policy.extra = NoiseAlongGradient  # type: ignore[attr-defined]  # for the scheduler
    settings = BatchSizeController(Plan(8, 1), sgd(), policy).settings

    assert settings.needs_noise_scale
    assert settings.policy.extra is NoiseAlongGradient


@pytest.mark.parametrize("policy", [InnerProductTest(0.3, nu=TAN_80), slow(InnerProductTest(0.3))])
def test_in_a_loop_the_batch_grows_where_the_gradient_is_lost_in_noise(policy: Any) -> None:
    """A regression near its solution: b_ip is about 4/0.0256, and of three inputs one counts."""
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1, bias=False)
    with torch.no_grad():
        model.weight.fill_(0.08)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-5, momentum=0.9)
    meter = followed(model, extra=[NoiseAlongGradient], optimizer=optimizer)
    controller = BatchSizeController(
        Plan(64, 1), optimizer, policy, lr_scaling="none", max_device_batch_size=4096
    )

    for _ in range(250):
        size = int(controller.plan.batch_size)
        x = torch.randn(size, 3) * torch.tensor([1.0, 0.1, 0.1])
        y = torch.randn(size, 1)
        train(optimizer, meter, ((model(x) - y) ** 2).mean(), size)
        controller.update(meter)
    meter.close()

    assert controller.plan.batch_size >= 256  # b_ip/0.09 is 1,700
    assert controller.moves[0].reason.startswith("noise along")
