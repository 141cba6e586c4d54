# SPDX-License-Identifier: Apache-2.0
"""Ranks with batches of their own sizes, tokens instead of examples, copies of examples."""

from typing import Any

import lightning.pytorch as L
import pytest
import torch
from fits import CLASSES, FEATURES, classifier, data, fit, loader
from torch import Tensor, nn
from torch.utils.data import DataLoader

from noisescale import NoiseScaleMonitor
from noisescale.collectors.rows.step_norms import StepNorms

LENGTHS = ((3, 9, 5, 7), (2, 2, 4, 8))
"""Tokens in the batches of either rank."""


class Tokens(L.LightningModule):
    """A mean over as many tokens as there happen to be; every rank reads its own batches."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Linear(FEATURES, CLASSES)

    def loss(self, start: int, length: int) -> Tensor:
        x, y = (t[start : start + length] for t in data(40).tensors)
        x = x.to(self.net.weight.dtype)
        return nn.functional.cross_entropy(self.net(x), y)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(*span(self.global_rank, batch_idx))

    def train_dataloader(self) -> Any:
        return DataLoader(range(4), batch_size=1)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def span(rank: int, batch: int) -> tuple[int, int]:
    return sum(LENGTHS[rank][:batch]) + 20 * rank, LENGTHS[rank][batch]


class CountTokens:
    """A `batch_size_fn` that knows the rank and counts the batches."""

    def __init__(self) -> None:
        self.batches = 0

    def __call__(self, batch: Any) -> int:
        self.batches += 1
        return LENGTHS[torch.distributed.get_rank()][self.batches - 1]


@pytest.mark.parametrize("small_batch", ["rank", "micro_batch"])
def test_ranks_with_their_own_numbers_of_tokens(
    small_batch: Any, recorded: list[StepNorms]
) -> None:
    """Weighted as they are in the gradient: every micro-batch of every rank alike."""
    results = fit(
        NoiseScaleMonitor(batch_size_fn=CountTokens(), unit="tokens", small_batch=small_batch),
        model=Tokens(),
        train_loader=Tokens().train_dataloader(),
        use_distributed_sampler=False,
        accumulate_grad_batches=2,
        results=lambda *_: list(recorded),
    )

    for steps in results:
        assert len(steps) == 2
        for step, got in enumerate(steps):
            parts, average = [], torch.zeros(0)
            for rank in range(2):
                micros = []
                for micro in (2 * step, 2 * step + 1):
                    module = Tokens().double()
                    module.loss(*span(rank, micro)).backward()
                    gradient = torch.cat([p.grad.flatten() for p in module.parameters()])
                    micros.append((gradient, 1 / LENGTHS[rank][micro]))
                if small_batch == "rank":
                    mean = (micros[0][0] + micros[1][0]) / 2
                    micros = [(mean, sum(inverse for _, inverse in micros) / 4)]
                parts += micros
            average = torch.stack([g for g, _ in parts]).mean(0)
            a = sum(inverse for _, inverse in parts) / len(parts)
            assert got.small_sq_norm == pytest.approx(
                sum(g.square().sum().item() for g, _ in parts) / len(parts), rel=2e-6
            )
            assert got.big_sq_norm == pytest.approx(average.square().sum().item(), rel=2e-6)
            assert got.small_batch == pytest.approx(1 / a)
            assert got.big_batch == pytest.approx(len(parts) / a)
            assert got.examples == sum(sum(of[2 * step : 2 * step + 2]) for of in LENGTHS)


def test_copies_of_an_example_count_once(recorded: list[StepNorms]) -> None:
    """Batch augmentation (Hoffer et al. 2019): every example four times in its batch."""
    (steps,) = fit(
        NoiseScaleMonitor(batch_size_fn=lambda batch: len(batch[0]) // 4),
        ranks=1,
        strategy="auto",
        model=classifier(lr=0.0),
        train_loader=loader(8, 96),
        accumulate_grad_batches=3,
        results=lambda *_: list(recorded),
    )

    assert {(s.small_batch, s.big_batch, s.examples) for s in steps} == {(2, 6, 6)}
