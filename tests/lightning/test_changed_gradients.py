# SPDX-License-Identifier: Apache-2.0
"""Callbacks and modules that write to gradients, and passes that begin within a pass."""

import warnings
from typing import Any, NamedTuple

import lightning.pytorch as L
import pytest
import torch
from fits import classifier, loader, loss_of, trainer
from torch import Tensor

from noisescale import NoiseScaleMonitor


class ScalesAfterEachPass(L.Callback):
    def on_after_backward(self, fitting: Any, module: Any) -> None:
        for p in module.parameters():
            p.grad.mul_(1.1)


class ScalesBeforeTheStep(L.Callback):
    def on_before_optimizer_step(self, fitting: Any, module: Any, optimizer: Any) -> None:
        for p in module.parameters():
            p.grad.mul_(1.1)


def module_that_scales() -> Any:
    module = classifier(lr=0.0)

    class Scales(type(module)):  # type: ignore[misc]
        def on_after_backward(self) -> None:
            for p in self.parameters():
                p.grad.mul_(0.9)

    module.__class__ = Scales
    return module


def module_with_cached_gradients() -> Any:
    """As GradCache: the loss is a leaf, in whose hook the batch goes through in two chunks."""
    module = classifier(lr=0.0)

    class Cached(type(module)):  # type: ignore[misc]
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            with torch.no_grad():
                loss = loss_of(self.net, batch)

            def go_through(gradient: Tensor) -> None:
                with torch.enable_grad():
                    for chunk in zip(*(part.chunk(2) for part in batch), strict=True):
                        (loss_of(self.net, chunk) / 2 * gradient).backward()

            leaf = loss.requires_grad_()
            leaf.register_hook(go_through)
            return leaf

    module.__class__ = Cached
    return module


class Fitted(NamedTuple):
    noise_scale: Any
    skipped: int
    told: list[str]


def fit(*callbacks: Any, module: Any = None, **options: Any) -> Fitted:
    """20 batches of a model that stands still."""
    torch.manual_seed(0)
    monitor = NoiseScaleMonitor(every_n_steps=1)
    # The monitor is the last: callbacks before it have changed the gradients by its turn.
    fitting = trainer(1, strategy="auto", callbacks=[*callbacks, monitor], **options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fitting.fit(classifier(lr=0.0) if module is None else module, loader(8, 160))
    skipped = int(fitting.callback_metrics["noise_scale/skipped_steps"])
    told = [str(w.message) for w in caught if "Such steps are not measured" in str(w.message)]
    return Fitted(monitor.noise_scale, skipped, told)


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("clip", [None, 1e-3])
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
    assert message.startswith("`p.grad` was changed between two backward passes of a step")
    assert message.endswith(f"What may do so: `{culprit}`.")


@pytest.mark.parametrize("accumulation", [1, 2])
def test_passes_that_begin_within_a_pass_are_refused_by_name(accumulation: int) -> None:
    found = fit(module=module_with_cached_gradients(), accumulate_grad_batches=accumulation)

    assert found.skipped == 20 // accumulation
    (message,) = found.told
    assert message.startswith("A backward pass ran within another one (as with GradCache")


def test_a_network_that_another_one_passes_through_is_measured_where_its_gradients_are_zeroed() -> (
    None
):
    """Zeros in place do not say that a step begins again, but what reached the network does."""

    class TwoNetworks(L.LightningModule):
        def __init__(self, set_to_none: bool) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.set_to_none = set_to_none
            self.nets = torch.nn.ModuleList([classifier().net, classifier().net])

        def training_step(self, batch: Any, batch_idx: int) -> None:
            for net, optimizer in zip(self.nets, self.optimizers(), strict=True):
                optimizer.zero_grad(set_to_none=self.set_to_none)
                self.manual_backward(loss_of(net, batch))
                optimizer.step()

        def configure_optimizers(self) -> Any:
            return [torch.optim.SGD(net.parameters(), lr=0.0) for net in self.nets]

    dropping, zeroing = (fit(module=TwoNetworks(set_to_none)) for set_to_none in (True, False))

    assert zeroing == dropping
    assert (zeroing.skipped, zeroing.told) == (0, [])
