# SPDX-License-Identifier: Apache-2.0
"""Losses that are one mean over the tokens of a step, under Lightning."""

from typing import Any

import lightning.pytorch as L
import pytest
import torch
from brute_force import gradient_of, micro_batch, over_step
from fits import FEATURES, classifier, fit_here, heard
from refused import refused
from torch import Tensor

from noisescale import BatchSizeScheduler, NoiseScaleMonitor

WINDOW = 3
TOKENS = [1, 6, 2, 9, 4, 1, 3, 3, 8]
"""Of the batches, in this order."""


def batches() -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [
        {
            "x": torch.randn(2, FEATURES, generator=generator) + 1,
            "attention_mask": (torch.arange(10) < n).long().repeat(2, 1),
        }
        for n in TOKENS
    ]


class Module(type(classifier(lr=0.0))):
    def training_step(self, batch: dict[str, Tensor], index: int) -> Tensor:
        first = index - index % WINDOW
        share = TOKENS[index] / sum(TOKENS[first : first + WINDOW])
        return self.net(batch["x"]).square().mean() * share * WINDOW


class TwiceByHand(Module):
    """Two optimizer steps with each batch."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: dict[str, Tensor], index: int) -> None:
        for _ in range(2):
            self.optimizers().zero_grad()
            self.manual_backward(self.net(batch["x"]).square().mean())
            self.optimizers().step()


def fit(callback: L.Callback, module: L.LightningModule | None = None) -> None:
    batches_of_all = torch.utils.data.DataLoader(batches(), batch_size=None)
    accumulated = WINDOW if module is None else 1
    fit_here(
        callback,
        model=module or Module(),
        train_loader=batches_of_all,
        accumulate_grad_batches=accumulated,
    )


def tokens_of(batch: dict[str, Tensor]) -> Tensor:
    return batch["attention_mask"].sum(1)


def gradient(batch: dict[str, Tensor]) -> Tensor:
    return gradient_of(Module(), lambda module: module.net(batch["x"]).square().mean()).double()


@pytest.mark.parametrize("weight_fn", [tokens_of, lambda batch: tokens_of(batch).sum().item()])
def test_a_mean_over_the_tokens_of_a_window_is_measured_by_its_weights(weight_fn: Any) -> None:
    """|G|² of the products of different parts, over their mean share in the weights."""
    monitor = NoiseScaleMonitor(window=10_000, every_n_steps=1, weight_fn=weight_fn)
    fit(monitor)

    gradients, signals, shares, squares = list(map(gradient, batches())), [], [], []
    for step in range(3):
        part = slice(WINDOW * step, WINDOW * (step + 1))
        parts = [micro_batch(g, 2, n) for g, n in zip(gradients[part], TOKENS[part], strict=True)]
        signal, trace = over_step(parts, 6)
        shares.append(1 - sum(n**2 for n in TOKENS[part]) / sum(TOKENS[part]) ** 2)
        signals.append(signal * shares[-1] / (sum(shares) / len(shares)))
        squares.append(signal + trace / 6)
    signal = sum(signals) / 3
    (saved,) = monitor.state_dict()["optimizers"]
    weight, *sums = saved["meter"]["estimates"]["sums"].values()
    trace = 6 * (sum(squares) / 3 - signal)
    assert [x / weight for x in sums] == pytest.approx([signal, trace], rel=1e-3)


class OfWords(Module):
    """The loss is a sum over the words of a batch, or their mean."""

    def __init__(self, *, sums: bool) -> None:
        super().__init__()
        self.sums = sums

    def training_step(self, batch: Any, index: int) -> Tensor:
        x = 1 + batch[0][..., None].sin().expand(-1, -1, FEATURES)
        losses = (self.net(x) + 3).square()
        return losses.sum() if self.sums else losses.mean()


@pytest.mark.parametrize("sums", [True, False])
def test_words_in_batches_of_several_lengths_are_told_of_if_losses_follow(sums: bool) -> None:
    """Nothing is called `labels` or `attention_mask` here."""
    loaded = [(torch.arange(1, 3 * n + 1).reshape(3, n),) for n in TOKENS * 4]

    with heard() as told:
        fit_here(
            NoiseScaleMonitor(every_n_steps=1),
            model=OfWords(sums=sums),
            train_loader=torch.utils.data.DataLoader(loaded, batch_size=None),  # type: ignore[arg-type]
            accumulate_grad_batches=WINDOW,
        )

    assert len([one for one in told if "by the lengths of their batches" in one]) == sums


def test_a_scheduler_hands_its_weights_to_the_monitor_that_it_makes() -> None:
    seen = []

    def weight_fn(batch: dict[str, Tensor]) -> Tensor:
        seen.append(1)
        return tokens_of(batch)

    fit(BatchSizeScheduler("ratio", weight_fn=weight_fn, max_batch_size=6))
    assert seen

    with refused("weight_fn", requirement="be None"):
        BatchSizeScheduler(monitor=NoiseScaleMonitor(), weight_fn=weight_fn)


def test_a_weight_that_is_none_is_an_error_of_the_first_batch() -> None:
    with refused("weight_fn", requirement="return a number"):
        fit(NoiseScaleMonitor(weight_fn=lambda batch: None))
    with refused("weight_fn", error=TypeError):
        NoiseScaleMonitor(weight_fn=1)  # type: ignore[arg-type]


def test_windows_without_weight_are_left_out_and_told_once() -> None:
    monitor = NoiseScaleMonitor(every_n_steps=1, weight_fn=lambda batch: 0)
    with heard() as told:
        fit(monitor)
    assert monitor.noise_scale.steps == 0
    assert len([one for one in told if "all zero" in one]) == 1


def test_every_step_of_a_batch_has_its_weight() -> None:
    """Measured are steps 1, 4, 7, ...: the first or the second of their batch."""
    monitor = NoiseScaleMonitor(
        every_n_steps=3, small_batch="half", weight_fn=lambda batch: torch.tensor([1.0, -1.0])
    )
    with pytest.warns(UserWarning, match="negative"):
        fit(monitor, TwiceByHand())

    counts = monitor.state_dict()["optimizers"][0]["meter"]["counts"]
    assert (counts["measured_steps"], counts["skipped_steps"]) == (0, 6)
