# SPDX-License-Identifier: Apache-2.0
"""The kind of an optimizer of an unknown class, from the steps of small trainings."""

import copy
import io
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiers import slow
from torch import Tensor, nn

from noisescale import NoiseScaleMeter, NoiseScaleMonitor
from noisescale.history.optimizers import OptimizerKind, OptimizerMix
from noisescale.history.reading import read_run
from noisescale.meter import watched_steps
from noisescale.meter.watched_steps import WATCHED

OTHER = OptimizerMix(OptimizerKind.OTHER)


class Unknown(torch.optim.Optimizer):
    """A user's, whose name says nothing: a subclass says how a parameter moves."""

    def __init__(self, params: Any, lr: float = 0.01, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    def move(self, gradient: Tensor, state: dict[str, Any]) -> Tensor:
        raise NotImplementedError

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            for p in group["params"]:
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.sub_(self.move(p.grad, self.state[p]), alpha=group["lr"])
        return loss


def average(state: dict[str, Any], name: str, value: Tensor, beta: float) -> Tensor:
    """A running mean in the state."""
    found: Tensor = state.setdefault(name, torch.zeros_like(value))
    return found.lerp_(value, 1 - beta)


def by(move: Callable[[Tensor, dict[str, Any]], Tensor]) -> type[Unknown]:
    """An optimizer whose parameters move so."""
    return type("Unknown", (Unknown,), {"move": staticmethod(move)})


BySign = by(lambda gradient, state: average(state, "exp_avg", gradient, 0.9).sign())
ByVelocity = by(lambda gradient, state: average(state, "v", gradient, 0.8))
ByNesterov = by(lambda gradient, state: gradient + 2 * average(state, "buffer", gradient, 0.8))
ByCubeRoot = by(lambda gradient, state: gradient.abs().pow(1 / 3) * gradient.sign())


class ByPolarFactor(Unknown):
    def move(self, gradient: Tensor, state: dict[str, Any]) -> Tensor:
        mean = average(state, "momentum_buffer", gradient, 0.9)
        if mean.ndim < 2:
            return mean
        u, _, v = torch.linalg.svd(mean, full_matrices=False)
        return u @ v


class BySecondMoment(Unknown):
    def move(self, gradient: Tensor, state: dict[str, Any]) -> Tensor:
        mean = average(state, "exp_avg", gradient, 0.9)
        return mean / (average(state, "exp_avg_sq", gradient**2, 0.95).sqrt() + 1e-8)


class ByGradient(Unknown):
    def move(self, gradient: Tensor, state: dict[str, Any]) -> Tensor:
        state["last"] = state.get("now", gradient)
        state["now"] = gradient.clone().flip(0)
        return gradient.clamp(-1e9, 1e9)


class InPlace(ByPolarFactor):
    """As KellerJordan's Muon, it overwrites the gradient."""

    def move(self, gradient: Tensor, state: dict[str, Any]) -> Tensor:
        return gradient.copy_(super().move(gradient, state))


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(),
                         nn.Linear(16, 5))  # fmt: skip


def train(
    optimizer: Any, steps: int = 20, *, log_to: Any = None, between: Any = None, **settings: Any
) -> NoiseScaleMeter:
    """Train on random classes. A row of the history is added every second step."""
    model = network()
    made = optimizer(model.parameters(), **settings)
    options: dict[str, Any] = {"every_n_steps": 1, "log_every_n_steps": 2, "log_to": log_to}
    meter = NoiseScaleMeter(model, optimizer=made, **options)
    for step in range(steps):
        x = torch.randn(32, 20)
        loss = nn.functional.cross_entropy(model(x), x[:, :5].argmax(dim=1))
        made.zero_grad()
        meter.backward(loss, local_batch_size=32)
        meter.step()
        made.step()
        if between is not None:
            between(step, made)
    meter.close()
    return meter


KINDS = {
    BySign: OptimizerKind.SIGN,
    ByPolarFactor: OptimizerKind.SPECTRAL,
    InPlace: OptimizerKind.SPECTRAL,
    BySecondMoment: OptimizerKind.ADAM,
    ByGradient: OptimizerKind.SGD,
    ByVelocity: OptimizerKind.MOMENTUM,
    ByNesterov: OptimizerKind.MOMENTUM,
    ByCubeRoot: OptimizerKind.OTHER,
}


@pytest.mark.parametrize("weight_decay", [0.3, slow(0.0)])
@pytest.mark.parametrize(("optimizer", "kind"), KINDS.items())
def test_the_kind_shows_in_a_step(optimizer: Any, kind: Any, weight_decay: float) -> None:
    assert OptimizerMix.of(optimizer([nn.Parameter(torch.zeros(1))])) == OTHER

    meter = train(optimizer, weight_decay=weight_decay)

    assert meter.history.optimizer == OptimizerMix(kind)


def test_a_lightning_fit_whose_closure_computes_the_gradient_in_the_step_shows_it() -> None:
    from fits import classifier, loader, trainer

    monitor, module = NoiseScaleMonitor(every_n_steps=1), classifier()
    module.configure_optimizers = lambda: BySign(module.parameters())

    fitting = trainer(1, strategy="auto", max_epochs=1, log_every_n_steps=2, callbacks=[monitor])
    fitting.fit(module, loader())

    assert monitor.history.optimizer == OptimizerMix(OptimizerKind.SIGN)


def test_rows_say_other_until_the_kind_is_known_and_a_resumed_run_keeps_it(tmp_path: Path) -> None:
    saved = train(BySign, log_to=tmp_path).state_dict()
    model = network()
    again = NoiseScaleMeter(model, optimizer=BySign(model.parameters()), every_n_steps=1)

    again.load_state_dict(saved)  # a run that goes on keeps the kind that its steps showed

    assert again.history.optimizer == OptimizerMix(OptimizerKind.SIGN)
    lines = map(json.loads, (tmp_path / "noise_scale.jsonl").read_text().splitlines())
    kinds = [line["optimizer"]["kind"] for line in lines if "optimizer" in line]
    assert kinds == ["other", "sign"]
    assert read_run(tmp_path).optimizer == OptimizerMix(OptimizerKind.SIGN)


def test_nothing_is_hooked_to_the_optimizer_which_trains_as_without_a_meter() -> None:
    """Bit for bit. It is copied and saved while its steps are watched."""
    at_the_end: list[Tensor] = []
    saved: list[Any] = []

    def look(step: int, made: Any) -> None:
        assert not made._optimizer_step_pre_hooks
        assert not made._optimizer_step_post_hooks
        with io.BytesIO() as file:
            torch.save(made, file)
            file.seek(0)
            saved.extend([copy.deepcopy(made), torch.load(file, weights_only=False)])
        at_the_end[:] = [p.detach().clone() for p in made.param_groups[0]["params"]]

    meter = train(ByPolarFactor, between=look)

    plain = network()
    made = ByPolarFactor(plain.parameters())
    for _ in range(20):
        x = torch.randn(32, 20)
        made.zero_grad()
        nn.functional.cross_entropy(plain(x), x[:, :5].argmax(dim=1)).backward()
        made.step()
    assert all(map(torch.equal, at_the_end, plain.parameters()))
    assert [type(made) for made in saved] == [ByPolarFactor] * 40
    assert meter.history.optimizer == OptimizerMix(OptimizerKind.SPECTRAL)


@pytest.mark.parametrize("optimizer", ["AdamW", "RMSprop", "Muon", "SGD"])
def test_known_classes_are_not_watched(optimizer: str) -> None:
    model = nn.Linear(8, 8, bias=False)
    made = getattr(torch.optim, optimizer)(model.parameters(), lr=0.1)

    assert NoiseScaleMeter(model, optimizer=made)._logged._watched is None


def test_a_change_that_rounding_hides_is_looked_at_once_more(monkeypatch: Any) -> None:
    """As in the first steps of a long warm-up."""
    looks: list[OptimizerKind | None] = []
    found = watched_steps.kind_of_step
    monkeypatch.setattr(
        watched_steps, "kind_of_step", lambda *x: looks.append(found(*x)) or looks[-1]
    )

    def warm_up(step: int, made: Any) -> None:
        made.param_groups[0]["lr"] = 1e-12 if step < 40 else 0.01

    late = train(BySign, steps=60, between=warm_up, lr=1e-12)
    assert looks == [None, OptimizerKind.SIGN]
    assert late.history.optimizer == OptimizerMix(OptimizerKind.SIGN)

    looks.clear()
    never = train(BySign, steps=60, lr=0.0)
    assert looks == [None, None]
    assert never.history.optimizer == OTHER


class WithoutRate(ByGradient):
    """Its groups have no learning rate, and one is without parameters."""

    def __init__(self, params: Any) -> None:
        torch.optim.Optimizer.__init__(self, [{"params": [*params]}, {"params": []}], {})

    def step(self, closure: Any = None) -> Any:
        with torch.no_grad():
            for p in self.param_groups[0]["params"]:
                p.sub_(p.grad, alpha=0.01)


RATELESS = pytest.mark.filterwarnings("ignore:The learning rate was not recorded")


@RATELESS
def test_groups_may_be_empty_and_without_a_learning_rate() -> None:
    meter = train(WithoutRate)

    assert meter.history.optimizer == OptimizerMix(OptimizerKind.SGD)


class WithoutState(WithoutRate):
    def no_state(self) -> Any:
        raise RuntimeError("no state")

    # A property in the place of torch's attribute.
    state = property(no_state, lambda *_: None)  # type: ignore[assignment]


@RATELESS
def test_what_fails_beside_the_training_warns_once_and_ends_nothing() -> None:
    steps: list[int] = []

    with pytest.warns(UserWarning, match="from its steps: RuntimeError: no state") as got:
        meter = train(WithoutState, steps=60, between=lambda step, _: steps.append(step))

    assert sum("from its steps" in str(warning.message) for warning in got) == 1
    assert len(steps) == 60
    assert meter.history.optimizer == OTHER


NOT_COMPARED = {
    "no matrix": torch.zeros(64),
    "too narrow": torch.zeros(3, 64),
    "too large": torch.zeros(512, 512),
    "of integers": torch.zeros(8, 8, dtype=torch.int32),
    "of a sparse gradient": torch.zeros(8, 8),
}


@pytest.mark.parametrize("what", NOT_COMPARED)
def test_what_cannot_be_compared_is_left_alone(what: str) -> None:
    p = nn.Parameter(value := NOT_COMPARED[what], requires_grad=False)
    if value.is_floating_point():
        p.grad = torch.ones_like(value)
    if "sparse" in what:
        p.grad = torch.ones(8, 8).to_sparse()
    watched = watched_steps.WatchedSteps(ByGradient([p]))

    found = [watched.before_step() for _ in range(WATCHED[-1] + 1)]

    assert found == [None] * WATCHED[-1] + [OptimizerKind.OTHER]


def test_random_wide_matrices_are_no_polar_factors() -> None:
    """Their singular values are nearly equal, whatever moved them."""
    torch.manual_seed(0)
    before, gradient = torch.zeros(8, 512), torch.randn(8, 512) * torch.logspace(0, 3, 8)[:, None]
    odd = gradient.sign() * gradient.abs().pow(0.1)

    assert watched_steps.kind_of_step(before, gradient, odd, {}, {}) is OptimizerKind.OTHER


def test_half_precision_that_hides_the_change_says_nothing() -> None:
    before = torch.full((8, 8), 1.0, dtype=torch.bfloat16)
    after = before - math.ldexp(1.0, -8)

    assert watched_steps.kind_of_step(before, torch.ones(8, 8), after, {}, {}) is None
