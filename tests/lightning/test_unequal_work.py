# SPDX-License-Identifier: Apache-2.0
"""Ranks with batches of their own sizes, tokens instead of examples, copies of examples."""

import itertools
from typing import Any

import pytest
import torch
from brute_force import expected, gradient_of, micro_batch, whole
from fits import check_norms, classifier, data, fit, fit_here, loader, loss_of
from tiers import slow
from torch import Tensor
from torch.utils.data import DataLoader

from noisescale import NoiseScaleMonitor
from noisescale.collectors.rows.step_norms import StepNorms

LENGTHS = ((3, 9, 5, 7), (2, 2, 4, 8))
"""Tokens in the batches of either rank."""


class Tokens(type(classifier(lr=0.0))):
    """A mean over as many tokens as there happen to be; every rank reads its own batches."""

    def loss(self, start: int, length: int) -> Tensor:
        x, y = (t[start : start + length] for t in data(40).tensors)
        return loss_of(self.net, (x.to(self.net[0].weight.dtype), y))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(*span(self.global_rank, batch_idx))


def span(rank: int, batch: int) -> tuple[int, int]:
    return sum(LENGTHS[rank][:batch]) + 20 * rank, LENGTHS[rank][batch]


@pytest.mark.parametrize("small_batch", ["rank", slow("micro_batch")])
def test_ranks_with_their_own_numbers_of_tokens(
    small_batch: Any, recorded: list[StepNorms]
) -> None:
    """Weighted as they are in the gradient: every micro-batch of every rank alike."""
    batches = itertools.count()

    def tokens(batch: Any) -> int:
        return LENGTHS[torch.distributed.get_rank()][next(batches)]

    results = fit(
        NoiseScaleMonitor(batch_size_fn=tokens, unit="tokens", small_batch=small_batch),
        model=Tokens(),
        train_loader=DataLoader(range(4), batch_size=1),
        use_distributed_sampler=False,
        accumulate_grad_batches=2,
        results=lambda *_: list(recorded),
    )

    module, expected_steps = Tokens().double(), []
    for step in range(2):
        parts = []
        for rank, lengths in enumerate(LENGTHS):
            micros = [
                micro_batch(
                    gradient_of(module, lambda m, at=(rank, i): m.loss(*span(*at))), lengths[i]
                )
                for i in (2 * step, 2 * step + 1)
            ]
            parts += [whole(micros)] if small_batch == "rank" else micros
        expected_steps.append(expected(parts))
    for steps in results:
        check_norms(steps, expected_steps)
        assert [got.examples for got in steps] == [
            sum(sum(of[2 * step : 2 * step + 2]) for of in LENGTHS) for step in range(2)
        ]


def test_copies_of_an_example_count_once(recorded: list[StepNorms]) -> None:
    """Batch augmentation (Hoffer et al. 2019): every example four times in its batch."""
    fit_here(
        NoiseScaleMonitor(batch_size_fn=lambda batch: len(batch[0]) // 4),
        train_loader=loader(8, 96),
        accumulate_grad_batches=3,
    )

    assert {(s.small_batch, s.big_batch, s.examples) for s in recorded} == {(2, 6, 6)}
