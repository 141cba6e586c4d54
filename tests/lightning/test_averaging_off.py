# SPDX-License-Identifier: Apache-2.0
"""What DDP does beside its average: buffers of ranks, in training and validation."""

from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from fits import data, fit, loss_of, network
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from resumable import Resumable
from torch import Tensor, _dynamo, nn
from torch.utils.data import DataLoader

from noisescale import AdasumReduction, DecentLaMReduction

_ = _dynamo  # Optimizers import it: here once, and not in each rank.


class Normalized(L.LightningModule):
    """With a BatchNorm whose running statistics it keeps at each validation."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.net = nn.BatchNorm1d(8), network()
        self.validated: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        return self.net(self.norm(x))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return loss_of(self, batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.validated.append(self.norm.running_mean.clone())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)

    def val_dataloader(self) -> Any:
        return DataLoader(data(16), batch_size=8)


@pytest.mark.parametrize("callback", [AdasumReduction, DecentLaMReduction])
def test_all_ranks_validate_with_the_statistics_of_the_checkpoint(
    callback: Any, tmp_path: Path
) -> None:
    first, second = fit(
        callback(),
        ModelCheckpoint(tmp_path, filename="at", every_n_train_steps=4),
        model=Normalized(),
        results=lambda fitting, module: module.validated,
        max_steps=4,
        val_check_interval=2,
        num_sanity_val_steps=0,
        limit_val_batches=1,
        enable_checkpointing=True,
    )

    saved = torch.load(tmp_path / "at.ckpt", weights_only=True)["state_dict"]["norm.running_mean"]
    assert len(first) == 2
    assert all(map(torch.equal, first, second))
    assert torch.equal(first[-1], saved)
    assert not torch.equal(first[0], first[1])


@pytest.mark.filterwarnings("ignore:`broadcast_buffers` is deprecated:FutureWarning")
def test_buffers_that_ddp_leaves_each_rank_are_resumed_exactly(tmp_path: Path) -> None:
    def run(steps: int, ckpt_path: Any = None) -> list[Tensor]:
        return fit(
            DecentLaMReduction(),
            *([ModelCheckpoint(tmp_path, filename="at", every_n_train_steps=3)] * (steps == 3)),
            model=Normalized(),
            train_loader=Resumable(),
            results=lambda fitting, module: module.norm.running_mean.clone(),
            strategy=DDPStrategy(start_method="fork", broadcast_buffers=False),
            max_steps=steps,
            limit_val_batches=0,
            enable_checkpointing=steps == 3,
            use_distributed_sampler=False,
            ckpt_path=ckpt_path,
        )

    whole = run(5)
    run(3)

    assert not torch.equal(*whole)
    assert all(map(torch.equal, whole, run(5, tmp_path / "at.ckpt")))
