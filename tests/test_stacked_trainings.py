# SPDX-License-Identifier: Apache-2.0
"""benchmarks/lib/stacked.py and geometries.py: trainings side by side are those one by one."""

import math
from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from benchmarks.lib.geometries import scales_at
from benchmarks.lib.stacked import (
    KINDS,
    Problem,
    Stack,
    Training,
    cross_entropy,
    orthogonalized,
    scale_of,
    steps_to_goal,
)
from benchmarks.lib.workloads import Batch

pytestmark = pytest.mark.slow

BETA2 = 0.999**2
RATES, SEEDS = (0.01, 0.05), (0, 1)


def data() -> tuple[Batch, Batch]:
    draw = torch.Generator().manual_seed(0)
    x = torch.rand(200, 20, generator=draw, dtype=torch.float64)
    y = torch.randint(4, (200,), generator=draw)
    return (x, y), (x[:50], y[:50])


def model() -> nn.Module:
    layers = nn.Linear(20, 16), nn.GELU(), nn.Linear(16, 24), nn.GELU(), nn.Linear(24, 4)
    return nn.Sequential(*layers).double()


PROBLEM = Problem("small", "examples", data, model, cross_entropy, outer=("0", "4"))


class Signs(torch.optim.Optimizer):
    """Signum and Lion as their papers write them: by c = β₁m + (1 - β₁)g, m = β₂m + (1 - β₂)g."""

    def __init__(self, parameters: Any, lr: float, one: float, two: float) -> None:
        super().__init__(parameters, {"lr": lr, "one": one, "two": two})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                m = self.state[p].setdefault("m", torch.zeros_like(p))
                p -= group["lr"] * torch.sign(group["one"] * m + (1 - group["one"]) * p.grad)
                m.copy_(group["two"] * m + (1 - group["two"]) * p.grad)


ONE_BY_ONE: dict[str, Callable[[Any, float], torch.optim.Optimizer]] = {
    "SGD": torch.optim.SGD,
    "momentum": lambda p, lr: torch.optim.SGD(p, lr, momentum=0.9),
    "momentum 0.97": lambda p, lr: torch.optim.SGD(p, lr, momentum=0.97),
    "Nesterov": lambda p, lr: torch.optim.SGD(p, lr, momentum=0.9, nesterov=True),
    "AdamW": lambda p, lr: torch.optim.AdamW(p, lr, betas=(0.9, BETA2)),
    "Signum": lambda p, lr: Signs(p, lr, 0.9, 0.9),
    "Lion": lambda p, lr: Signs(p, lr, 0.9, 0.99),
}


def stacked(optimizer: str) -> Stack:
    trainings = [Training(lr, seed) for lr, seed in product(RATES, SEEDS)]
    return Stack(PROBLEM, optimizer, 16, trainings, smallest=8)


def test_every_optimizer_is_of_a_kind_and_most_are_compared() -> None:
    every = {name for names in KINDS.values() for name in names}

    assert every - ONE_BY_ONE.keys() == {"Muon", "schedule-free"}


@pytest.mark.parametrize("name", ONE_BY_ONE)
def test_each_training_of_a_stack_is_that_of_the_optimizer_alone(name: str) -> None:
    stack = stacked(name)
    for _ in range(12):
        stack.step()

    (x, y), (test_x, test_y) = data()
    for place, (lr, seed) in enumerate(product(RATES, SEEDS)):
        torch.manual_seed(seed)
        alone = model()
        optimizer = ONE_BY_ONE[name](alone.parameters(), lr)
        draw = torch.Generator().manual_seed(1000 + seed)
        for _ in range(12):
            chosen = torch.randint(200, (16,), generator=draw)
            optimizer.zero_grad()
            nn.functional.cross_entropy(alone(x[chosen]), y[chosen]).backward()
            optimizer.step()
        # Where a gradient is nearly zero, Adam makes its rounding as large as a step.
        expected = {key: p.detach() for key, p in alone.named_parameters()}
        found = {key: p[place] for key, p in stack.stepper.parameters.items()}
        torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-6)
        loss = nn.functional.cross_entropy(alone(test_x), test_y)
        assert stack.losses()[place] == pytest.approx(float(loss.detach()))


def test_muon_steps_the_inner_matrix_orthogonally_and_others_as_adamw() -> None:
    muon, adamw = stacked("Muon"), stacked("AdamW")
    before = muon.stepper.parameters["2.weight"].clone()
    for stack in (muon, adamw):
        stack.step()

    change = (before * (1 - 0.01 * muon._lr.view(-1, 1, 1))) - muon.stepper.parameters["2.weight"]
    values = torch.linalg.svdvals(change) / (muon._lr * scale_of((24, 16))).view(-1, 1)
    assert values[:, :8].min() > 0.6  # the gradient of 16 examples has hardly more
    assert values.max() < 1.3
    for name in ("0.weight", "2.bias", "4.weight"):
        torch.testing.assert_close(muon.stepper.parameters[name], adamw.stepper.parameters[name])


def test_newton_and_schulz_turn_all_singular_values_to_about_one() -> None:
    matrices = torch.randn(3, 10, 30, dtype=torch.float64)

    for given in (matrices, matrices.mT):
        values = torch.linalg.svdvals(orthogonalized(given))
        assert values.min() > 0.6
        assert values.max() < 1.3


def test_a_rate_that_falls_ends_at_the_horizon_and_moves_nothing_after() -> None:
    trainings = [Training(0.05, 0, horizon) for horizon in (3, 8)]
    stack = Stack(PROBLEM, "AdamW", 16, trainings, smallest=8)
    for _ in range(3):
        stack.step()
    at_three = {name: p.clone() for name, p in stack.stepper.parameters.items()}
    stack.step()

    for name, p in stack.stepper.parameters.items():
        torch.testing.assert_close(p[0], at_three[name][0])
        assert not torch.equal(p[1], at_three[name][1])


def test_the_steps_to_a_goal_are_between_two_evaluations() -> None:
    stack = stacked("AdamW")

    steps = steps_to_goal(stack, goal=1.37, most_steps=200)

    assert steps[1] == math.inf  # given up, at 1.6 times the steps of the other rate
    for place, count in enumerate(steps):
        if count == math.inf:
            continue
        again = stacked("AdamW")
        losses = []
        for _ in range(math.ceil(count)):
            again.step()
            losses.append(again.losses()[place])
        # Up to the 50th step each is evaluated, from the fifth on.
        assert count <= 50
        assert losses[-1] < 1.37 <= min(losses[4:-1], default=2.0)
        above, below = math.log(losses[-2] / 1.37), math.log(losses[-2] / losses[-1])
        assert count == pytest.approx(len(losses) - 1 + above / below)


def test_scales_are_those_of_all_gradients_written_out() -> None:
    torch.manual_seed(3)
    network = model()
    (x, y), _ = data()
    x, y = x[:150], y[:150]
    left = (1 - 150 / 200) / 150  # a mean of all 200 has no error of drawing
    rows = []
    for k in range(150):
        network.zero_grad()
        nn.functional.cross_entropy(network(x[k : k + 1]), y[k : k + 1]).backward()
        rows.append({name: p.grad.clone() for name, p in network.named_parameters()})
    all_of = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
    flat = torch.cat([g.flatten(1) for g in all_of.values()], 1).numpy()
    variance, mean = flat.var(0, ddof=1), flat.mean(0)
    roots = {name: g.square().mean(0).sqrt() for name, g in all_of.items()}
    root = torch.cat([g.flatten() for g in roots.values()]).numpy()
    p = 1 / (root + np.sqrt(np.mean(root**2)))
    matrix = all_of["2.weight"]

    parameters = {name: q.detach() for name, q in network.named_parameters()}
    found = scales_at(PROBLEM, parameters, parameters, roots, (x, y), at_once=64)

    assert found["simple"] == pytest.approx(
        (variance.sum(), mean @ mean - left * variance.sum()), rel=1e-9
    )
    assert found["averaged"] == found["simple"]
    assert found["sign"] == pytest.approx(
        (np.sqrt(variance).sum() ** 2, np.abs(mean).sum() ** 2), rel=1e-9
    )
    for name, power in (("half", 1), ("preconditioned", 2)):
        noise = p**power @ variance
        signal = p**power @ mean**2 - left * noise
        assert found[name] == pytest.approx((noise, signal), rel=1e-9)
    apart = matrix - matrix.mean(0)
    covariance = torch.einsum("nij,nik->jk", apart, apart) / 149  # of the smaller side
    size = scale_of((24, 16))
    spread = size * float(torch.linalg.eigvalsh(covariance).clamp(min=0).sqrt().sum())
    length = size * float(torch.linalg.svdvals(matrix.mean(0)).sum())
    assert found["spectral"] == pytest.approx((spread**2, length**2), rel=1e-6)
    others = torch.cat([g.flatten(1) for name, g in all_of.items() if name != "2.weight"], 1)
    rest: Tensor = others.std(0).sum() + spread, others.mean(0).abs().sum() + length
    assert found["hybrid"] == pytest.approx([float(part) ** 2 for part in rest], rel=1e-6)
