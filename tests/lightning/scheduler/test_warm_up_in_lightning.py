# SPDX-License-Identifier: Apache-2.0
"""AutoWarmUp, stepped by a Lightning Trainer."""

from pathlib import Path
from typing import Any

import pytest
import torch
from fits import classifier, fit, loader, loss_of
from lightning.pytorch.callbacks import ModelCheckpoint

from noisescale.methods.autowu.auto_warm_up import AutoWarmUp

EPOCHS = 22
STEPS = 7 * EPOCHS  # 100 examples in batches of 8 on each of two ranks


class WarmingUp(type(classifier())):  # type: ignore[misc]
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = loss_of(self.net, batch)
        self.warm_up.observe(loss)
        return loss

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.learning_rates = getattr(self, "learning_rates", [])
        self.learning_rates.append(self.optimizers().param_groups[0]["lr"])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        steps = self.trainer.estimated_stepping_batches
        self.warm_up = AutoWarmUp(optimizer, steps, steps_per_epoch=7, max_lr=1e4)
        return [optimizer], [{"scheduler": self.warm_up, "interval": "step"}]


def warmed_up(*callbacks: Any, ranks: int = 2, max_epochs: int = EPOCHS, **options: Any) -> Any:
    """What a fit shows on every rank."""
    return fit(
        *callbacks,
        ranks=ranks,
        model=WarmingUp(),
        max_epochs=max_epochs,
        results=lambda _, module: {
            "switch_step": module.warm_up.switch_step,
            "probabilities": module.warm_up.probabilities,
            "learning_rates": module.learning_rates,
        },
        **options,
    )


@pytest.fixture(scope="module")
def whole() -> Any:
    return warmed_up()


def test_lightning_steps_it_and_ranks_have_the_same_learning_rates(whole: Any) -> None:
    one, other = whole

    rates, switch = one["learning_rates"], one["switch_step"]
    assert rates == other["learning_rates"]
    assert len(rates) == STEPS
    assert switch in range(1, STEPS // 2)
    assert rates[:switch] == pytest.approx(
        [1e-5 * 1e9 ** (step / (STEPS // 2)) for step in range(switch)]
    )
    assert rates[-1] < 0.01 * max(rates)


@pytest.mark.slow
def test_a_run_of_two_ranks_resumes_exactly_at_the_end_of_an_epoch(
    whole: Any, tmp_path: Path
) -> None:
    saving = ModelCheckpoint(
        tmp_path, filename="{step}", save_top_k=-1, every_n_train_steps=7, monitor=None
    )
    warmed_up(saving, enable_checkpointing=True)

    for half in (7 * 3, 7 * 8, 7 * 16):
        resumed = warmed_up(ckpt_path=tmp_path / f"step={half}.ckpt")

        for ours, theirs in zip(resumed, whole, strict=True):
            assert ours["learning_rates"] == theirs["learning_rates"][half:]
            assert ours["probabilities"] == theirs["probabilities"]


def test_an_accumulated_step_counts_as_the_batch_that_it_makes_up() -> None:
    def probabilities(batch_size: int, accumulate: int) -> list[float]:
        (one,) = warmed_up(
            ranks=1,
            max_epochs=10,
            accumulate_grad_batches=accumulate,
            train_loader=loader(batch_size, examples=16 * 7),
        )
        return one["probabilities"]

    accumulated = probabilities(8, accumulate=2)

    assert len(accumulated) == 4
    assert accumulated == pytest.approx(probabilities(16, accumulate=1), abs=1e-3)
