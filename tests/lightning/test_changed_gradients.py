# SPDX-License-Identifier: Apache-2.0
"""Callbacks and modules that write to gradients."""

from typing import Any, NamedTuple

import lightning.pytorch as L
import pytest
import torch
from fits import classifier, fit_here, heard, loader

from noisescale import NoiseScaleMonitor


class ScalesAfterEachPass(L.Callback):
    def on_after_backward(self, fitting: Any, module: Any) -> None:
        for p in module.parameters():
            p.grad.mul_(1.1)


class ScalesBeforeTheStep(L.Callback):
    def on_before_optimizer_step(self, fitting: Any, module: Any, optimizer: Any) -> None:
        ScalesAfterEachPass().on_after_backward(fitting, module)


def module_that_scales() -> Any:
    module = classifier(lr=0.0)

    class Scales(type(module)):  # type: ignore[misc]
        def on_after_backward(self) -> None:
            ScalesAfterEachPass().on_after_backward(None, self)

    module.__class__ = Scales
    return module


class Fitted(NamedTuple):
    noise_scale: Any
    skipped: int
    told: list[str]


def fit(*callbacks: Any, module: Any = None, **options: Any) -> Fitted:
    """20 batches of a model that stands still."""
    torch.manual_seed(0)
    monitor = NoiseScaleMonitor(every_n_steps=1)
    model = classifier(lr=0.0) if module is None else module
    with heard() as told:
        # The monitor is the last: callbacks before it have changed the gradients by its turn.
        fitting = fit_here(*callbacks, monitor, model=model, train_loader=loader(8, 160), **options)
    skipped = int(fitting.callback_metrics["noise_scale/skipped_steps"])
    return Fitted(monitor.noise_scale, skipped, [one for one in told if "not measured" in one])


@pytest.mark.parametrize(("accumulation", "clip"), [(1, 1e-3), (2, None)])
def test_gradients_changed_before_the_step_are_measured_as_the_pass_made_them(
    accumulation: int, clip: float | None
) -> None:
    untouched = fit(accumulate_grad_batches=accumulation)

    found = fit(ScalesBeforeTheStep(), accumulate_grad_batches=accumulation, gradient_clip_val=clip)

    assert found == untouched
    assert (untouched.skipped, untouched.told) == (0, [])


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_gradients_changed_after_the_only_pass_are_measured_as_it_made_them(precision: Any) -> None:
    untouched = fit(precision=precision)

    for found in (
        fit(ScalesAfterEachPass(), precision=precision),
        fit(module=module_that_scales(), precision=precision),
    ):
        assert found == untouched
    assert (untouched.skipped, untouched.told) == (0, [])


@pytest.mark.parametrize(
    ("callbacks", "module", "culprit"),
    [
        ([ScalesAfterEachPass()], None, "ScalesAfterEachPass.on_after_backward"),
        ([], module_that_scales, "Scales.on_after_backward"),
    ],
)
def test_who_changes_gradients_between_passes_is_named(
    callbacks: list[Any], module: Any, culprit: str
) -> None:
    found = fit(*callbacks, module=module and module(), accumulate_grad_batches=2)

    assert found.skipped == 10
    (message,) = found.told
    assert "`p.grad` was changed" in message
    assert f"`{culprit}`" in message
