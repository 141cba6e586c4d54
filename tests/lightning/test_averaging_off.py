# SPDX-License-Identifier: Apache-2.0
"""What DDP does beside its average: buffers of ranks, in training and validation."""

from pathlib import Path
from typing import Any

import pytest
import torch
from fits import FEATURES, classifier, fit, fit_here, fits_on_ranks, loader, network
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from resumable import Resumable
from tiers import slow
from torch import Tensor, nn

from noisescale import AdasumReduction, DecentLaMReduction


def normalized() -> Any:
    """With a BatchNorm whose running statistics it keeps at each validation."""
    norm = nn.BatchNorm1d(FEATURES)
    module = classifier(net=nn.Sequential(norm, network()))
    module.val_dataloader = lambda: loader(8, 16)
    module.norm_at_validations = []
    module.validation_step = lambda *_: module.norm_at_validations.append(norm.running_mean.clone())
    module.configure_optimizers = lambda: torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    return module


@pytest.mark.parametrize("callback", [AdasumReduction, slow(DecentLaMReduction)])
def test_all_ranks_validate_with_the_statistics_of_the_checkpoint(
    callback: Any, tmp_path: Path
) -> None:
    first, second = fit(
        callback(),
        ModelCheckpoint(tmp_path, filename="at", every_n_train_steps=4),
        model=normalized(),
        results=lambda fitting, module: module.norm_at_validations,
        max_steps=4,
        val_check_interval=2,
        num_sanity_val_steps=0,
        limit_val_batches=1,
        enable_checkpointing=True,
    )

    saved = torch.load(tmp_path / "at.ckpt", weights_only=True)["state_dict"]["net.0.running_mean"]
    assert len(first) == 2
    assert all(map(torch.equal, first, second))
    assert torch.equal(first[-1], saved)
    assert not torch.equal(first[0], first[1])


@pytest.mark.filterwarnings("ignore:`broadcast_buffers` is deprecated:FutureWarning")
def test_buffers_that_ddp_leaves_each_rank_are_resumed_exactly(tmp_path: Path) -> None:
    def run(steps: int, ckpt_path: Any = None) -> Tensor:
        fitting = fit_here(
            DecentLaMReduction(),
            *([ModelCheckpoint(tmp_path, filename="at", every_n_train_steps=3)] * (steps == 3)),
            ranks=2,
            model=normalized(),
            train_loader=Resumable(),
            strategy=DDPStrategy(broadcast_buffers=False),
            max_steps=steps,
            limit_val_batches=0,
            enable_checkpointing=steps == 3,
            use_distributed_sampler=False,
            ckpt_path=ckpt_path,
        )
        return fitting.lightning_module.net[0].running_mean.clone()

    whole, _, resumed = fits_on_ranks(
        lambda: run(5), lambda: run(3), lambda: run(5, tmp_path / "at.ckpt")
    )

    assert not torch.equal(*whole)
    assert all(map(torch.equal, whole, resumed))
