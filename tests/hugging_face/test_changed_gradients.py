# SPDX-License-Identifier: Apache-2.0
"""Trainers that write to gradients, and passes that begin within a pass."""

import warnings
from typing import Any

import pytest
import torch
from ranks import as_torchrun, on_ranks
from torch import Tensor
from transformers import Trainer
from transformers_fits import Fit, fit

from noisescale.hugging_face import NoiseScaleCallback


class ScalingTrainer(Trainer):
    """Scales the gradients after the last pass of each step."""

    def training_step(self, *arguments: Any, **options: Any) -> Tensor:
        loss = super().training_step(*arguments, **options)
        if self.accelerator.sync_gradients:
            for p in self.model.parameters():
                p.grad.mul_(1.1)
        return loss


class CachingTrainer(Trainer):
    """As GradCache: the loss is a leaf, in whose hook the batch goes through in two chunks."""

    def compute_loss(self, model: Any, inputs: Any, *_: Any, **__: Any) -> Tensor:
        def loss_of(x: Tensor, labels: Tensor) -> Tensor:
            loss: Tensor = model(x=x, labels=labels)["loss"]
            return loss

        with torch.no_grad():
            leaf = loss_of(**inputs)

        def go_through(gradient: Tensor) -> None:
            with torch.enable_grad():
                for x, y in zip(inputs["x"].chunk(2), inputs["labels"].chunk(2), strict=True):
                    (loss_of(x, y) / 2 * gradient).backward()

        leaf.requires_grad_().register_hook(go_through)
        return leaf


def trained(kind: type[Trainer], **options: Any) -> tuple[Fit, list[str]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = fit(NoiseScaleCallback(every_n_steps=1), kind=kind, learning_rate=0.0, **options)
    return found, [str(w.message) for w in caught if "steps are not measured" in str(w.message)]


@pytest.mark.parametrize("accumulation", [1, 2])
def test_gradients_changed_before_the_step_are_measured_as_the_pass_made_them(
    accumulation: int,
) -> None:
    untouched, _ = trained(Trainer, gradient_accumulation_steps=accumulation)

    found, told = trained(ScalingTrainer, gradient_accumulation_steps=accumulation)

    assert found.noise_scale == untouched.noise_scale
    assert found.state["meter"]["counts"]["measured_steps"] == 7
    assert told == []


@pytest.mark.parametrize("accumulation", [1, 2])
def test_passes_that_begin_within_a_pass_are_refused_by_name(accumulation: int) -> None:
    found, told = trained(CachingTrainer, gradient_accumulation_steps=accumulation)

    assert found.noise_scale.steps == 0
    (message,) = told
    assert message.startswith("A backward pass ran within another one (as with GradCache")


def test_passes_that_begin_within_a_pass_are_refused_by_name_on_all_ranks() -> None:
    def one() -> tuple[float, list[str]]:
        found, told = trained(CachingTrainer)
        return found.noise_scale.steps, told

    (steps, told), (others, nothing) = on_ranks(2, as_torchrun(one))

    assert (steps, others, nothing) == (0, 0, [])
    assert told[0].startswith("A backward pass ran within another one (as with GradCache")
