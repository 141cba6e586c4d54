# SPDX-License-Identifier: Apache-2.0
"""What libraries do that hook the backward pass, in a few lines each: none may see our own pass."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from noisescale import NoiseScaleMeter, measuring
from noisescale.collectors.halves import side_effects

ROWS = 8
STEPS = 4


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3))


def batch(step: int) -> Tensor:
    return torch.randn(ROWS, 5, generator=torch.Generator().manual_seed(step))


Library = Callable[[nn.Sequential, list[float]], None]
"""Registers hooks that write down what they see."""


def opacus(model: nn.Sequential, seen: list[float]) -> None:
    """Keeps what goes in, and takes it off in the backward pass, once."""
    inputs: list[Tensor] = []

    def capture_backprops_hook(layer: nn.Module, _: Any, output: Any) -> None:
        seen.append(float((inputs.pop().sum(1) * output[0].sum(1)).sum()))

    for layer in (model[0], model[2]):
        layer.register_forward_hook(lambda m, x, _: inputs.append(x[0].detach()))
        layer.register_full_backward_hook(capture_backprops_hook)


def backpack(model: nn.Sequential, seen: list[float]) -> None:
    """Deletes after a backward pass what its forward hooks kept on the module."""

    def hook_run_extensions(layer: nn.Module, _: Any, output: Any) -> None:
        seen.append(float(layer.output.sum()))
        del layer.output

    for layer in model.children():
        layer.register_forward_hook(lambda m, _, output: setattr(m, "output", output))
        layer.register_full_backward_hook(hook_run_extensions)


def watch(model: nn.Sequential, seen: list[float]) -> None:
    """Makes a histogram of each gradient of a parameter, as W&B does."""
    for p in model.parameters():
        p.register_hook(lambda g: seen.append(float(g.sum())))


def captum(model: nn.Sequential, seen: list[float]) -> None:
    """Keeps gradients of activations: each output gets a hook in the forward pass."""
    kept: list[Tensor] = []

    def hook_on_output(layer: nn.Module, _: Any, output: Tensor) -> None:
        kept.append(output.detach())
        output.register_hook(lambda g: seen.append(float((kept.pop() * g).sum())))

    model[1].register_forward_hook(hook_on_output)


def on_a_parameter(model: nn.Sequential, hook: Callable[[Tensor], Tensor | None]) -> None:
    model[0].weight.register_hook(hook)  # type: ignore[union-attr]


def on_an_output(model: nn.Sequential, hook: Callable[[Tensor], Tensor | None]) -> None:
    model[0].register_forward_hook(lambda m, x, output: (output.register_hook(hook), None)[1])


def gives_back(model: nn.Sequential, seen: list[float]) -> None:
    """Returns the gradient as it was."""

    def hook(gradient: Tensor) -> Tensor:
        seen.append(float(gradient.sum()))
        return gradient

    on_a_parameter(model, hook)
    on_an_output(model, hook)


def asks(model: nn.Sequential, seen: list[float]) -> None:
    """A user's hook on a module, which knows of our pass."""

    def hook(layer: nn.Module, _: Any, output: Any) -> None:
        if not measuring():
            seen.append(float(output[0].sum()))

    model[1].register_full_backward_hook(hook)


def train(library: Library, *, measured: bool) -> tuple[list[float], list[Tensor], int | str]:
    """Return what the hooks saw, the weights, and the measured steps or why there are none."""
    model, seen = network(), []
    library(model, seen)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    meter = NoiseScaleMeter(model, small_batch="half", every_n_steps=1) if measured else None
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Full backward hook is firing")
        warnings.filterwarnings("ignore", "NoiseScaleMeter has nothing to measure")
        for step in range(STEPS):
            optimizer.zero_grad()
            loss = model(batch(step)).square().mean()
            if meter is not None:
                meter.before_backward(loss, ROWS)
            loss.backward()
            if meter is not None:
                meter.step()
            optimizer.step()
    weights = [p.detach() for p in model.parameters()]
    if meter is None:
        return seen, weights, 0
    meter.close()
    return seen, weights, meter.not_measured or meter.measured_steps


@pytest.mark.parametrize(
    ("library", "refused"),
    [
        (watch, ""),
        (captum, ""),
        (gives_back, ""),
        (asks, ""),
        (opacus, "capture_backprops_hook (on 0)"),
        (backpack, "hook_run_extensions (on 0)"),
    ],
)
def test_hooks_see_the_same_passes_with_and_without_the_measurement(
    library: Library, refused: str
) -> None:
    """Those on modules are refused by name before the first pass."""
    seen, weights, _ = train(library, measured=False)
    seen_measured, weights_measured, steps = train(library, measured=True)

    assert seen_measured == seen != []
    assert all(torch.equal(a, b) for a, b in zip(weights, weights_measured, strict=True))
    assert refused in str(steps) if refused else steps == STEPS


@pytest.mark.parametrize("register", [on_a_parameter, on_an_output])
@pytest.mark.parametrize("before", [True, False])
def test_hooks_that_change_gradients_are_refused_by_name(register: Any, before: bool) -> None:
    """Without them our pass has other gradients. A hook after ours changes what ours has seen."""

    def mask(gradient: Tensor) -> Tensor:
        return gradient * (gradient > 0)

    model = network()
    if before:
        register(model, mask)
    meter = NoiseScaleMeter(model, small_batch="half", every_n_steps=1)
    if not before:
        register(model, mask)
    meter.backward(model(batch(0)).square().mean(), ROWS)

    with pytest.warns(match=r"must not change gradients, .*<locals>\.mask\. Write"):
        meter.step()
    meter.close()


def test_all_hooks_are_as_they_were_and_in_their_order() -> None:
    model = network()
    hooks = [lambda gradient, i=i: None for i in range(3)]
    handles = [model[0].weight.register_hook(hook) for hook in hooks]
    own = Tensor.register_hook
    meter = NoiseScaleMeter(model, small_batch="half", every_n_steps=1)
    meter.backward(model(batch(0)).square().mean(), ROWS)
    handles[1].remove()  # while a cut is being proved
    meter.step()
    meter.close()

    kept = list(model[0].weight._backward_hooks.values())  # type: ignore[union-attr]
    assert kept == [hooks[0], hooks[2]]
    assert Tensor.register_hook is own
    assert not side_effects._hooked
